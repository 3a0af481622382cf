r"""SGDOL on Opacus: the learned step size is a function of what DP-SGD releases anyway.

What DP-SGD releases at step t is :math:`R_t = \sum_{i \in S_t} c_i + \sigma C z_t`: the sum of the gradients of a
Poisson sample, each clipped to length C, and Gaussian noise. Everything in this file is a function of the releases
:math:`R_1, \dots, R_t` and of public numbers (sigma, C, the expected batch size B, the dimension d): post-processing,
which costs no privacy. The accountant's own hook runs before it and sees what it always sees. Where a source asks
for another release than Opacus' (``"halves"``), its method says why that costs the same.

With :math:`g_t = R_t/B`, :math:`E_t g_t = G(x_t)`, the mean clipped gradient, and
:math:`E_t \|g_t\|^2 = \|G\|^2 + V_t + d \sigma^2 C^2/B^2`, where :math:`V_t = q(1-q) \sum_i \|c_i\|^2/B^2 \le
C^2 q N/B^2` is the sampling noise. The surrogate needs a u with :math:`E_t u \le \langle d_t, G(x_t)\rangle`; equality
is best, and below is safe: Theorem 1 still bounds the decrease.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _generate_noise, _mark_as_processed
from torch import Tensor

from sgdol.learners import Learner
from sgdol.private._multiplier import KEY, Multiplier, check_momentum, diagnostics, inner, with_momentum
from sgdol.surrogate import symmetric_signal

__all__ = ["SOURCES", "PrivateSGDOL", "Source"]

Source = Literal["variance", "past", "pairs", "halves"]
SOURCES: tuple[str, ...] = get_args(Source)


class PrivateSGDOL(DPOptimizer):
    r"""The optimizer that ``make_private`` returned, with a step size that it learns: put it in its place.

    The update is :math:`x_{t+1} = x_t - \mathrm{lr}\, s_t d_t`, where ``lr`` is the base rate 1/M, the rate of the
    wrapped ``torch.optim.SGD``, which has no momentum (schedulers and parameter groups as usual), :math:`d_t` the
    average of the releases with momentum beta, and :math:`s_t \in [0, 2]` the learned multiplier.
    ``param_groups[i]["step_size"]`` is the step size that was used. Weight decay is the wrapped SGD's, at the rate lr.
    A sample whose gradient is not finite counts as one with gradient 0: clipping bounds no NaN
    (:meth:`clip_and_accumulate`).

    ============== ============================================================== ===============================
    source         u for the present gradient                                     E u = \|\|G\|\|^2 needs
    ============== ============================================================== ===============================
    ``"variance"`` \|\|g\|\|^2 minus all the noise that is known: injected, and   all gradients clipped; else it is
                   at most C^2 qN/B^2 from sampling                               below, which is safe
    ``"past"``     none: only <m_{t-1}, g_t> is used                              always below by (1-beta)\|\|G\|\|^2
    ``"pairs"``    <g_1, g_2> of two releases at one point: an update every       nothing
                   second step
    ``"halves"``   <h_1, h_2> of two halves, each with the whole noise            N large: it is low by at most C^2/N
    ============== ============================================================== ===============================

    All cost the privacy of DP-SGD, to the last digit. The default is "variance" with momentum: "past" is less noisy, by
    about a third at beta = 0.9, and the default adds the present gradient's share, (1-beta)\|\|G\|\|^2, to it.

    Args:
        optimizer: what ``PrivacyEngine.make_private`` returned: flat clipping, one process, per-sample gradients.
        source: where the signal of the present gradient comes from.
        momentum: beta, in [0, 1).
        alpha: how strongly to hold on to the base rate, in units of n; None for kappa times the first n.
        kappa: that factor, positive.
        learner: the online learner of the multiplier; None for FTRL, the paper's.

    Examples are in :mod:`sgdol.private`.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        *,
        source: Source = "variance",
        momentum: float = 0.9,
        alpha: float | None = None,
        kappa: float = 1.0,
        learner: Learner | None = None,
    ) -> None:
        _check(optimizer, source, momentum)
        # One memory for both: a noise scheduler or a BatchMemoryManager may have been given the optimizer itself.
        self.__dict__ = optimizer.__dict__
        self.source, self.momentum = source, float(momentum)
        self._multiplier = Multiplier(alpha, kappa, learner)
        self._apart: list[Tensor] = []

    # What is released -------------------------------------------------------------------------------------------------

    def clip_and_accumulate(self) -> None:
        """As Opacus', but a sample whose gradient is not finite adds nothing; with ``"halves"``, there are two sums.

        Clipping multiplies a gradient by ``min(1, C/length)``, and 0 times infinity is NaN: one sample with a finite
        input and an infinite gradient would make the release NaN, which no noise hides. Opacus' own optimizer has that
        hole. Here such a sample's gradient is set to 0, so each sample changes the sum by at most C.

        With ``"halves"`` every sample's clipped gradient goes to one of two sums by a fair coin. A sample changes one
        of the two sums, by at most C: together they have the sensitivity C of the one sum. The coins are drawn per
        sample and do not depend on the data. By position (the first half of the batch) would not do: a sample that is
        left out moves all that follow it, and both sums change.
        """
        for p in self.params:
            _check_processed_flag(p.grad_sample)
        _zero_what_is_not_finite(self.params)
        if self.source != "halves":
            super().clip_and_accumulate()
            return
        samples = self.grad_samples
        squares = torch.stack(
            [(g.reshape(len(g), p.numel()) ** 2).sum(1) for g, p in zip(samples, self.params, strict=True)]
        )
        factor = (self.max_grad_norm / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        coin = torch.randint(2, factor.shape, generator=self.generator, device=factor.device)
        sides = torch.stack([factor * coin, factor * (1 - coin)])
        for p, g in zip(self.params, samples, strict=True):
            sums = torch.einsum("hi,i...->h...", sides.to(p.dtype), g.to(p.dtype))
            p.summed_grad = sums if p.summed_grad is None else p.summed_grad + sums
            _mark_as_processed(p.grad_sample)

    def add_noise(self) -> None:
        """As Opacus'; with ``"halves"``, the noise of one release on each of the two sums."""
        if self.source != "halves":
            super().add_noise()
            return
        self._apart = []
        for p in self.params:
            _check_processed_flag(p.summed_grad)
            noise = _generate_noise(
                std=self.noise_multiplier * self.max_grad_norm,
                reference=p.summed_grad,
                generator=self.generator,
                secure_mode=self.secure_mode,
            )
            _mark_as_processed(p.summed_grad)
            released = p.summed_grad + noise
            p.grad = released.sum(0).view_as(p)
            self._apart.append((released[0] - released[1]).view_as(p))

    # What is done with it: post-processing ----------------------------------------------------------------------------

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Release (and account) as Opacus does, then make of the release the direction times the multiplier."""
        if not super().pre_step(closure):
            return False
        if not self.params:
            return True
        taken = self._take()
        if taken is None:
            return False
        gradient, signal = taken
        states = [self.state[p] for p in self.params]
        direction, u = with_momentum(states, gradient, signal, self.momentum, self.state[KEY].get("updates", 0))
        multiplier = self._multiplier.step(self.state[KEY], u, inner(direction, direction))
        for p, d in zip(self.params, direction, strict=True):
            p.grad = multiplier.to(device=d.device, dtype=d.dtype) * d
        for group in self.param_groups:
            group["step_size"] = group["lr"] * multiplier
        return True

    def _take(self) -> tuple[list[Tensor], Tensor] | None:
        """The gradient and the estimate of ||G||^2 from it, or None: not enough yet, or nothing that can be used."""
        gradient = [p.grad for p in self.params]
        n = inner(gradient, gradient)
        # The release is looked at, not the data: post-processing. No data make it infinite (clip_and_accumulate), only
        # a max_grad_norm or a noise multiplier at the end of the parameters' range does.
        if not torch.isfinite(n):
            self.state[KEY]["skipped"] = self.state[KEY].get("skipped", 0) + 1
            return None
        if self.source == "variance":
            return gradient, n - self._known_noise()
        if self.source == "past":
            return gradient, torch.zeros_like(n)
        if self.source == "halves":
            # With S the sum of two parts and A their difference, Q = (||S||^2 + ||A||^2)/2.
            apart = self._scale() ** 2 * inner(self._apart, self._apart)
            return gradient, symmetric_signal(n, (n + apart) / 2, 2)
        held = [self.state[p].pop("held", None) for p in self.params]
        if any(h is None for h in held):
            for p in self.params:
                self.state[p]["held"] = p.grad.clone()
            return None
        return [(h + g) / 2 for h, g in zip(held, gradient, strict=True)], inner(held, gradient)

    def _known_noise(self) -> float:
        """Of the injected noise d sigma^2 C^2/B^2, and of the sampling noise at most C^2 (B+1)/B^2, for qN < B + 1."""
        dimension = sum(p.numel() for p in self.params)
        sampled = (self.expected_batch_size + 1) * self.accumulated_iterations
        injected = dimension * self.noise_multiplier**2
        return self._scale() ** 2 * self.max_grad_norm**2 * (injected + sampled)

    def _scale(self) -> float:
        """What ``scale_grad`` multiplies the released sum by."""
        if self.loss_reduction == "sum":
            return 1.0
        return 1 / (self.expected_batch_size * self.accumulated_iterations)

    def diagnostics(self) -> dict[str, float]:
        """The multiplier, the numbers of updates and of skipped releases, and signal to noise; all from releases."""
        return diagnostics(self.state.get(KEY, {}))


def _zero_what_is_not_finite(params: Sequence[Any]) -> None:
    """Set the whole gradient of each sample to 0, in place, if its length is not a finite number in p's type.

    A finite gradient whose length overflows is set to 0 as well: clipping by C/inf would do the same to it.
    """
    batches = [p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample] for p in params]
    for of_one_batch in zip(*batches, strict=True):
        lengths = [
            # In the type in which the gradients are summed: a cast may overflow too.
            g.to(p.dtype).reshape(len(g), p.numel()).norm(dim=1).to(of_one_batch[0].device)
            for g, p in zip(of_one_batch, params, strict=True)
        ]
        finite = torch.stack(lengths).isfinite().all(0)
        for g in of_one_batch:
            g.masked_fill_(~finite.to(g.device).reshape(-1, *[1] * (g.dim() - 1)), 0)


def _check(optimizer: Any, source: Any, momentum: float) -> None:
    if type(optimizer) is not DPOptimizer:
        raise ValueError(
            "optimizer must be what PrivacyEngine.make_private returns with flat clipping, per-sample gradients and "
            f"one process (an opacus DPOptimizer), got {type(optimizer).__name__}"
        )
    if source not in SOURCES:
        raise ValueError(f"source must be one of {SOURCES}, got {source!r}")
    check_momentum(momentum)
    if source == "past" and momentum == 0:
        raise ValueError('source="past" reads the momentum, so momentum must be positive, got 0')
    if source == "variance" and optimizer.expected_batch_size is None:
        raise ValueError('source="variance" needs the expected batch size, which make_private gives; got None')
    wrapped = optimizer.original_optimizer
    if type(wrapped) is not torch.optim.SGD:
        raise ValueError(
            "make_private must be given torch.optim.SGD(parameters, lr), whose lr is the base rate 1/M of the learned "
            f"multiplier; got {type(wrapped).__name__}"
        )
    for group in wrapped.param_groups:
        if group["momentum"] or group["maximize"]:
            raise ValueError("the wrapped SGD must be plain: give momentum to PrivateSGDOL, and minimise")
