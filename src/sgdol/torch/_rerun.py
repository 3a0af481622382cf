"""Calling a closure again so that nobody notices: the same random numbers, and no statistics updated twice.

The optimizer without M evaluates one batch at two points. Dropout must drop the same units at both, or the difference
of the gradients is noise; BatchNorm's running statistics must move once; and the random numbers that the program draws
afterwards must be those that it would have drawn without the second call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = ["Rerun"]

HOST = torch.device("cpu")


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


class Rerun:
    """Remembers what a call of the closure starts from, and can start it from there again.

    Args:
        devices: whose generators the closure may use, besides the host's.
    """

    def __init__(self, devices: set[torch.device]) -> None:
        self._accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
        self._random: dict[torch.device, Tensor] = {}
        self._moving: list[tuple[weakref.ref[torch.nn.Module], str]] = []
        self._known = False  # whether a call has shown which buffers move
        self._before: list[_Saved] = []

    def first(self, closure: Callable[[], Any]) -> Any:
        """What the closure returns, which is called for the first time in this step."""
        self._random = _random_states(self._accelerators)
        if not self._known:
            with _saving() as seen:
                result = closure()
            self._before = list(seen.values())
            return result
        owners = ((owner(), name) for owner, name in self._moving)
        self._before = [s for module, name in owners if module is not None for s in _save(module, name)]
        return closure()

    @torch.no_grad()
    def undo(self) -> None:
        """Take back what the first call did to buffers: statistics of values that are not finite never recover."""
        for saved in self._before:
            saved.restore()

    def again(self, closure: Callable[[], Any]) -> Any:
        """What the closure returns, with the same random numbers; afterwards nothing shows that it was called."""
        after = _random_states(self._accelerators)
        _set_random_states(self._random)
        with _saving() as seen:
            try:
                return closure()
            finally:
                _set_random_states(after)
                with torch.no_grad():
                    moved = [(saved.owner, saved.name) for saved in seen.values() if saved.restore()]
                self._moving += [m for m in moved if m not in self._moving]
                self._known = True


@contextmanager
def _saving() -> Iterator[dict[tuple[int, str], _Saved]]:
    """Inside, the buffers of every module are saved before it is called for the first time."""
    seen: dict[tuple[int, str], _Saved] = {}

    def save(module: torch.nn.Module, _: Any) -> None:
        for name in module._buffers:
            if (id(module), name) not in seen:
                for saved in _save(module, name):
                    seen[id(module), name] = saved

    hook = register_module_forward_pre_hook(save)
    try:
        yield seen
    finally:
        hook.remove()


def _save(module: torch.nn.Module, name: str) -> list[_Saved]:
    tensor = module._buffers.get(name)
    if tensor is None:
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
