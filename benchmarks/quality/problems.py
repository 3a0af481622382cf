"""The problems: what is minimised, from where, and with how many gradient evaluations.

Two halves with the same mix of kinds and different instances: other data, dimensions, condition numbers, noise, batch
sizes and architectures. :func:`development` is for choosing defaults; :func:`held_out` is run only to report. Both were
fixed before any method was measured on them.

>>> problem = get("rosenbrock-2d")
>>> problem.half, problem.kind, problem.budget
('development', 'rosenbrock', 1000)
>>> instance = problem.make(seed=1)
>>> instance.gap(instance.objective.evaluate())  # f(0, 0) - f*
1.0
>>> instance.loss(step=0, part=0, parts=2).backward()  # the first microbatch of two of the first step
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.quality import data
from benchmarks.quality.kinds import (
    adapters,
    classic,
    embeddings,
    generative,
    graphs,
    images,
    linear,
    physics,
    policies,
    sequences,
)
from benchmarks.quality.objectives import Objective
from benchmarks.quality.problem import HALVES, KINDS, Half, Instance, Problem, Scales

__all__ = ["HALVES", "KINDS", "Half", "Instance", "Problem", "Scales", "development", "get", "held_out", "suite"]

_ADULT_BEST = {"even": 0.1908166916, "odd": 0.1868565603}
"""The least adult loss that is known: of L-BFGS from zero and from the ends of eight long runs of Adam. The loss is not
convex, and these minima differ by up to 6e-4."""

_BELOW_ADULT = {part: best - 1e-3 * (0.5 - best) for part, best in _ADULT_BEST.items()}
"""What stands for f* there: a thousandth of the way below, so that nobody wins by which local minimum it is in."""


# The suite ------------------------------------------------------------------------------------------------------------


def _problems() -> list[Problem]:
    dev, held = HALVES
    even, odd = data.PARTS
    listed: list[Problem] = []

    def add(name: str, kind: str, half: Half, budget: int, build: Callable[..., Objective], **options: Any) -> None:
        optimum = options.pop("optimum", None)
        listed.append(Problem(name, kind, half, budget, build, options, optimum))

    def rescaled(name: str, loss: float = 1.0, parameters: float = 1.0) -> None:
        p = next(p for p in listed if p.name == name)
        suffix = f"f*{loss:g}" if parameters == 1 else f"x*{parameters:g}"
        listed.append(
            Problem(f"{name} {suffix}", p.kind, p.half, p.budget, p.build, p.options, p.optimum, loss, parameters)
        )

    add("rosenbrock-2d", "rosenbrock", dev, 1000, classic.rosenbrock, dimension=2, sigma=0.2)
    add("rosenbrock-10d", "rosenbrock", dev, 1000, classic.rosenbrock, dimension=10, sigma=1.0)
    add(
        "quadratic-additive-1e2",
        "quadratic",
        dev,
        600,
        classic.quadratic,
        dimension=50,
        condition=1e2,
        sigma=0.3,
        data_seed=1,
    )
    add(
        "quadratic-multiplicative-1e4", "quadratic", dev, 600, classic.least_squares,
        dimension=60, condition=1e4, batch=8, rotated=False, data_seed=2,
    )  # fmt: skip
    add("adult-20", "adult", dev, 600, classic.adult, part=even, batch=20, optimum=_BELOW_ADULT[even])
    add("adult-200", "adult", dev, 600, classic.adult, part=even, batch=200, optimum=_BELOW_ADULT[even])
    add(
        "logistic-cancer",
        "regression",
        dev,
        600,
        classic.breast_cancer,
        part=even,
        batch=16,
        ridge=1e-3,
        optimum=0.052851781315033,
    )
    add(
        "softmax-digits",
        "regression",
        dev,
        600,
        classic.softmax,
        source="digits",
        part=even,
        batch=32,
        ridge=1e-4,
        optimum=0.073332394419138,
    )
    add(
        "factorisation-60x40", "factorisation", dev, 800, classic.factorisation,
        shape=(60, 40), rank=5, smallest=0.5, noise=0.2, batch=64,
    )  # fmt: skip
    add("mlp-digits", "mlp", dev, 500, classic.mlp, source="digits", part=even, batch=32, hidden=(64,))
    add(
        "mlp-mnist-dropout", "mlp", dev, 500, classic.mlp,
        source="mnist", part=even, batch=64, hidden=(32, 32), activation="Tanh", dropout=0.1,
    )  # fmt: skip
    add("cnn-digits", "cnn", dev, 300, classic.cnn, source="digits", part=even, batch=32, channels=(8, 16))
    add("resnet-digits", "resnet", dev, 200, classic.resnet, source="digits", part=even, batch=32, channels=(8, 16))
    add("transformer-even", "transformer", dev, 250, classic.transformer, part=even, batch=16, length=32, layers=1)
    rescaled("rosenbrock-10d", loss=1e3)
    rescaled("logistic-cancer", parameters=1e-3)
    rescaled("mlp-digits", parameters=1e3)
    rescaled("cnn-digits", loss=1e-3)

    add("gru-adding", "sequence", dev, 250, sequences.adding, length=10, width=24, batch=32, data_seed=21)
    add(
        "lstm-text", "sequence", dev, 200, sequences.text,
        cell="lstm", part=even, length=16, width=32, batch=16,
    )  # fmt: skip
    add(
        "skip-gram", "embedding", dev, 500, embeddings.skip_gram,
        part=even, vocabulary=200, window=2, negatives=5, width=16, batch=64, data_seed=22,
    )  # fmt: skip
    add(
        "contrastive-digits", "embedding", dev, 400, embeddings.n_pair,
        part=even, negatives=6, hidden=(32, 8), temperature=0.2, batch=32, data_seed=23,
    )  # fmt: skip
    add(
        "pinn-poisson", "physics", dev, 400, physics.differential_equation,
        equation="poisson", hidden=(24, 24), weight=1.0, batch=64,
    )  # fmt: skip
    add(
        "adapters-digits", "adapter", dev, 400, adapters.adapters,
        source="digits", part=even, hidden=(64, 64), rank=4, change="turned", batch=32,
    )  # fmt: skip
    add("vae-digits", "generative", dev, 400, generative.vae, part=even, hidden=48, latent=6, batch=32)
    add(
        "mixture-density", "generative", dev, 500, generative.mixture_density,
        hidden=32, components=3, batch=64, data_seed=24,
    )  # fmt: skip
    add(
        "graph-communities", "graph", dev, 300, graphs.communities,
        nodes=320, classes=5, features=16, noise=2.0, hidden=16, batch=32, data_seed=25,
    )  # fmt: skip
    add(
        "vit-digits", "transformer", dev, 250, images.vision_transformer,
        source="digits", part=even, patch=(2, 2), width=24, heads=2, layers=1, batch=32,
    )  # fmt: skip
    add(
        "reinforce-gridworld", "policy", dev, 300, policies.gridworld,
        side=4, horizon=10, slip=0.1, hidden=24, walks=32,
    )  # fmt: skip
    add(
        "poisson-link", "regression", dev, 600, linear.poisson,
        features=20, size=1.0, batch=32, data_seed=26, optimum=-4.501916298646854,
    )  # fmt: skip
    add(
        "logistic-cancer-raw", "regression", dev, 600, linear.cancer_raw,
        part=even, batch=16, ridge=1e-3, optimum=0.0573046549050009,
    )  # fmt: skip
    add(
        "softmax-1000", "regression", dev, 400, linear.many_classes,
        classes=1000, features=32, noise=1.0, batch=64, data_seed=27,
    )  # fmt: skip
    add(
        "deep-linear", "factorisation", dev, 400, linear.deep_linear,
        widths=(20, 16, 16, 16, 10), gain=0.5, batch=32, data_seed=28,
    )  # fmt: skip
    add(
        "kernel-parameters", "regression", dev, 300, linear.gaussian_process,
        features=4, points=16, batch=8, data_seed=29, optimum=1.8397428209819848,
    )  # fmt: skip
    add(
        "mlp-few-and-wrong", "mlp", dev, 500, images.few_and_wrong,
        part=even, digit=8, wrong=0.1, hidden=(48, 48), batch=32,
    )  # fmt: skip

    add("rosenbrock-2d-noisy", "rosenbrock", held, 1000, classic.rosenbrock, dimension=2, sigma=5.0)
    add("rosenbrock-20d", "rosenbrock", held, 1000, classic.rosenbrock, dimension=20, sigma=0.3)
    add(
        "quadratic-additive-1e3",
        "quadratic",
        held,
        600,
        classic.quadratic,
        dimension=80,
        condition=1e3,
        sigma=0.1,
        data_seed=3,
    )
    add(
        "quadratic-multiplicative-1e3", "quadratic", held, 600, classic.least_squares,
        dimension=30, condition=1e3, batch=4, rotated=True, data_seed=4,
    )  # fmt: skip
    add("adult-2", "adult", held, 600, classic.adult, part=odd, batch=2, optimum=_BELOW_ADULT[odd])
    add("adult-50", "adult", held, 600, classic.adult, part=odd, batch=50, optimum=_BELOW_ADULT[odd])
    add(
        "logistic-digits",
        "regression",
        held,
        600,
        classic.large_digits,
        part=odd,
        batch=16,
        ridge=1e-3,
        optimum=0.296507859963985,
    )
    add(
        "softmax-mnist",
        "regression",
        held,
        600,
        classic.softmax,
        source="mnist",
        part=odd,
        batch=32,
        ridge=1e-3,
        optimum=0.186952386440617,
    )
    add(
        "factorisation-80x30", "factorisation", held, 800, classic.factorisation,
        shape=(80, 30), rank=4, smallest=0.2, noise=0.5, batch=32,
    )  # fmt: skip
    add("mlp-mnist", "mlp", held, 500, classic.mlp, source="mnist", part=odd, batch=64, hidden=(64,), activation="GELU")
    add(
        "mlp-digits-dropout", "mlp", held, 500, classic.mlp,
        source="digits", part=odd, batch=32, hidden=(48, 48, 48), dropout=0.1,
    )  # fmt: skip
    add("cnn-mnist", "cnn", held, 300, classic.cnn, source="mnist", part=odd, batch=32, channels=(8, 16))
    add(
        "resnet-mnist", "resnet", held, 200, classic.resnet,
        source="mnist", part=odd, batch=32, channels=(12, 12), stem_stride=2,
    )  # fmt: skip
    add(
        "transformer-odd", "transformer", held, 200, classic.transformer,
        part=odd, batch=16, length=24, layers=2, width=24, heads=3, dropout=0.05,
    )  # fmt: skip
    rescaled("rosenbrock-2d-noisy", parameters=1e3)
    rescaled("quadratic-additive-1e3", loss=1e-3)
    rescaled("mlp-mnist", loss=1e3)
    rescaled("cnn-mnist", parameters=1e-3)

    add(
        "elman-recall", "sequence", held, 400, sequences.recall,
        length=16, symbols=6, width=32, batch=32, data_seed=31,
    )  # fmt: skip
    add(
        "neural-ode", "sequence", held, 250, sequences.flow_of_time,
        width=24, steps=5, duration=2.0, batch=32, data_seed=32,
    )  # fmt: skip
    add(
        "co-occurrence", "embedding", held, 500, embeddings.cooccurrence,
        part=odd, vocabulary=150, window=3, width=12, batch=128,
    )  # fmt: skip
    add(
        "ranking", "embedding", held, 500, embeddings.ranking,
        features=20, hidden=(48,), noise=0.2, batch=32, data_seed=33,
    )  # fmt: skip
    add(
        "pinn-heat", "physics", held, 300, physics.differential_equation,
        equation="heat", hidden=(20, 20), weight=10.0, batch=64,
    )  # fmt: skip
    add(
        "adapters-mnist", "adapter", held, 400, adapters.adapters,
        source="mnist", part=odd, hidden=(48,), rank=6, change="mirrored", batch=32,
    )  # fmt: skip
    add("denoiser-mnist", "generative", held, 200, generative.denoiser, part=odd, channels=6, sigma=0.3, batch=32)
    add("flow-banana", "generative", held, 400, generative.flow, layers=4, hidden=24, sigma=0.2, batch=64, data_seed=34)
    add(
        "autoencoder-tied", "generative", held, 500, generative.autoencoder,
        source="digits", part=odd, widths=(32, 8), tied=True, batch=32,
    )  # fmt: skip
    add("graph-walks", "graph", held, 300, graphs.walks, nodes=10, width=16, rounds=2, batch=32, data_seed=35)
    add(
        "vit-mnist", "transformer", held, 200, images.vision_transformer,
        source="mnist", part=odd, patch=(2, 14), width=24, heads=3, layers=2, batch=32,
    )  # fmt: skip
    add("reinforce-bandit", "policy", held, 500, policies.bandit, part=odd, hidden=(48,), batch=64)
    add(
        "cox-survival", "regression", held, 600, linear.cox,
        features=15, group=8, batch=16, data_seed=36, optimum=5.242414045834115,
    )  # fmt: skip
    add("mlp-prices-raw", "mlp", held, 500, linear.prices_raw, part=odd, hidden=(32, 32), batch=16)
    add(
        "bag-of-words", "regression", held, 600, linear.bag_of_words,
        part=odd, vocabulary=400, length=10, batch=16, ridge=1e-3, optimum=0.10325724503989381,
    )  # fmt: skip
    add(
        "tensor-factors", "factorisation", held, 600, linear.tensor_factors,
        shape=(15, 16, 17), rank=3, fitted=5, batch=64, data_seed=37,
    )  # fmt: skip
    add("cnn-two-tasks", "cnn", held, 300, images.tasks, part=odd, channels=(8, 16), weight=20.0, batch=32)
    return listed


@functools.cache
def suite() -> tuple[Problem, ...]:
    """All of them, the development half first."""
    return tuple(_problems())


def development() -> list[Problem]:
    """The half on which defaults are chosen."""
    return [p for p in suite() if p.half == "development"]


def held_out() -> list[Problem]:
    """The half that is run only to report."""
    return [p for p in suite() if p.half == "held-out"]


def get(name: str) -> Problem:
    """The problem of that name."""
    for problem in suite():
        if problem.name == name:
            return problem
    raise KeyError(f"no problem is called {name!r}; there are {', '.join(p.name for p in suite())}")
