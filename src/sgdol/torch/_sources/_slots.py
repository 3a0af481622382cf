"""What is known of one watched parameter between two steps."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from sgdol.torch._tensors import real_gradient, wide_dtype
from sgdol.torch._world import Tap, is_sharded, local

__all__ = ["Keep", "Slot", "entries", "version", "wide_like"]

Keep = Literal["norms", "squares", "gradients"]
"""What is kept of the contributions to a parameter: a number, a tensor of squares, or the first two themselves."""

ENTRIES = 16
"""How many entries of a gradient are compared to notice that it was written to."""


class Slot:
    """One watched parameter."""

    __slots__ = (
        "count",
        "expected",
        "first",
        "fresh",
        "gradients",
        "keep",
        "lazy",
        "ordinary",
        "param",
        "previous",
        "readable",
        "reduces",
        "seen",
        "seen_version",
        "shared",
        "squares",
        "tap",
        "together",
    )

    def __init__(self, param: Tensor, keep: Keep) -> None:
        self.param = param
        self.keep = keep
        self.ordinary = type(param) in (Tensor, Parameter)
        self.readable = _is_readable(param)
        self.together = False  # whether it is measured with others that are small
        self.shared = False  # by several graph tasks of one backward
        self.tap = Tap()
        self.reduces = False  # by fully_shard, which writes .grad itself
        self.seen: Any = None
        self.seen_version = -1
        self.squares: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        self.count = 0
        self.first = 0  # the number of the pass that brought the first contribution
        self.lazy = False  # whether .grad is the only contribution, of which nothing else is known
        self.fresh = True  # the memory of the squares stays: allocating it anew costs more than filling it
        self.previous: Tensor | None = None  # of a sharded one: its gradient before the backward that runs
        self.gradients: dict[int, Tensor] = {}
        self.expected: tuple[Tensor, Tensor] | None = None

    def expect(self, gradient: Tensor) -> None:
        """Note, if a hook may change ``.grad`` as soon as this has been added, what it would be without: a few entries.

        Such a hook runs in the middle of a backward, where nothing else tells of it.
        """
        if self.readable and self.param._post_accumulate_grad_hooks and not self.reduces and self.dense():
            before, new = entries(self.param.grad), entries(gradient)  # type: ignore[arg-type]
            self.expected = (before + new, before.abs() + new.abs()) if len(before) == len(new) else None

    def unexpected(self) -> bool:
        """Whether ``.grad`` is not the sum that was noted, but for rounding."""
        noted, self.expected = self.expected, None
        if noted is None or not self.dense():
            return False
        error = (entries(self.param.grad) - noted[0]).abs()  # type: ignore[arg-type]
        return bool((error > 8 * torch.finfo(error.dtype).eps * noted[1].max()).any().tolist())

    def add_squares(self, products: Tensor, gradient: Tensor, precision: torch.dtype) -> None:
        """Add the products of the gradient with itself in its metric; Euclid's are taken here, in place."""
        if self.squares is None or _kind(self.squares) != (gradient.shape, gradient.device, precision):
            self.squares, self.fresh = wide_like(gradient, precision), True
        if products is not gradient:
            self.squares.copy_(products) if self.fresh else self.squares.add_(products)
        elif self.fresh:
            same = gradient.dtype == self.squares.dtype
            torch.mul(gradient, gradient, out=self.squares) if same else self.squares.copy_(gradient).square_()
        else:
            g = gradient.to(self.squares.dtype)
            self.squares.addcmul_(g, g)
        self.fresh = False

    def see(self) -> None:
        grad = self.param.grad
        self.seen = None if grad is None else weakref.ref(grad)
        self.seen_version = -1 if grad is None else version(grad)

    def untouched(self) -> bool:
        """Whether ``.grad`` is, as far as its version tells, still what the last backward left."""
        grad = self.param.grad
        if grad is None or self.seen is None:
            return self.reduces and grad is None and self.seen is None
        return self.seen() is grad and self.seen_version == version(grad)

    def zeroed(self) -> bool:
        """Whether there is no gradient, as far as a few entries tell; of an accelerator, as far as versions do."""
        if not self.dense():
            return True
        return not entries(self.param.grad).any().tolist() if self.readable else not self.untouched()  # type: ignore[arg-type]

    def dense(self) -> bool:
        return self.param.grad is not None and self.param.grad.layout == torch.strided


def _is_readable(param: Tensor) -> bool:
    """Whether the host may look at entries: not on an accelerator, nor of tensors that have none, as FakeTensor."""
    if type(param) in (Tensor, Parameter) or is_sharded(param) or is_lazy(param):
        return param.device.type == "cpu"
    return param.device.type == "cpu" and type(local(param.detach())) is Tensor


def version(grad: Tensor) -> int:
    """How often it was written to; of a DTensor, both as a whole and this rank's piece behind its back."""
    return grad._version if type(grad) is Tensor or not is_sharded(grad) else grad._version + local(grad)._version


def wide_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    dtype = wide_dtype(tensor.dtype) if dtype is None else dtype
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.device, torch.dtype]:
    return tensor.shape, tensor.device, tensor.dtype


def entries(gradient: Tensor) -> Tensor:
    """A few entries of a gradient, spread over it: a view of it, if its memory allows."""
    flat = real_gradient(local(gradient))
    if not flat.is_contiguous():
        flat = flat.reshape(-1) if flat.numel() <= ENTRIES else flat.select(0, 0).reshape(-1)[:ENTRIES]
    size = flat.numel()
    return flat.as_strided((min(size, ENTRIES),), (max(1, size // ENTRIES),))
