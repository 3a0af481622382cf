"""What all optimizers here have in common: they watch backward passes, know their world, and can average."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from sgdol.metrics import Euclidean, Metric
from sgdol.torch._averaging import swapped_in
from sgdol.torch._metric import Metrics
from sgdol.torch._passes import Passes
from sgdol.torch._vectors import Layout
from sgdol.torch._warnings import Warnings
from sgdol.torch._world import Finder, Measured, World, is_sharded, local, real_view

__all__ = ["WatchingOptimizer"]


class WatchingOptimizer(Optimizer):
    """An optimizer that sees every backward pass, on every rank.

    A subclass says in which metric a group is measured (``_metric_of``, a function that does not keep the optimizer
    alive), calls ``_prepare`` before ``Optimizer.__init__`` and ``_assemble`` whenever its groups or its state have
    become others.
    """

    _passes: Passes | None
    _finder: Finder | None
    _metrics: Metrics
    _world: Callable[[], World]
    """Gives the world that the optimizer is in, without keeping the optimizer alive."""

    def _prepare(self) -> None:
        """What there is before there are parameters."""
        self._warned: tuple[str, ...] = ()
        self._warnings = Warnings(self._warn)
        self._passes, self._finder = None, None
        self._layout: Layout | None = None
        self._swapped = False

    @property
    def _metric_of(self) -> Callable[[dict[str, Any]], Metric]:
        """The metric of a group."""
        raise NotImplementedError

    @property
    def _ratios(self) -> Callable[[], list[float]] | None:
        """Gives what the metric multiplies the steps of each group by, or None: it does not keep the optimizer."""
        return None

    def _measured(self) -> Measured:
        """What is measured of gradients that are in pieces on several ranks (see ``_world._fsdp``)."""
        return "whole" if all(isinstance(self._metric_of(group), Euclidean) for group in self.param_groups) else "mean"

    # The public face --------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, and forget the backward passes that made them."""
        super().zero_grad(set_to_none)
        if self._passes is not None:
            self._passes.reset()
            if self._passes.parameters_changed():
                self._forget_other_shapes()
                self._assemble()

    def averaged(self) -> AbstractContextManager[None]:
        """Put the averaged weights into the parameters, and take them out again."""
        return self._averaged()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Put the averages that are in the state into the parameters, and take them out again."""
        if self._swapped:
            raise RuntimeError("the averaged weights are in the parameters already: averaged() does not nest")
        known = [p for p in self._params() if "average" in self.state.get(p, ())]
        try:
            with torch.no_grad():
                averages = [local(self.state[p]["average"]) for p in known]
                # The average of a complex parameter may be kept as pairs of real numbers.
                pieces = [local(p) for p in known]
                pieces = [p if a.is_complex() else real_view(p) for p, a in zip(pieces, averages, strict=True)]
            with swapped_in(pieces, averages):
                self._swapped = True
                self._world().reshard()
                yield
        finally:
            self._swapped = False
            self._world().reshard()

    def averaged_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """``model.state_dict()`` with the averaged parameters in it: what to save for use. Buffers are the model's.

        >>> from sgdol import SGDOL
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = SGDOL(model.parameters(), lr=0.1, averaging=8)
        >>> sorted(opt.averaged_state_dict(model))
        ['bias', 'weight']
        """
        with self.averaged():
            return {name: value.detach().clone() for name, value in model.state_dict().items()}

    # Watching ---------------------------------------------------------------------------------------------------------

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _assemble(self) -> None:
        """Watch the parameters, in the metrics that they have: the groups or the state have become others."""
        params, earlier, self._passes = self._params(), self._passes, None
        if earlier is not None:
            earlier.remove()  # autograd keeps an accumulator as long as somebody does
        self._refuse_subclasses(params)
        if self._finder is None or any(map(is_sharded, params)):
            earlier = None  # what has been counted of pieces is not known of more of them
        self._finder = finder = Finder(params, self._measured(), self)
        self._world = lambda: finder.world
        self._metrics = Metrics(self.param_groups, self._metric_of, self.state, self._world, self._ratios)
        if self._metrics.warning is not None:
            self._warn(self._metrics.warning)
        self._layout = None
        self._passes = Passes(params, self._watched, self._finder, self._metrics, self._warn, earlier)

    def _watched(self) -> Layout:
        """The layout of all parameters that may get a gradient and have a shape."""
        return self._layout_of(
            [
                [p for p in group["params"] if not is_lazy(p) and (p.requires_grad or p.grad is not None)]
                for group in self.param_groups
            ]
        )

    def _layout_of(self, members: list[list[Tensor]]) -> Layout:
        """The layout of the parameters that take part, one list per group: the last one if nothing has changed."""
        watched = None if self._passes is None else self._passes.layout
        for known in (self._layout, watched):
            if known is not None and known.serves(members):
                break
        else:
            known = Layout(self.param_groups, members, self._metrics.merges, self.state)
        if known is not self._layout:
            known.forget()  # vectors are views of the state of the layout that was used last
            self._layout = known
        return known

    def _forget_other_shapes(self) -> None:
        """Drop what is known of parameters whose data have been replaced by others of another shape."""
        for p in self._params():
            held = [v for key, v in self.state.get(p, {}).items() if not key.startswith("metric.")]
            tensors = [v for v in held if isinstance(v, Tensor) and v.dim()]
            if any(v.shape[: p.dim()] != p.shape for v in tensors):  # complex numbers may be pairs of real ones
                del self.state[p]

    def _refuse_subclasses(self, params: list[Tensor]) -> None:
        for index, p in enumerate(params):
            if p.requires_grad and not is_sharded(p) and not is_lazy(p) and type(local(p.detach())) is not Tensor:
                raise TypeError(
                    f"{type(self).__name__} cannot train parameter {index}, a {type(p).__name__} of shape "
                    f"{tuple(p.shape)}: a tensor with kernels of its own need not have numbers that can be read. Use "
                    "an ordinary tensor; a DTensor and subclasses that only add methods are supported"
                )

    def _refuse_sparse(self, params: list[Tensor]) -> None:
        passes = self._passes
        if passes is not None and (passes.compiled or passes.overlapping):
            passes.refuse_uncounted(type(self).__name__)
        for index, p in enumerate(params):
            grad = p.grad
            if grad is not None and grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients: parameter {index} of shape "
                    f"{tuple(p.shape)} has a gradient of layout {grad.layout}; use a dense one (for instance "
                    "torch.nn.Embedding(..., sparse=False))"
                )

    def _warn(self, message: str) -> None:
        """Say this once, pointing at the training loop."""
        if message not in self._warned:
            self._warned = (*self._warned, message)
            warnings.warn(message, UserWarning, stacklevel=_caller())


def _caller() -> int:
    """The stack level, seen from whoever asks, of the first frame that is neither torch's nor ours."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "sgdol"):
        level, frame = level + 1, frame.f_back
    return level
