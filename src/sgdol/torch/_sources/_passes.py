"""Several backward passes in a step, or several ranks in a pass: accumulated gradients as independent ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sgdol.surrogate import symmetric_signal
from sgdol.torch._geometry import Geometry
from sgdol.torch._sources._gradients import Gradients, Signal, Wishes, settled
from sgdol.torch._sources._measures import Found, ratio
from sgdol.torch._sources._recorder import Recorder
from sgdol.torch._tensors import real_gradient
from sgdol.torch._world import Own, World, local, real_gradients

__all__ = ["Passes"]


class Passes:
    """The gradients that backward passes have accumulated in ``.grad``, here and on other ranks.

    Args:
        recorder: has counted and measured them.
        geometry: how long gradients are.
        world: gives the world that the optimizer is in.
        wishes: what is to be made of each parameter's gradients.
    """

    def __init__(self, recorder: Recorder, geometry: Geometry, world: Callable[[], World], wishes: Wishes) -> None:
        self._recorder = recorder
        self._geometry = geometry
        self._world = world
        self._wishes = wishes

    def take(self, params: list[Tensor]) -> Gradients | None:
        """All of them; None if there is only one."""
        world, passes = self._world(), self._recorder.count(params)
        paper = self._recorder.keeps_gradients and any(self._wishes(p).paper for p in params)
        ranks = 1 if paper else world.ranks
        if passes * ranks < 2:
            return None
        if paper and world.ranks > 1:
            raise ValueError(
                'estimator="paper" takes one backward per step() on each rank of DistributedDataParallel, got '
                f'{passes}; estimator="symmetric" uses them all'
            )
        found = self._recorder.found(params)
        k = max(found.k, 1) * ranks
        vectors = real_gradients(params)
        squares = {
            # A gradient that no pass made is a single contribution, unless it is another rank's.
            i: s if found.seen[i] or world.ranks > 1 else self._geometry.products(params[i], vectors[i], vectors[i])
            for i, s in found.squares.items()
        }
        n, q, factors, squares = _over_ranks(params, found, squares, world)
        signals = {i: Signal(s, k / (k - 1), -k / (k - 1)) for i, s in squares.items()}
        gradients = Gradients(k, params, vectors, 1.0, n, symmetric_signal(n, q, k), signals)
        return settled(self._with_pairs(gradients, found, factors) if paper else gradients, self._geometry)

    def _with_pairs(self, gradients: Gradients, found: Found, factors: Tensor | None) -> Gradients:
        """The paper's estimator for the parameters that want it: the first two of the gradients."""
        rows = list(found.gradients)
        params = [gradients.params[i] for i in rows]
        first: list[Tensor] = []
        second: list[Tensor] = []
        for i, contributions in found.gradients.items():
            scale = found.k if factors is None else found.k * factors[i].sqrt()
            for part, number in ((first, 0), (second, 1)):
                g = contributions.get(number)
                g = torch.zeros_like(local(gradients.params[i])) if g is None else real_gradient(g) * scale
                part.append(real_gradient(g))
        n, u = gradients.n.clone(), gradients.u.clone()
        own = torch.stack(
            [self._geometry.inner(params, first, first, n), self._geometry.inner(params, first, second, n)]
        )
        own = self._world().total(params, own)
        n[rows] = own[0] + 0 * n[rows]  # not a number, if any of the gradients that are not used is none
        u[rows] = own[1]
        vectors, signals = list(gradients.vectors), dict(gradients.signals)
        for i, a, b in zip(rows, first, second, strict=True):
            vectors[i] = a
            if self._wishes(gradients.params[i]).coordinates:
                signals[i] = Signal(self._geometry.products(gradients.params[i], a, b), 0.0, 1.0)
        k = gradients.k if len(rows) < len(gradients.params) else 2
        return gradients._replace(k=k, vectors=vectors, n=n, u=u, signals=signals)


def _over_ranks(
    params: list[Tensor], found: Found, squares: dict[int, Tensor], world: World
) -> tuple[Tensor, Tensor, Tensor | None, dict[int, Tensor]]:
    """(n, q) over all ranks in the scale of ``.grad`` now, by what squares were multiplied for that, and squares."""
    if world.ranks == 1 and not world.spread and found.before is found.n and all(found.seen):
        return found.n, found.q, None, squares
    q = found.q
    if squares and world.spread:
        q = q.clone()
        q[list(squares)] = _totals(squares, q)
    own = Own(torch.stack([found.n, found.before]), q, q.new_tensor(found.seen), list(squares.values()), found.k)
    if squares and len(squares) < len(params) and world.ranks > 1:  # each in its own precision
        shared = world.share(params, own._replace(squares=[]))
        own = shared._replace(squares=world.share(params, own).squares)
    else:
        own = world.share(params, own)
    n, before = own.rows
    factors = ratio(n, before)
    # A gradient that no pass made on any rank, or that nobody averages over the ranks, is a single contribution.
    single = own.seen == 0
    if world.spread:
        single |= ~torch.tensor([world.averages(p) for p in params], device=single.device)
    squares = {
        i: s.mul_(factors[i].to(s)) if found.seen[i] or world.ranks > 1 else s
        for i, s in zip(squares, own.squares, strict=True)
    }
    q = own.q * factors
    if squares and world.ranks > 1:
        q[list(squares)] = _totals(squares, q)
    return n, torch.where(single, n, q), factors, squares


def _totals(squares: dict[int, Tensor], like: Tensor) -> Tensor:
    return torch.stack([s.sum(dtype=like.dtype) for s in squares.values()]).to(like)
