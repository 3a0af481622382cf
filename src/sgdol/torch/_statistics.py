"""The independent gradients of one update, reduced to the direction and the numbers (u, n)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.surrogate import Estimator, MomentumStatistics, momentum_signal, symmetric_signal
from sgdol.torch._blocks import Blocks
from sgdol.torch._passes import Contributions, real_gradient, real_view, scalar_dtype, squared_norms, wide_dtype
from sgdol.torch._ranks import Ranks, check_counts
from sgdol.torch._shards import Shards, local_gradient

__all__ = ["Draw", "from_contributions", "from_pair", "from_shards", "inner", "with_momentum"]


class Draw(NamedTuple):
    """What an update is made of. The direction of parameter i is ``scales[i] * vectors[i]``."""

    vectors: list[Tensor]
    """Real tensors, one per parameter; not to be written to."""
    scales: list[Any]
    """The same within a parameter group."""
    n: Tensor
    """||d||^2 of each parameter's direction."""
    u: Tensor
    """The signal <d, grad f>, summed over each cell of the blocks."""
    squares: list[Tensor]
    """Where blocks are coordinates: the sum of squares Q of each, which surrogate.symmetric_signal turns into its
    signal; may be written to."""
    signals: list[Tensor]
    """Or, where the signal of each coordinate was measured itself: that."""
    k: int
    """How many gradients there were."""
    lengths: Sequence[Tensor] = ()
    """Where blocks are coordinates: the n of each, if it is not the square of the direction's entry."""
    momentum: Tensor | None = None
    """Where parameters are spread over ranks: <m_{t-1}, g> and ||m_t||^2 of each, summed together with the rest."""


def from_contributions(blocks: Blocks, found: Contributions, ranks: Ranks) -> Draw:
    """The symmetric estimator on gradients that have been accumulated into ``.grad``, here and on other ranks."""
    k = max(found.k, 1) * ranks.count
    vectors = [real_gradient(local_gradient(p)) for p in blocks.params]
    scales = [1.0] * len(vectors)
    if blocks.granularity != "coordinate":
        q = ranks.sum_of_squares(blocks.cells(_attributed(found, ranks)), found.k)
        return Draw(vectors, scales, found.n, symmetric_signal(blocks.cells(found.n), q, k), [], [], k)
    known = zip(found.squares, found.seen, vectors, strict=True)
    squares = [s if seen or ranks.count > 1 else v.to(s.dtype).square() for s, seen, v in known]
    squares, q = ranks.sums_of_squares(squares, _attributed(found, ranks), found.k)
    return Draw(vectors, scales, found.n, symmetric_signal(found.n, q, k), squares, [], k)


def from_shards(blocks: Blocks, found: Contributions, shards: Shards, ranks: int, momenta: list[Tensor] | None) -> Draw:
    """The same on gradients that are spread over ranks, as is everything that is known about them.

    Args:
        blocks: which coordinates share a step size.
        found: what this rank knows.
        shards: the ranks.
        ranks: how many of them have an independent gradient in each pass.
        momenta: m_{t-1} of each parameter, if the statistics are those of the momentum's direction.
    """
    k = found.k * ranks
    vectors = [real_gradient(local_gradient(p)) for p in blocks.params]
    scales = [1.0] * len(vectors)
    rows = [found.n, found.before]
    if blocks.granularity == "coordinate":
        rows.append(_totals(found.squares, found.n))
    passes = torch.full_like(found.q, found.k)
    own = torch.stack([found.q, found.n.new_tensor(found.seen), passes, passes.square()])
    more = _momentum_rows(blocks, vectors, scales, momenta, found.n)
    total, own = shards.sums(blocks.params, torch.cat([torch.stack(rows), more]), own)
    check_counts(own[2:, 0], shards.size)
    q = own[0] if blocks.granularity != "coordinate" else total[2]
    found = found.rescaled(total[0], total[1], q)
    # A gradient that no pass made on any rank, or that nobody averages over the ranks, is a single contribution.
    counted = own[1] > 0
    if ranks > 1:
        counted &= torch.tensor(shards.averaged(blocks.params), device=counted.device)
    q = torch.where(counted, found.q, found.n)
    momentum = total[-2:] if len(more) else None
    if blocks.granularity != "coordinate":
        u = symmetric_signal(blocks.cells(found.n), blocks.cells(q), k)
        return Draw(vectors, scales, found.n, u, [], [], k, momentum=momentum)
    # Averaged gradients arrive on all ranks or on none.
    each = zip(found.squares, found.seen, vectors, strict=True)
    squares = [s if known else v.to(s.dtype).square() for s, known, v in each]
    return Draw(vectors, scales, found.n, symmetric_signal(found.n, q, k), squares, [], k, momentum=momentum)


def _momentum_rows(
    blocks: Blocks, vectors: list[Tensor], scales: list[Any], momenta: list[Tensor] | None, like: Tensor
) -> Tensor:
    """<m_{t-1}, g> and ||m_t||^2 of each parameter's piece, before it is known whether m_t is to be."""
    if momenta is None:
        return like.new_zeros(0, len(vectors))
    crosses, lengths = [], []
    for m, v, scale, group in zip(momenta, vectors, scales, blocks.group_of, strict=True):
        g = v.to(m.dtype) * scale
        crosses.append(inner(m, g).to(like))
        new = torch.lerp(m, g, 1 - blocks.momenta[group])
        lengths.append(inner(new, new).to(like))
    return torch.stack([torch.stack(crosses), torch.stack(lengths)])


def _attributed(found: Contributions, ranks: Ranks) -> Tensor:
    """The sums of squares; a gradient that no pass made, and that is not another rank's, is a single contribution."""
    if all(found.seen) or ranks.count > 1:
        return found.q
    return torch.where(torch.tensor(found.seen, device=found.q.device), found.q, found.n)


def from_pair(
    blocks: Blocks,
    first: list[Tensor],
    second: list[Tensor],
    estimator: Estimator,
    shards: Shards | None = None,
    momenta: list[Tensor] | None = None,
) -> Draw:
    """Either estimator on two gradients that are there themselves; the first ones are written to."""
    like = torch.zeros((), device=blocks.params[0].device, dtype=scalar_dtype(blocks.params[0].device))
    products = []
    for g1, g2 in zip(first, second, strict=True):
        a, b = real_view(g1), real_gradient(g2)
        wide = wide_dtype(a.dtype)
        products.append(a.to(wide) * b.to(wide) if blocks.granularity == "coordinate" else inner(a, b))
    vectors = [real_view(g) for g in first]
    scale = 1.0
    if estimator == "symmetric":
        vectors, scale = [v.add_(real_gradient(g)) for v, g in zip(vectors, second, strict=True)], 0.5
    scales = [scale] * len(vectors)
    # As inner products, like u: for two equal gradients u = n to the last bit.
    n = torch.stack([inner(v, v).to(like) for v in vectors]) * scale**2
    u = _totals(products, n) if blocks.granularity == "coordinate" else torch.stack([v.to(n) for v in products])
    momentum = None
    if shards is not None:
        more = _momentum_rows(blocks, vectors, scales, momenta, n)
        total, _ = shards.sums(blocks.params, torch.cat([torch.stack([n, u]), more]))
        n, u, momentum = total[0], total[1], total[2:] if len(more) else None
    if blocks.granularity == "coordinate":
        return Draw(vectors, scales, n, u, [], products, 2, momentum=momentum)
    return Draw(vectors, scales, n, blocks.cells(u), [], [], 2, momentum=momentum)


def with_momentum(
    blocks: Blocks,
    draw: Draw,
    momenta: list[Tensor],
    weights: list[Tensor],
    statistics: MomentumStatistics,
    ok: Tensor | None,
) -> Draw:
    r"""The draw of the direction m_t / w_t; the momenta m_{t-1} become m_t.

    Args:
        blocks: which coordinates share a step size.
        draw: that of the gradients themselves.
        momenta: m_{t-1} of each parameter.
        weights: w_t of each group, the sum of the weights in m_t: :math:`1 - \beta^t` if beta stays the same.
        statistics: whether (u, n) are those of the direction, or stay those of the gradients.
        ok: see :func:`sgdol.torch._update.update`.
    """
    crosses = []
    coordinates, raw = blocks.granularity == "coordinate", statistics == "gradient"
    each = zip(momenta, draw.vectors, draw.scales, strict=True) if raw and coordinates else ()
    lengths = [(v.to(m.dtype) * scale).square() for m, v, scale in each]
    betas = [blocks.momenta[group] for group in blocks.group_of]
    for m, v, scale, beta in zip(momenta, draw.vectors, draw.scales, betas, strict=True):
        g = v if v.dtype == m.dtype and scale == 1.0 else v.to(m.dtype) * scale
        if not raw and (coordinates or draw.momentum is None):
            crosses.append(m * g if coordinates else inner(m, g))
        m.lerp_(g, 1 - beta) if ok is None else m.copy_(torch.where(ok, torch.lerp(m, g, 1 - beta), m))
    scales = [1 / weights[group] for group in blocks.group_of]
    if raw:
        return draw._replace(vectors=momenta, scales=scales, squares=[], signals=_signals(draw), lengths=lengths)
    n = squared_norms(momenta, draw.n.device, draw.n.dtype) if draw.momentum is None else draw.momentum[1]
    n = n * torch.stack(scales).square()
    if coordinates:
        signals = _signals(draw)
        signals = [
            momentum_signal(cross, u, beta, weights[group].to(u))
            for cross, u, beta, group in zip(crosses, signals, betas, blocks.group_of, strict=True)
        ]
        if draw.momentum is None:
            return Draw(momenta, scales, n, _totals(signals, n), [], signals, draw.k)
        weight = torch.stack(weights)[blocks.group_of]
        u = momentum_signal(draw.momentum[0], draw.u, n.new_tensor(betas), weight)
        return Draw(momenta, scales, n, u, [], signals, draw.k)
    cross = blocks.cells(torch.stack([c.to(n) for c in crosses]) if draw.momentum is None else draw.momentum[0])
    beta_of = blocks.cell_values([n.new_tensor(beta) for beta in blocks.momenta])
    u = momentum_signal(cross, draw.u, beta_of, blocks.cell_values(weights))
    return Draw(momenta, scales, n, u, [], [], draw.k)


def _signals(draw: Draw) -> list[Tensor]:
    """The signal of each coordinate, where blocks are coordinates."""
    known = zip(draw.vectors, draw.squares, strict=True) if draw.squares else ()
    return draw.signals or [symmetric_signal(v.to(q.dtype).square(), q, draw.k) for v, q in known]


def inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b>, in float32 or wider."""
    wide = wide_dtype(a.dtype)
    if a.dtype != wide or b.dtype != wide:
        a, b = a.to(wide), b.to(wide)
    return torch.dot(a.reshape(-1), b.reshape(-1))


def _totals(tensors: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack([t.sum().to(like) for t in tensors])
