"""What the paper leaves open, and how it was read."""

from __future__ import annotations

__all__ = ["READINGS"]

READINGS: tuple[tuple[str, str], ...] = (
    (
        "“additive white Gaussian noise” of level σ",
        "N(0, σ²) independently on each coordinate, fresh for g and for g′. Option --noise total: E‖noise‖² = σ²",
    ),
    (
        "E[‖∇f(x_k)‖²] vs. iterations",
        "running mean over s ≤ t of the true squared gradient norm at x_s, before update s: the expectation over"
        " Algorithm 1's uniformly random output. Then the mean over the repeats",
    ),
    ("the horizon", "not stated in the paper; T = 100,000 here, --horizon to change it"),
    (
        "“learning rates giving the best convergence rate”",
        "smallest running mean at T on the noiseless problem, over a 1-2-5 grid in each decade; on adult, f(x_T) must"
        " also be within 0.002 of the best, since steps that jump to the flat region have small gradients too",
    ),
    ("M of SGDOL", "1 / (SGD's best learning rate)"),
    (
        "SGD GL",
        "step min(1/M, √(2 (f_1 − f*)/M) / (σ √T)) with σ² the total variance: section 4's formula lacks a factor 1/√M",
    ),
    ("AdaGrad Global", "lr / (√(Σ_{s≤t} ‖g_s‖²) + 1e-10), the current gradient included"),
    ("Adam, RMSProp, AdaDelta, AMSGrad, AdaGrad Coordinate", "optax's with the usual defaults; only the rate is tuned"),
    ("Hypergradient", "SGD-HD, additive rule, of Baydin et al. (2018); its first rate and its β are both tuned"),
    ("minibatch of 1 or 50", "i.i.d. with replacement; g and g′ are two independent draws"),
    (
        "adult subsampling",
        "all 7,841 positives and 7,841 of the 24,720 negatives drawn without replacement by a named seed; x_1 = 0",
    ),
    ("SGDOL Coordinate", "α in each coordinate"),
)
"""What the paper leaves open, and how it was read."""
