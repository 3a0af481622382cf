"""Repeat a call without side effects: with the same random numbers, and without a second update of buffers.

SGDOLFree evaluates some batches at two points. Dropout must drop the same units at both, or the difference of the
gradients is noise. BatchNorm's running statistics must be updated once. Autocast must cast the weights at each point.
The random numbers that the program draws afterwards must be those that it would have drawn without the second call.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = ["INTERESTED", "RUNNING", "Buffers", "Replay", "interested"]

HOST = torch.device("cpu")

RUNNING: dict[int, Replay] = {}  # by thread the call that it is running

# Of every optimizer that may repeat a call; weak, so that an optimizer is not kept alive.
INTERESTED: weakref.WeakValueDictionary[int, Buffers] = weakref.WeakValueDictionary()


def interested() -> list[Buffers]:
    # valuerefs() copies at once, while iterating would fail if another thread constructed an optimizer.
    return [buffers for buffers in (reference() for reference in INTERESTED.valuerefs()) if buffers is not None]


class _Saved(NamedTuple):
    """A buffer of a module, and a copy of its value."""

    owner: weakref.ref[torch.nn.Module]
    name: str
    tensor: Tensor
    value: Tensor

    def restore(self) -> bool:
        # Returns whether the buffer had changed.
        module = self.owner()
        if module is None or self.name not in module._buffers:
            return False
        replaced = module._buffers[self.name] is not self.tensor
        written = not torch.equal(self.tensor, self.value)  # batch_norm's kernel writes without raising the version
        if written:
            self.tensor.copy_(self.value)
        if replaced:
            module._buffers[self.name] = self.tensor
        return replaced or written


class Buffers:
    """The buffers that a forward may update: all at first, then those that a repeated call has been seen to update.

    An optimizer that repeats calls has one of these.

    Args:
        params: the optimizer's parameters. The devices they are on are those whose random numbers are repeated.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self._modules: list[weakref.ref[torch.nn.Module]] | None = None
        self._moving: list[tuple[weakref.ref[torch.nn.Module], str]] = []
        self._learned = False  # whether self._moving is known
        INTERESTED[id(self)] = self

    def saved(self) -> list[_Saved]:
        if not self._learned:
            return self.all()
        owners = ((owner(), name) for owner, name in self._moving)
        return [saved for module, name in owners if module is not None for saved in _save(module, name)]

    def all(self) -> list[_Saved]:
        if self._modules is None:
            # All live modules, because a hook on modules would not see inside compiled ones, and would make torch
            # compile them again. type(m), because isinstance() runs an object's own __class__, which may do anything.
            alive = gc.get_objects()
            self._modules = [weakref.ref(m) for m in alive if issubclass(type(m), torch.nn.Module) and m._buffers]
        owners = [owner() for owner in self._modules]
        return [saved for m in owners if m is not None for name in m._buffers for saved in _save(m, name)]

    def learn(self, changed: Iterable[_Saved]) -> None:
        moving = [(saved.owner, saved.name) for saved in changed]
        self._moving += [pair for pair in moving if pair not in self._moving]
        self._learned = True


class Replay:
    """A call that runs backward passes, with the random numbers, buffers and autocast that it started from.

    Args:
        call: runs the backward passes and returns the loss.
        buffers: of each optimizer that may repeat the call.
        passes: how many backward passes the call runs, if that is known.
        whole: False if the batch had fewer samples than passes were asked for.
    """

    def __init__(
        self, call: Callable[[], Any], buffers: Sequence[Buffers], passes: int = 0, *, whole: bool = True
    ) -> None:
        self._call, self._buffers = call, buffers
        self.passes, self.whole = passes, whole
        self.loss: Any = None  # of the first call; None if it raised an error
        self._scale: Any = 1.0
        devices = {p.device for one in buffers for p in one.params}
        self.accelerators = sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)

    def first(self) -> Any:
        self._random = _random_states(self.accelerators)
        self._casts = _autocast_states(self.accelerators)
        self._before = [saved for buffers in self._buffers for saved in buffers.saved()]
        self.loss = self._run()
        return self.loss

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the buffers from before the first call: running statistics that are not finite never recover."""
        for saved in self._before:
            saved.restore()

    def again(self) -> Any:
        """Repeat the call with the same random numbers and buffers, and restore those of now afterwards."""
        random_now = _random_states(self.accelerators)
        # All buffers, also those that no call was seen to change: this call may be the first to do it.
        buffers_now = [saved for buffers in self._buffers for saved in buffers.all()]
        _set_random_states(self._random)
        self.undo()  # a forward may read the buffers that it updates, as spectral_norm does
        # The cache holds casts of the weights at the other point.
        torch.clear_autocast_cache()
        with ExitStack() as stack:
            for state in self._casts:
                stack.enter_context(torch.autocast(*state))
            try:
                return self._run()
            finally:
                torch.clear_autocast_cache()
                _set_random_states(random_now)
                with torch.no_grad():
                    changed = [saved for saved in buffers_now if saved.restore()]
                for buffers in self._buffers:
                    buffers.learn(changed)

    @property
    def scale(self) -> float:
        """The factor of a GradScaler: what the loss was multiplied by before its backward."""
        return float(self._scale)

    def on_backward(self, gradient: Tensor) -> None:
        """Hook on the loss, whose gradient is the factor that a GradScaler has multiplied it by."""
        self._scale = gradient.detach()
        RUNNING[threading.get_ident()] = self  # on an accelerator backwards run in a thread of autograd

    def _run(self) -> Any:
        # Hooks on parameters look here for the call that their backward belongs to.
        RUNNING[threading.get_ident()] = self
        try:
            return self._call()
        finally:
            for thread in [thread for thread, replay in list(RUNNING.items()) if replay is self]:
                RUNNING.pop(thread, None)


def _save(module: torch.nn.Module, name: str) -> list[_Saved]:
    tensor = module._buffers.get(name)
    if tensor is None or is_lazy(tensor):
        return []
    return [_Saved(weakref.ref(module), name, tensor, tensor.detach().clone())]


def _random_states(accelerators: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    states = {HOST: torch.get_rng_state()}
    for device in accelerators:
        states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_random_states(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device == HOST:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _autocast_states(accelerators: Iterable[torch.device]) -> list[tuple[str, torch.dtype, bool, bool]]:
    """The arguments of torch.autocast that give the state of now, for each type of device."""
    kinds = ["cpu", *sorted({d.type for d in accelerators if torch.amp.is_autocast_available(d.type)})]
    caches = torch.is_autocast_cache_enabled()
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), caches) for kind in kinds]
