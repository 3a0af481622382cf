"""The contenders on the larger networks: methods of the quality suite, and peers whose metric is a matrix.

Where a learning rate is tuned, it is tuned per network on half decades (1, 3, 10, ...) around ``USUAL``. Tuned peers
use no weight decay, since the training loss is compared, and warmup over 5 % of the steps followed by a cosine, but for
Schedule-Free, whose authors recommend warmup alone (30 steps here). What has a default is run as it comes.
"""

from __future__ import annotations

from typing import Any

from benchmarks.quality import methods
from benchmarks.quality.methods import Contender, Method

__all__ = ["BASELINE", "USUAL", "WARMUP", "contenders"]

BASELINE = "AdamW, warmup + cosine"
"""The contender that sets the targets, and that losses are relative to."""

WARMUP = 0.05
"""The share of the steps in which ``warmup-cosine`` rises to the learning rate."""

_SHAMPOO: dict[str, Any] = {
    "betas": (0.9, 0.99),
    "moving_average_for_momentum": True,
    "preconditioning_compute_steps": 20,
    "graft_type": 3,  # RMSProp: the length of each layer's step, so that learning rates are Adam's
}

METHODS: tuple[Method, ...] = (
    Method("adamw-warmup", "torch.optim:AdamW", {"weight_decay": 0.0}, rate="step", schedule="warmup-cosine"),
    Method("adamw", "torch.optim:AdamW", rate="step", default=1e-3, averaging="harness"),
    Method(
        "schedulefree-warmup",
        "schedulefree:AdamWScheduleFree",
        {"warmup_steps": 30},
        package="schedulefree",
        rate="step",
        modes=True,
    ),
    Method("muon", "benchmarks.networks.optimizers:MuonAdamW", rate="step", schedule="warmup-cosine"),
    Method(
        "soap",
        "pytorch_optimizer:SOAP",
        {"weight_decay": 0.0},
        package="pytorch_optimizer",
        rate="step",
        schedule="warmup-cosine",
    ),
    Method(
        "shampoo",
        "pytorch_optimizer:ScalableShampoo",
        _SHAMPOO,
        package="pytorch_optimizer",
        rate="step",
        schedule="warmup-cosine",
    ),
    *map(methods.get, ("schedulefree-adamw", "prodigy-cosine", "mechanic-adamw", "dog")),
    *map(methods.get, ("sgdol-rms", "sgdol-free", "sgdol-free-rms")),
)

USUAL = {
    "adamw-warmup": 3e-3,
    "schedulefree-warmup": 1e-2,
    "muon": 3e-3,
    "soap": 3e-3,
    "shampoo": 3e-3,
    "sgdol-rms": 0.1,
}
"""The middle of the first grid, by method."""


def contenders() -> list[Contender]:
    """The lines of the table for the methods that are installed, in the order in which they are run."""
    by_name = {m.name: m for m in METHODS}
    lines = [
        Contender(BASELINE, by_name["adamw-warmup"], "last", True),
        Contender("Schedule-Free AdamW, lr 0.0025", by_name["schedulefree-adamw"]),
        Contender("AdamW, lr 1e-3", by_name["adamw"]),
        Contender("AdamW + averaging, lr 1e-3", by_name["adamw"], "average"),
        Contender("SOAP, warmup + cosine", by_name["soap"], "last", True),
        Contender("Muon, warmup + cosine", by_name["muon"], "last", True),
        Contender("Schedule-Free AdamW, warmup", by_name["schedulefree-warmup"], "last", True),
        Contender("Prodigy, cosine", by_name["prodigy-cosine"]),
        Contender("Mechanic AdamW", by_name["mechanic-adamw"]),
        Contender("DoG + averaging", by_name["dog"], "average"),
        Contender("Shampoo, warmup + cosine", by_name["shampoo"], "last", True),
        Contender(methods.OURS_FREE, by_name["sgdol-free"], "average"),
        Contender(methods.OURS_FREE_RMS, by_name["sgdol-free-rms"], "average"),
        Contender(methods.OURS, by_name["sgdol-rms"], "average", True),
    ]
    return [c for c in lines if methods.available(c.method)]
