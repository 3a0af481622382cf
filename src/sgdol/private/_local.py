r"""Local privacy, as the paper's last section has it: every user sends one noised gradient, and trusts nobody.

A user's report is :math:`r_j = \mathrm{clip}_C(\nabla f_j(x)) + \sigma C z_j`. Reports of different users are
independent and have one mean, so the k users of a step *are* the k independent gradients of the surrogate: the
symmetric estimator subtracts sampling noise and privacy noise at once, knowing neither. Nothing but reports is used, so
the step size is post-processing and costs no privacy, whatever the users do or how the noise is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from opacus.accountants import RDPAccountant
from torch import Tensor

from sgdol.learners import Learner
from sgdol.private._multiplier import KEY, Multiplier, check_momentum, diagnostics, inner, with_momentum
from sgdol.surrogate import symmetric_signal

__all__ = ["LocalSGDOL", "local_epsilon", "randomize"]


def randomize(
    gradient: Sequence[Tensor],
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    r"""The user's side: the gradient clipped to length C, with N(0, (sigma C)^2) on every coordinate.

    A gradient that is not finite is replaced by 0: no noise hides a NaN. The length is computed in float64.

    Args:
        gradient: of the user's own loss, one tensor per parameter.
        max_grad_norm: C.
        noise_multiplier: sigma.
        generator: of the noise.

    >>> report = randomize([torch.tensor([3.0, 4.0])], max_grad_norm=1.0, noise_multiplier=0.0)
    >>> report[0].tolist()
    [0.6..., 0.8...]
    """
    for name, value in (("max_grad_norm", max_grad_norm), ("noise_multiplier", noise_multiplier)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
    # In float64, in which no finite gradient of a narrower type overflows.
    wide = [g.detach().double() for g in gradient]
    length = inner(wide, wide).sqrt()
    if not length.isfinite():
        wide = [torch.zeros_like(g) for g in wide]
    # 1 for a gradient of length 0: C/0 is infinite, or NaN where C is 0 too.
    factor = (max_grad_norm / length).nan_to_num(nan=1.0).clamp(max=1.0)
    return [
        (factor * w).to(g.dtype)
        + noise_multiplier * max_grad_norm * torch.randn(g.shape, generator=generator, dtype=g.dtype, device=g.device)
        for g, w in zip(gradient, wide, strict=True)
    ]


def local_epsilon(noise_multiplier: float, delta: float, reports: int = 1) -> float:
    r"""The epsilon of a user who sends ``reports`` reports, an upper bound by Opacus' Rényi accountant.

    Locally, any two gradients of the user must look alike: they are up to 2C apart, so the noise multiplier counts
    half, and there is no sampling that would amplify.

    Args:
        noise_multiplier: sigma, positive and finite.
        delta: in (0, 1).
        reports: how many reports the user sends in all, at least 1.

    >>> local_epsilon(8.0, 1e-5) < local_epsilon(4.0, 1e-5)
    True
    """
    # Without these checks a sigma of -1 is squared by the accountant and passes for 1.
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ValueError(f"noise_multiplier must be positive and finite, got {noise_multiplier!r}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta!r}")
    if isinstance(reports, bool) or not isinstance(reports, int) or reports < 1:
        raise ValueError(f"reports must be a whole number of at least 1, got {reports!r}")
    accountant = RDPAccountant()
    for _ in range(reports):
        accountant.step(noise_multiplier=noise_multiplier / 2, sample_rate=1.0)
    return accountant.get_epsilon(delta)


class LocalSGDOL(torch.optim.Optimizer):
    r"""The server's side: ``receive`` the reports of a step's users, then ``step()``.

    With k reports, :math:`d = \frac1k \sum_j r_j`, :math:`u = \frac{1}{k(k-1)} \sum_{i \ne j} \langle r_i, r_j\rangle`
    and :math:`n = \|d\|^2`, or with momentum those of the averaged direction; only the sum of the reports and the sum
    of their squared lengths are kept.

    Args:
        params: parameters or groups of them, as in torch.optim.
        lr: the base rate 1/M.
        momentum: beta, in [0, 1).
        alpha: how strongly to hold on to the base rate, in units of n; None for kappa times the first n.
        kappa: that factor, positive.
        learner: the online learner of the multiplier; None for FTRL, the paper's.

    >>> x = torch.nn.Parameter(torch.zeros(2))
    >>> server = LocalSGDOL([x], lr=0.5)
    >>> for gradient in ([1.0, 0.0], [1.0, 2.0]):
    ...     server.receive([torch.tensor(gradient)])
    >>> server.step()
    >>> x.tolist()
    [-0.5, -0.5]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        alpha: float | None = None,
        kappa: float = 1.0,
        learner: Learner | None = None,
    ) -> None:
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"lr must be positive and finite, got {lr!r}")
        check_momentum(momentum)
        self.momentum = float(momentum)
        self._multiplier = Multiplier(alpha, kappa, learner)
        super().__init__(params, {"lr": lr})

    def _numbers(self, name: str) -> dict[str, Any]:
        """Numbers that belong to no parameter; torch keeps them in ``state_dict()`` under their name."""
        state: dict[Any, Any] = self.state
        return state[name]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def receive(self, report: Sequence[Tensor]) -> None:
        """Add one user's report, one tensor per parameter in the order of the parameters."""
        parameters = self._parameters()
        shapes, expected = [tuple(r.shape) for r in report], [tuple(p.shape) for p in parameters]
        if shapes != expected:
            raise ValueError(f"a report must hold one tensor per parameter, of the shapes {expected}, got {shapes}")
        waiting = self._numbers("reports")
        waiting["count"] = waiting.get("count", 0) + 1
        waiting["squares"] = waiting.get("squares", 0.0) + inner(report, report)
        for p, r in zip(parameters, report, strict=True):
            self.state[p]["sum"] = self.state[p]["sum"] + r if "sum" in self.state[p] else r.clone()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the reports received since the last; at least two are needed."""
        if closure is not None:
            raise ValueError("LocalSGDOL has no data to evaluate a closure on: give it reports by receive()")
        waiting = self._numbers("reports")
        k = waiting.get("count", 0)
        if k < 2:
            raise ValueError(f"a step needs the reports of at least 2 users, got {k}")
        states, numbers = [self.state[p] for p in self._parameters()], self._numbers(KEY)
        mean = [state.pop("sum") / k for state in states]
        signal = symmetric_signal(inner(mean, mean), waiting["squares"] / k**2, k)
        waiting.clear()
        direction, u = with_momentum(states, mean, signal, self.momentum, numbers.get("updates", 0))
        multiplier = self._multiplier.step(numbers, u, inner(direction, direction))
        remaining = iter(direction)
        for group in self.param_groups:
            group["step_size"] = group["lr"] * multiplier
            for p in group["params"]:
                d = next(remaining)
                p.sub_(group["step_size"].to(device=d.device, dtype=d.dtype) * d)

    def diagnostics(self) -> dict[str, float]:
        """The multiplier, the number of updates and the signal-to-noise ratio; all of it from reports."""
        return diagnostics(self._numbers(KEY))
