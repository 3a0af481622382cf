"""What all optimizers here have in common: they watch backward passes, know their world, and can average."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from sgdol.metrics import Euclidean, Metric
from sgdol.torch._averaging import swapped_in
from sgdol.torch._geometry import Geometry
from sgdol.torch._remarks import Remarks
from sgdol.torch._sources import Keep, Recorder, Wish
from sgdol.torch._tensors import real_view
from sgdol.torch._world import Finder, World, is_sharded, local

__all__ = ["WatchingOptimizer"]


class WatchingOptimizer(Optimizer):
    """An optimizer that sees every backward pass, on every rank.

    A subclass says what it wants of each parameter's gradients (``_wish``) and in which metric (``_metric_of``), calls
    ``_prepare`` before ``Optimizer.__init__`` and ``_assemble`` whenever its groups or its state have become others.
    """

    _geometry: Geometry
    _recorder: Recorder | None
    _finder: Finder | None

    def _prepare(self) -> None:
        """What there is before there are parameters."""
        self._warned: tuple[str, ...] = ()
        self._recorder, self._finder = None, None
        self._swapped = False

    def _wish(self, p: Tensor) -> Wish:
        """What is to be made of the parameter's gradients."""
        return Wish(paper=False, coordinates=False)

    def _metric_of(self, group: dict[str, Any]) -> Metric:
        """The metric of a group."""
        return Euclidean()

    # The public face --------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, and forget the backward passes that made them."""
        super().zero_grad(set_to_none)
        if self._recorder is not None:
            self._recorder.reset()
            if self._recorder.moulted():
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

    def _world(self) -> World:
        assert self._finder is not None
        return self._finder.world

    def _assemble(self) -> None:
        """Watch the parameters, in the metrics that they have: the groups or the state have become others."""
        params = self._params()
        self._refuse_subclasses(params)
        metrics = {p: self._metric_of(group) for group in self.param_groups for p in group["params"]}
        metrics = {p: metric for p, metric in metrics.items() if not isinstance(metric, Euclidean)}
        own = not metrics and not any(any(self._wish(p)) for p in params)
        if self._finder is None or any(map(is_sharded, params)):
            self._recorder = None  # what has been counted of pieces is not known of more of them
        self._finder = finder = Finder(params, own, self)
        self._geometry = Geometry(metrics, self.state, lambda: finder.world)
        if self._recorder is None:
            self._recorder = Recorder(finder, self._geometry, Remarks(self._warn))
        else:
            self._recorder.rebase(finder, self._geometry)
        self._watch()

    def _watch(self) -> None:
        """Watch also what is new, has been unfrozen, or has another type now."""
        assert self._recorder is not None
        self._recorder.watch((p, self._keep(p)) for p in self._params())

    def _forget_other_shapes(self) -> None:
        """Drop what is known of parameters whose data have been replaced by others of another shape."""
        for p in self._params():
            tensors = [v for v in self.state.get(p, {}).values() if isinstance(v, Tensor) and v.dim()]
            if any(v.shape[: p.dim()] != p.shape for v in tensors):  # complex numbers may be pairs of real ones
                del self.state[p]

    def _keep(self, p: Tensor) -> Keep:
        wish = self._wish(p)
        if wish.paper:
            return "gradients"
        return "squares" if wish.coordinates else "norms"

    def _refuse_subclasses(self, params: list[Tensor]) -> None:
        for index, p in enumerate(params):
            if p.requires_grad and not is_sharded(p) and not is_lazy(p) and type(local(p.detach())) is not Tensor:
                raise TypeError(
                    f"{type(self).__name__} cannot train parameter {index}, a {type(p).__name__} of shape "
                    f"{tuple(p.shape)}: a tensor with kernels of its own need not have numbers that can be read. Use "
                    "an ordinary tensor; a DTensor and subclasses that only add methods are supported"
                )

    def _refuse_sparse(self, params: list[Tensor]) -> None:
        if self._recorder is not None:
            self._recorder.refuse_compiled()
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
