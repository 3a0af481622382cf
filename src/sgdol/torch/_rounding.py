"""State in bfloat16: which vectors are kept in it, and rounding to it.

Rounding is stochastic: up or down with the probabilities that make the mean right. A decayed sum, to which each step
adds less than half a unit in the last place, would otherwise stand still.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from sgdol.torch._world import shard_of

__all__ = ["NARROW", "kept_dtype", "rounded", "seed_of"]

NARROW = torch.bfloat16

# An average forgets rounding errors too slowly: they would add up to percents of a weight.
NARROWED = frozenset({"momentum", "metric.square", "last_step"})

BLOCK = 1 << 12  # so many random numbers serve a whole tensor
PIECE = 1 << 16  # numbers that stay in the cache


def kept_dtype(group: dict[str, Any], name: str, wide: torch.dtype) -> torch.dtype:
    """The type in which a group's vector of this name is kept in the state."""
    return (group.get("state_dtype") or wide) if name in NARROWED else wide


def seed_of(group: dict[str, Any], param: Tensor, *which: Any) -> int:
    """The seed of one rounding: another one in every step and for every vector.

    It depends on nothing but the saved state, so that a resumed run rounds as it would have done, and on the piece of a
    parameter that a rank has, so that replicas of it stay equal.
    """
    evaluations = int(group.get("rule", {}).get("evaluations", 0))  # rises in every step, also in one that is skipped
    return zlib.crc32(repr((evaluations, which, shard_of(param))).encode())  # torch's generator takes 32 bits


def rounded(x: Tensor, seed: int) -> Tensor:
    """In bfloat16: each number is one of its two neighbours, and right on average; a number that bfloat16 has stays.

    >>> x = torch.full((10_000,), 1 + 2**-9)  # a quarter of the way from 1 to the next number
    >>> sorted(set(rounded(x, seed=0).tolist())), abs(rounded(x, seed=0).float().mean() - x[0]).item() < 1e-4
    ([1.0, 1.0078125], True)
    """
    bits = x.to(torch.float32).reshape(-1).view(torch.int32)
    out = torch.empty(x.shape, dtype=NARROW, device=x.device)
    block = min(BLOCK, max(len(bits), 1))
    blocks = -(-len(bits) // block)
    draws = torch.empty(-(-(block + blocks) // 4), dtype=torch.int64, device=x.device)
    # A generator of its own, so that nobody else's random numbers change. 64 bits are four numbers of 16.
    draws.random_(-(2**63), None, generator=torch.Generator(x.device).manual_seed(seed))
    noise, shifts = draws.view(torch.int16)[: block + blocks].split([block, blocks])
    at_once = PIECE // BLOCK if x.is_cpu else max(blocks, 1)
    pieces = bits.split(at_once * block), out.view(-1).view(torch.int16).split(at_once * block), shifts.split(at_once)
    for piece, target, shift in zip(*pieces, strict=True):
        # Modulo 2^16, noise + shift of any two numbers are independent, though few are drawn: drawing takes the time.
        uniform = (noise + shift.unsqueeze(1)).view(-1)[: len(piece)]
        # The upper half of a float32 is a bfloat16. Adding from 0 to 2^16 - 1 to the lower half carries as it should.
        target.copy_((piece + uniform).add_(1 << 15).bitwise_right_shift_(16))
    return out
