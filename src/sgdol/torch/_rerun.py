"""Making a call again so that nobody notices: the same random numbers, and no statistics updated twice.

The optimizer without M evaluates one batch at two points. Dropout must drop the same units at both, or the difference
of the gradients is noise; BatchNorm's running statistics must move once; autocast must cast the weights of the moment;
and the random numbers that the program draws afterwards must be those that it would have drawn without the second call.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = ["INTERESTED", "RUNNING", "Buffers", "Replay", "interested"]

HOST = torch.device("cpu")

RUNNING: dict[int, Replay] = {}
"""The call that is being made now, by thread."""

INTERESTED: weakref.WeakValueDictionary[int, Buffers] = weakref.WeakValueDictionary()
"""The buffers that optimizers know which may want a call to be made again."""


def interested() -> list[Buffers]:
    """Those of :data:`INTERESTED` that are still there."""
    # A list of references is made at once: another thread may be constructing an optimizer.
    return [some for some in (reference() for reference in INTERESTED.valuerefs()) if some is not None]


class _Saved(NamedTuple):
    """A buffer of a module as it was."""

    owner: weakref.ref[torch.nn.Module]
    name: str
    tensor: Tensor
    value: Tensor

    def restore(self) -> bool:
        """Make it again what it was; whether it had changed."""
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
    """Which buffers move in a forward, as far as an optimizer has seen; it exists as long as the optimizer does.

    Args:
        params: the optimizer's parameters, on whose devices random numbers may be drawn.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._modules: list[weakref.ref[torch.nn.Module]] | None = None
        self._moving: list[tuple[weakref.ref[torch.nn.Module], str]] = []
        self.known = False
        """Whether a call has shown which move."""
        INTERESTED[id(self)] = self

    @property
    def devices(self) -> set[torch.device]:
        """The accelerators."""
        return {p.device for p in self._params if p.device.type not in ("cpu", "meta")}

    def saved(self) -> list[_Saved]:
        """Those that are known to move, as they are; all, as long as that is not known."""
        if not self.known:
            return self.all()
        owners = ((owner(), name) for owner, name in self._moving)
        return [saved for module, name in owners if module is not None for saved in _save(module, name)]

    def all(self) -> list[_Saved]:
        """The buffers of every module that existed at the first call, as they are."""
        if self._modules is None:
            # A hook on modules would not see inside of compiled ones, and would have them compiled again. type() and
            # not isinstance(), which asks an object for its class: that may be code of somebody's.
            alive = gc.get_objects()
            self._modules = [weakref.ref(m) for m in alive if issubclass(type(m), torch.nn.Module) and m._buffers]
        owners = [owner() for owner in self._modules]
        return [saved for m in owners if m is not None for name in m._buffers for saved in _save(m, name)]

    def learn(self, moved: Iterable[_Saved]) -> None:
        """A second call has moved these."""
        found = [(saved.owner, saved.name) for saved in moved]
        self._moving += [one for one in found if one not in self._moving]
        self.known = True


class Replay:
    """A call that runs backward passes, and what it starts from: it can be made again from there.

    Args:
        call: runs the passes, and returns their loss.
        buffers: of the optimizers that may want it again.
        passes: how many backward passes it runs, if that is known.
        whole: whether that is as many as were asked for.
    """

    def __init__(
        self, call: Callable[[], Any], buffers: Sequence[Buffers], passes: int = 0, *, whole: bool = True
    ) -> None:
        self._call, self._buffers = call, buffers
        self.passes, self.whole = passes, whole
        self.loss: Any = None
        """What the first call returned; None if it raised an error."""
        self._scale: Any = 1.0
        self._accelerators = sorted({device for some in buffers for device in some.devices}, key=str)
        self._random: dict[torch.device, Tensor] = {}
        self._casts: list[dict[str, Any]] = []
        self._before: list[_Saved] = []

    def first(self) -> Any:
        """Make the call for the first time: what it returned."""
        self._random = _random_states(self._accelerators)
        self._casts = _autocast_states({HOST, *self._accelerators})
        self._before = [saved for some in self._buffers for saved in some.saved()]
        with self._here():
            self.loss = self._call()
        return self.loss

    @torch.no_grad()
    def undo(self) -> None:
        """Take back what the first call did to buffers: statistics of values that are not finite never recover."""
        for saved in self._before:
            saved.restore()

    def again(self) -> Any:
        """Make the call with the same random numbers and buffers; afterwards nothing shows that it was made."""
        after = _random_states(self._accelerators)
        now = [saved for some in self._buffers for saved in some.all()]
        _set_random_states(self._random)
        self.undo()  # spectral_norm and its like read what the first call wrote
        # A cast of the weights where they were must not be used where they are now, nor the other way round.
        torch.clear_autocast_cache()
        with ExitStack() as stack:
            stack.enter_context(self._here())
            for state in self._casts:
                stack.enter_context(torch.autocast(**state))
            try:
                return self._call()
            finally:
                torch.clear_autocast_cache()
                _set_random_states(after)
                with torch.no_grad():
                    moved = [saved for saved in now if saved.restore()]
                for some in self._buffers:
                    some.learn(moved)

    @property
    def scale(self) -> float:
        """What losses are multiplied by before they are differentiated: a GradScaler's factor."""
        return float(self._scale)

    def begun(self, gradient: Tensor) -> None:
        """A backward pass of this call has begun: the gradient of its loss."""
        self._scale = gradient.detach()
        self.joined()

    def joined(self) -> None:
        """A thread of autograd's has begun to run the passes of this call: an accelerator has its own."""
        RUNNING[threading.get_ident()] = self

    @contextmanager
    def _here(self) -> Iterator[None]:
        self.joined()
        try:
            yield
        finally:
            for thread in [thread for thread, replay in list(RUNNING.items()) if replay is self]:
                RUNNING.pop(thread, None)


def _save(module: torch.nn.Module, name: str) -> list[_Saved]:
    tensor = module._buffers.get(name)
    if tensor is None or is_lazy(tensor):
        return []
    return [_Saved(weakref.ref(module), name, tensor, tensor.detach().clone())]


def _random_states(accelerators: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    """The states of the generators that dropout may use: the host's, and those of these devices."""
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


def _autocast_states(devices: Iterable[torch.device]) -> list[dict[str, Any]]:
    """Arguments of ``torch.autocast`` that make it what it is now."""
    return [
        {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in sorted({device.type for device in devices})
        if torch.amp.is_autocast_available(kind)
    ]
