"""The independent gradients of one update, reduced to the direction and the numbers (u, n)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sgdol.surrogate import Estimator, momentum_signal, symmetric_signal
from sgdol.torch.blocks import Blocks
from sgdol.torch.passes import Contributions, real_view, scalar_dtype, squared_norms, wide_dtype
from sgdol.torch.ranks import Ranks

__all__ = ["Draw", "from_contributions", "from_pair", "gradient", "inner", "with_momentum"]


class Draw(NamedTuple):
    """What an update is made of. The direction of parameter i is ``scale * vectors[i]``."""

    vectors: list[Tensor]
    """Real tensors, one per parameter; not to be written to."""
    scale: float | Tensor
    n: Tensor
    """||d||^2 of each parameter's direction."""
    u: Tensor
    """The signal <d, grad f>, summed over each block (over each tensor, where blocks are coordinates)."""
    squares: list[Tensor]
    """Where blocks are coordinates: the sum of squares Q of each, which surrogate.symmetric_signal turns into its
    signal; may be written to."""
    signals: list[Tensor]
    """Or, where the signal of each coordinate was measured itself: that."""
    k: int
    """How many gradients there were."""


def from_contributions(blocks: Blocks, found: Contributions, ranks: Ranks) -> Draw:
    """The symmetric estimator on gradients that have been accumulated into ``.grad``, here and on other ranks."""
    k = max(found.k, 1) * ranks.count
    vectors = [real_view(gradient(p)) for p in blocks.params]
    if blocks.granularity != "coordinate":
        q = ranks.sum_of_squares(blocks.total(found.q))
        return Draw(vectors, 1.0, found.n, symmetric_signal(blocks.total(found.n), q, k), [], [], k)
    squares, q = ranks.sums_of_squares(found.squares, found.q)
    return Draw(vectors, 1.0, found.n, symmetric_signal(found.n, q, k), squares, [], k)


def from_pair(blocks: Blocks, first: list[Tensor], second: list[Tensor], estimator: Estimator) -> Draw:
    """Either estimator on two gradients that are there themselves; the first ones are written to."""
    like = torch.zeros((), device=blocks.params[0].device, dtype=scalar_dtype(blocks.params[0].device))
    products = []
    for i, (p, g1, g2) in enumerate(zip(blocks.params, first, second, strict=True)):
        if g1.shape != p.shape or g2.shape != p.shape:
            raise ValueError(
                f"the two gradients of a pair must have the parameter's shape: parameter {i} is {tuple(p.shape)}, "
                f"the first gradient {tuple(g1.shape)}, the second {tuple(g2.shape)}"
            )
        a, b = real_view(g1), real_view(g2)
        wide = wide_dtype(a.dtype)
        products.append(a.to(wide) * b.to(wide) if blocks.granularity == "coordinate" else inner(a, b))
    vectors = [real_view(g) for g in first]
    scale = 1.0
    if estimator == "symmetric":
        vectors, scale = [v.add_(real_view(g)) for v, g in zip(vectors, second, strict=True)], 0.5
    n = squared_norms(vectors, like.device, like.dtype) * scale**2
    if blocks.granularity == "coordinate":
        return Draw(vectors, scale, n, _totals(products, n), [], products, 2)
    return Draw(vectors, scale, n, blocks.total(torch.stack([v.to(n) for v in products])), [], [], 2)


def with_momentum(
    blocks: Blocks, draw: Draw, momenta: list[Tensor], beta: float, correction: Tensor, ok: Tensor | None
) -> Draw:
    """The draw of the direction m_t / (1 - beta^t); the momenta m_{t-1} become m_t."""
    crosses = []
    for m, v in zip(momenta, draw.vectors, strict=True):
        g = v.to(m.dtype) * draw.scale if draw.scale != 1.0 or v.dtype != m.dtype else v
        crosses.append(m * g if blocks.granularity == "coordinate" else inner(m, g))
        m.lerp_(g, 1 - beta) if ok is None else m.copy_(torch.where(ok, torch.lerp(m, g, 1 - beta), m))
    scale = 1 / correction
    n = squared_norms(momenta, draw.n.device, draw.n.dtype) * scale**2
    if blocks.granularity == "coordinate":
        signals = draw.signals or [
            symmetric_signal(v.to(q.dtype).square(), q, draw.k) for v, q in zip(draw.vectors, draw.squares, strict=True)
        ]
        signals = [momentum_signal(cross, u, beta, correction.to(u)) for cross, u in zip(crosses, signals, strict=True)]
        return Draw(momenta, scale, n, _totals(signals, n), [], signals, draw.k)
    cross = blocks.total(torch.stack([c.to(n) for c in crosses]))
    return Draw(momenta, scale, n, momentum_signal(cross, draw.u, beta, correction), [], [], draw.k)


def gradient(p: Tensor) -> Tensor:
    """The parameter's gradient, zero if it has none in this step."""
    return torch.zeros_like(p) if p.grad is None else p.grad


def inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b>, in float32 or wider."""
    wide = wide_dtype(a.dtype)
    return torch.dot(a.to(wide).reshape(-1), b.to(wide).reshape(-1))


def _totals(tensors: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack([t.sum().to(like) for t in tensors])
