"""The base class of both optimizers: it watches backward passes, knows the world, and can average."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

    A subclass defines ``_metric_of``, calls ``_prepare`` before ``Optimizer.__init__``, and calls ``_assemble`` when
    its groups or its state are replaced. What the parts of an optimizer keep must not keep the optimizer alive:
    ``_metric_of``, ``_ratios`` and ``_world`` are functions without a reference to it.
    """

    _passes: Passes | None
    _finder: Finder | None
    _metrics: Metrics
    _world: Callable[[], World]

    def _prepare(self) -> None:
        self._warned: tuple[str, ...] = ()
        self._warnings = Warnings(self._warn)
        self._passes, self._finder = None, None
        self._layout: Layout | None = None
        self._swapped = False

    @property
    def _metric_of(self) -> Callable[[dict[str, Any]], Metric]:
        raise NotImplementedError

    @property
    def _ratios(self) -> Callable[[], list[float]] | None:
        """Gives the factor rho of each group, which is measured in the metric D/rho; None for 1."""
        return None

    def _measured(self) -> Measured:
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

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if self._swapped:
            raise RuntimeError("the averaged weights are in the parameters already: averaged() does not nest")
        params = [p for p in self._params() if "average" in self.state.get(p, ())]
        try:
            with torch.no_grad():
                averages = [local(self.state[p]["average"]) for p in params]
                # The average of a complex parameter may be kept as pairs of real numbers.
                pairs = zip(map(local, params), averages, strict=True)
                pieces = [p if average.is_complex() else real_view(p) for p, average in pairs]
            with swapped_in(pieces, averages):
                self._swapped = True
                self._world().reshard()  # FSDP2 keeps gathered copies of the parameters
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
        with nullcontext() if self._swapped else self.averaged():
            return {name: value.detach().clone() for name, value in model.state_dict().items()}

    # Watching ---------------------------------------------------------------------------------------------------------

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _assemble(self) -> None:
        params, earlier, self._passes = self._params(), self._passes, None
        if earlier is not None:
            earlier.remove()  # else the hooks of both would run
        self._refuse_subclasses(params)
        if self._finder is None or any(map(is_sharded, params)):
            earlier = None  # counts of sharded parameters cannot be continued with more parameters
        self._finder = finder = Finder(params, self._measured(), self)
        self._world = lambda: finder.world  # without a reference to self
        self._metrics = Metrics(self.param_groups, self._metric_of, self.state, self._world, self._ratios)
        self._layout = None
        self._passes = Passes(params, self._watched, self._finder, self._metrics, self._warn, earlier)

    def _watched(self) -> Layout:
        return self._layout_of(
            [
                [p for p in group["params"] if not is_lazy(p) and (p.requires_grad or p.grad is not None)]
                for group in self.param_groups
            ]
        )

    def _layout_of(self, members: list[list[Tensor]]) -> Layout:
        """The layout of the parameters that take part, one list per group: a new one only if something has changed."""
        watched = None if self._passes is None else self._passes.layout
        for layout in (self._layout, watched):
            if layout is not None and layout.serves(members):
                break
        else:
            layout = Layout(self.param_groups, members, self._metrics.merges, self.state)
        if layout is not self._layout:
            layout.forget()  # the layout that was used before may have put other tensors into the state
            self._layout = layout
        return layout

    def _forget_other_shapes(self) -> None:
        for p in self._params():
            # A metric's state need not have the parameter's shape.
            values = [v for key, v in self.state.get(p, {}).items() if not key.startswith("metric.")]
            tensors = [v for v in values if isinstance(v, Tensor) and v.dim()]
            if any(v.shape[: p.dim()] != p.shape for v in tensors):  # complex numbers may be pairs of real ones
                del self.state[p]

    def _refuse_subclasses(self, params: list[Tensor]) -> None:
        for index, p in enumerate(params):
            if p.requires_grad and not is_sharded(p) and not is_lazy(p) and type(local(p.detach())) is not Tensor:
                raise TypeError(
                    f"{type(self).__name__} cannot train parameter {index}, a {type(p).__name__} of shape "
                    f"{tuple(p.shape)}: the numbers of such a tensor subclass may not be readable. Use an ordinary "
                    "tensor; DTensor and subclasses that only add methods are supported"
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
        """Warn once, pointing at the first frame that is neither torch's nor ours: the training loop."""
        if message in self._warned:
            return
        self._warned = (*self._warned, message)
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "sgdol"):
            level, frame = level + 1, frame.f_back
        warnings.warn(message, UserWarning, stacklevel=level)
