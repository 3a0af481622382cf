r"""Momenta: :math:`m_t = \beta m_{t-1} + (1 - \beta) \bar g_t`, kept in the optimizer's state, and their products.

Everything that has to be known of an old momentum is taken on the way to the new one, in as few passes over memory as
can be: its product with the gradient tells both the signal of the new direction and what the last step was worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.torch._geometry import Geometry
from sgdol.torch._packs import Pack, pack
from sgdol.torch._tensors import inner, real_view, stacked, wide_dtype
from sgdol.torch._world import like_parameter, local

__all__ = ["Products", "advance", "advance_in_metric", "lerp", "momentum_of", "uses_momentum", "weigh"]


class Products(NamedTuple):
    """Numbers of each parameter, of this rank's pieces."""

    cross: Tensor
    """<m_{t-1}, D^-1 gbar_t>."""
    length: Tensor
    """<m_t, D^-1 m_t>."""
    last: Tensor
    """<gbar_t, d_{t-1}>, before it is divided by the weights of the old momentum."""


def uses_momentum(group: dict[str, Any]) -> bool:
    """Whether a group has or has had momentum."""
    return bool(group["momentum"]) or "momentum_weight" in group


def momentum_of(state: dict[Any, Any], p: Tensor) -> Tensor:
    """This rank's piece of m_{t-1} of a parameter, to be written to."""
    held = state[p]
    if "momentum" not in held:
        like = real_view(local(p))
        held["momentum"] = like_parameter(torch.zeros_like(like, dtype=wide_dtype(like.dtype)), p)
    return local(held["momentum"])


def weigh(group: dict[str, Any], like: Tensor, ok: Tensor | None) -> tuple[Any, Any]:
    """The weights by which the group's last and its new momentum are divided; schedulers may move beta."""
    beta = float(group["momentum"])
    old: Any = group.get("momentum_weight", 0.0)
    if ok is None:
        old = old.tolist() if isinstance(old, Tensor) else float(old)
        new = beta * old + (1 - beta)
        group["momentum_weight"] = like.new_tensor(new)
        return (old, new) if group["bias_correction"] else (1.0, 1.0)
    old = torch.as_tensor(old).to(like)
    new = torch.where(ok, beta * old + (1 - beta), old)
    group["momentum_weight"] = new
    return (old, new) if group["bias_correction"] else (torch.ones_like(new), torch.ones_like(new))


def advance(
    geometry: Geometry,
    params: Sequence[Tensor],
    momenta: list[Tensor],
    means: list[Tensor],
    beta: float,
    like: Tensor,
    ok: Tensor | None,
) -> Products:
    """Move momenta on by the mean gradients ``means``, where the direction is the momentum itself.

    Args:
        geometry: Euclid's.
        params: the parameters.
        momenta: written to.
        means: of the types of the momenta.
        beta: the momentum.
        like: a number of the type of the products.
        ok: None, or whether the update counts, on the device.
    """
    packed, others = pack(momenta, like) if ok is None else (None, [])
    if packed is None:
        cross = geometry.inner(params, momenta, means, like)
        lerp(momenta, means, beta, ok)
        return Products(cross, geometry.norms(params, momenta, like), cross)
    cross, length, _ = _packed(packed, None, momenta, means, None, beta, 1.0)
    if others:
        ps, ms, gs = ([values[i] for i in others] for values in (params, momenta, means))
        rest = advance(geometry, ps, ms, gs, beta, like, ok)
        cross, length = packed.merged(cross, rest.cross, others), packed.merged(length, rest.length, others)
    return Products(cross, length, cross)


def advance_in_metric(
    geometry: Geometry,
    params: Sequence[Tensor],
    momenta: list[Tensor],
    means: list[Tensor],
    directions: list[Tensor] | None,
    beta: float,
    inverse: Any,
    like: Tensor,
    ok: Tensor | None,
) -> Products:
    """The same where directions are D^-1 times momenta: D of each tensor is made once for all that needs it.

    Args:
        geometry: knows D.
        params: the parameters.
        momenta: written to.
        means: of the types of the momenta.
        directions: the last ones, overwritten by the new ones; None if nobody keeps them.
        beta: the momentum.
        inverse: one over the weight of the new momentum: a number, or a tensor where the host must not wait.
        like: a number of the type of the products.
        ok: None, or whether the update counts, on the device.
    """
    numbers: list[list[Tensor]] = [[], [], []]
    zero = like.new_zeros(())
    packed, others = pack(momenta, like) if ok is None else (None, list(range(len(momenta))))
    diagonal = None if packed is None else geometry.laid(params, packed)
    if packed is None or diagonal is None:
        packed, others = None, list(range(len(momenta)))
    for i in others:
        m, g = momenta[i], means[i]
        old = None if directions is None else directions[i]
        numbers[2].append(zero if old is None else inner(g, old))
        d_inverse = geometry.reciprocal(params[i], m)
        numbers[0].append(inner(m, g * d_inverse))
        lerp([m], [g], beta, ok)
        d = d_inverse.mul_(m)
        numbers[1].append(inner(m, d))
        if old is not None:
            new = d.mul_(inverse)
            old.copy_(new if ok is None else torch.where(ok, new, old))
    large = [stacked(each, like) for each in numbers]
    if packed is None or diagonal is None:
        return Products(*large)
    small = _packed(packed, diagonal, momenta, means, directions, beta, inverse)
    return Products(*(packed.merged(a, b, others) for a, b in zip(small, large, strict=True)))


def _packed(
    packed: Pack,
    diagonal: Tensor | None,
    momenta: list[Tensor],
    means: list[Tensor],
    directions: list[Tensor] | None,
    beta: float,
    inverse: float,
) -> list[Tensor]:
    """Move the momenta of small tensors on, and (cross, length, last) of :class:`Products`, from vectors that hold all.

    Args:
        packed: which of the tensors, and where they are in the vectors.
        diagonal: D of them, laid end to end; None if it is 1.
        momenta: of all tensors, as the other lists; written to.
        means: of the types of the momenta.
        directions: the last ones, overwritten by the new ones; None if nobody keeps them: last is cross then.
        beta: the momentum.
        inverse: one over the weight of the new momentum.
    """
    momenta, means = packed.chosen(momenta), packed.chosen(means)
    dtype = momenta[0].dtype
    m, g = packed.laid(momenta, dtype), packed.laid(means, dtype)
    cross = packed.sums(m, g if diagonal is None else g / diagonal)
    torch._foreach_lerp_(momenta, means, 1 - beta)
    m.lerp_(g, 1 - beta)
    d = m if diagonal is None else m / diagonal
    length, last = packed.sums(m, d), cross
    if directions is not None:
        kept = packed.chosen(directions)
        last = packed.sums(g, packed.laid(kept, dtype))
        packed.write(d.mul_(inverse).to(dtype), kept)
    return [cross, length, last]


def lerp(momenta: list[Tensor], means: list[Tensor], beta: float, ok: Tensor | None) -> None:
    """Move momenta on by the mean gradients, and look at nothing else."""
    if ok is not None:
        for m, g in zip(momenta, means, strict=True):
            m.copy_(torch.where(ok, torch.lerp(m, g, 1 - beta), m))
    elif len(momenta) > 1 and len({m.dtype for m in momenta}) == 1:
        torch._foreach_lerp_(momenta, means, 1 - beta)
    else:
        for m, g in zip(momenta, means, strict=True):
            m.lerp_(g, 1 - beta)
