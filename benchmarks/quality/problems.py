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
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.quality import data, networks, objectives
from benchmarks.quality.objectives import Evaluation, Objective

__all__ = ["HALVES", "KINDS", "Half", "Instance", "Problem", "Scales", "development", "get", "held_out", "suite"]

Half = Literal["development", "held-out"]
HALVES: tuple[Half, ...] = ("development", "held-out")
KINDS = ("rosenbrock", "quadratic", "adult", "regression", "factorisation", "mlp", "cnn", "resnet", "transformer")
NETWORKS = ("mlp", "cnn", "resnet", "transformer")

FLOOR = 1e-6
"""A gap below this share of the starting gap counts as this share: the problem is solved."""


@dataclass(frozen=True)
class Scales:
    """Natural units of a problem, measured once: at its first point (seed 0), on all data, with exact derivatives.

    Learning-rate grids are powers of ten times these units, themselves rounded to powers of ten, so that a problem in
    other units has the same grid in its own units.
    """

    gradient: float
    """1/M_0, with M_0 = ||H g|| / ||g||: the unit of the learning rate of SGD and of SGDOL's lr = 1/M."""
    step: float
    """||g|| / (M_0 sqrt(d)), the size per coordinate of that gradient step: the unit of Adam's learning rate."""


@dataclass(frozen=True)
class Problem:
    """One line of the suite."""

    name: str
    kind: str
    half: Half
    budget: int
    """In gradient evaluations: one is a pass over one whole batch, in one part or in several."""
    build: Callable[..., Objective] = field(repr=False)
    options: dict[str, Any] = field(default_factory=dict)
    optimum: float | None = None
    """f*, where the objective does not know it: what L-BFGS finds (``objectives.minimum``)."""
    loss_scale: float = 1.0
    parameter_scale: float = 1.0

    @property
    def network(self) -> bool:
        """Whether it is a network: its gap is its training loss, and its held-out accuracy is reported."""
        return self.kind in NETWORKS

    def make(self, seed: int, steps: int | None = None) -> Instance:
        """The problem with one seed's first point, order of the data and noise; ``steps`` limits what is drawn."""
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + seed)  # initial weights
            objective = self.build(seed=seed, **self.options)
        if self.optimum is not None:
            objective.optimum = self.optimum
        if (self.loss_scale, self.parameter_scale) != (1.0, 1.0):
            objective = objectives.Rescaled(objective, self.loss_scale, self.parameter_scale)
        generator = torch.Generator().manual_seed(2000 + seed)
        return Instance(self, objective, objective.draw(generator, self.budget if steps is None else steps))

    @functools.cached_property
    def scales(self) -> Scales:
        """The units of its learning rates."""
        objective = self.make(seed=0, steps=1).objective
        objective.eval() if not self._normalised(objective) else objective.train()
        params = list(objective.parameters())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            grads = torch.autograd.grad(objective.full(), params, create_graph=True)
            along = [g.detach() for g in grads]
            products = torch.autograd.grad(grads, params, along)
        size = math.sqrt(sum(float(g.square().sum()) for g in along))
        curvature = math.sqrt(sum(float(h.square().sum()) for h in products)) / size
        dimension = sum(p.numel() for p in params)
        return Scales(_decade(1 / curvature), _decade(size / curvature / math.sqrt(dimension)))

    @staticmethod
    def _normalised(objective: Objective) -> bool:
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in objective.modules())

    def specification(self) -> dict[str, Any]:
        """What makes its numbers, for the cache: everything but the code of the objectives."""
        return {
            "name": self.name,
            "budget": self.budget,
            "build": inspect.getsource(self.build),
            "options": repr(sorted(self.options.items())),
            "loss_scale": self.loss_scale,
            "parameter_scale": self.parameter_scale,
            **({} if self.optimum is None else {"optimum": self.optimum}),
        }


class Instance:
    """A problem with a seed: parameters to move, and the stochastic losses of its steps."""

    def __init__(self, problem: Problem, objective: Objective, drawn: Tensor) -> None:
        self.problem, self.objective, self.drawn = problem, objective, drawn
        objective.train()

    @property
    def steps(self) -> int:
        """How many steps have been drawn."""
        return len(self.drawn)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer gets."""
        return self.objective.parameters()

    def loss(self, step: int, part: int = 0, parts: int = 1) -> Tensor:
        """F(x, xi) at the present x on the batch of ``step``, or on one of its ``parts`` halves (their mean is F)."""
        return self.objective(self.objective.part(self.drawn[step], part, parts))

    def gap(self, evaluation: Evaluation) -> float:
        """Loss over the optimum in the units of the problem that is not rescaled; the training loss of a network."""
        return evaluation.loss - self.objective.optimum


def _decade(value: float) -> float:
    return 10.0 ** round(math.log10(value))


# What the problems are made of ----------------------------------------------------------------------------------------


def _rosenbrock(seed: int, **options: Any) -> Objective:
    return objectives.Rosenbrock(**options)


def _quadratic(seed: int, **options: Any) -> Objective:
    return objectives.Quadratic(**options)


def _least_squares(seed: int, **options: Any) -> Objective:
    return objectives.LeastSquares(**options)


def _factorisation(seed: int, **options: Any) -> Objective:
    return objectives.MatrixFactorisation(seed=seed, **options)


def _adult(seed: int, part: str, batch: int) -> Objective:
    return objectives.Adult(data.adult(part), batch)


def _breast_cancer(seed: int, part: str, batch: int, ridge: float) -> Objective:
    return objectives.Logistic(data.breast_cancer(part), batch, ridge)


def _large_digits(seed: int, part: str, batch: int, ridge: float) -> Objective:
    """Logistic regression: is the digit at least 5?"""
    samples = data.digits(part, torch.float64)
    x, y, tx, ty = samples
    ones = (torch.ones(len(x), 1, dtype=x.dtype), torch.ones(len(tx), 1, dtype=x.dtype))
    two = data.Samples(
        torch.hstack([x, ones[0]]), 2.0 * (y > 4).double() - 1, torch.hstack([tx, ones[1]]), 2.0 * (ty > 4).double() - 1
    )
    return objectives.Logistic(two, batch, ridge)


def _softmax(seed: int, source: str, part: str, batch: int, ridge: float) -> Objective:
    samples = getattr(data, source)(part, torch.float64)
    network = nn.Linear(samples.inputs.shape[1], 10, dtype=torch.float64)
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)
    return objectives.Classifier(network, samples, batch, ridge)


def _mlp(
    seed: int,
    source: str,
    part: str,
    batch: int,
    hidden: tuple[int, ...],
    activation: str = "ReLU",
    dropout: float = 0.0,
) -> Objective:
    samples = getattr(data, source)(part)
    widths = (samples.inputs.shape[1], *hidden, 10)
    return objectives.Classifier(networks.MLP(widths, getattr(nn, activation), dropout), samples, batch)


def _images(source: str, part: str) -> tuple[data.Samples, int]:
    return (data.digits(part), 8) if source == "digits" else (data.mnist(part, size=14), 14)


def _cnn(seed: int, source: str, part: str, batch: int, channels: tuple[int, ...]) -> Objective:
    samples, size = _images(source, part)
    return objectives.Classifier(networks.CNN(size, channels), samples, batch)


def _resnet(
    seed: int, source: str, part: str, batch: int, channels: tuple[int, ...], stem_stride: int = 1
) -> Objective:
    samples, size = _images(source, part)
    return objectives.Classifier(networks.ResNet(size, channels, stem_stride), samples, batch)


def _transformer(
    seed: int, part: str, batch: int, length: int, layers: int, width: int = 32, heads: int = 2, dropout: float = 0.0
) -> Objective:
    samples = data.text(part, length)
    tokens = 1 + int(max(samples.inputs.max(), samples.targets.max(), samples.test_targets.max()))
    network = networks.Transformer(tokens, length, width, heads, layers, dropout)
    return objectives.Classifier(network, samples, batch)


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

    add("rosenbrock-2d", "rosenbrock", dev, 1000, _rosenbrock, dimension=2, sigma=0.2)
    add("rosenbrock-10d", "rosenbrock", dev, 1000, _rosenbrock, dimension=10, sigma=1.0)
    add(
        "quadratic-additive-1e2", "quadratic", dev, 600, _quadratic, dimension=50, condition=1e2, sigma=0.3, data_seed=1
    )
    add(
        "quadratic-multiplicative-1e4", "quadratic", dev, 600, _least_squares,
        dimension=60, condition=1e4, batch=8, rotated=False, data_seed=2,
    )  # fmt: skip
    add("adult-20", "adult", dev, 600, _adult, part=even, batch=20, optimum=_BELOW_ADULT[even])
    add("adult-200", "adult", dev, 600, _adult, part=even, batch=200, optimum=_BELOW_ADULT[even])
    add(
        "logistic-cancer",
        "regression",
        dev,
        600,
        _breast_cancer,
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
        _softmax,
        source="digits",
        part=even,
        batch=32,
        ridge=1e-4,
        optimum=0.073332394419138,
    )
    add(
        "factorisation-60x40", "factorisation", dev, 800, _factorisation,
        shape=(60, 40), rank=5, smallest=0.5, noise=0.2, batch=64,
    )  # fmt: skip
    add("mlp-digits", "mlp", dev, 500, _mlp, source="digits", part=even, batch=32, hidden=(64,))
    add(
        "mlp-mnist-dropout", "mlp", dev, 500, _mlp,
        source="mnist", part=even, batch=64, hidden=(32, 32), activation="Tanh", dropout=0.1,
    )  # fmt: skip
    add("cnn-digits", "cnn", dev, 300, _cnn, source="digits", part=even, batch=32, channels=(8, 16))
    add("resnet-digits", "resnet", dev, 200, _resnet, source="digits", part=even, batch=32, channels=(8, 16))
    add("transformer-even", "transformer", dev, 250, _transformer, part=even, batch=16, length=32, layers=1)
    rescaled("rosenbrock-10d", loss=1e3)
    rescaled("logistic-cancer", parameters=1e-3)
    rescaled("mlp-digits", parameters=1e3)
    rescaled("cnn-digits", loss=1e-3)

    add("rosenbrock-2d-noisy", "rosenbrock", held, 1000, _rosenbrock, dimension=2, sigma=5.0)
    add("rosenbrock-20d", "rosenbrock", held, 1000, _rosenbrock, dimension=20, sigma=0.3)
    add(
        "quadratic-additive-1e3",
        "quadratic",
        held,
        600,
        _quadratic,
        dimension=80,
        condition=1e3,
        sigma=0.1,
        data_seed=3,
    )
    add(
        "quadratic-multiplicative-1e3", "quadratic", held, 600, _least_squares,
        dimension=30, condition=1e3, batch=4, rotated=True, data_seed=4,
    )  # fmt: skip
    add("adult-2", "adult", held, 600, _adult, part=odd, batch=2, optimum=_BELOW_ADULT[odd])
    add("adult-50", "adult", held, 600, _adult, part=odd, batch=50, optimum=_BELOW_ADULT[odd])
    add(
        "logistic-digits",
        "regression",
        held,
        600,
        _large_digits,
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
        _softmax,
        source="mnist",
        part=odd,
        batch=32,
        ridge=1e-3,
        optimum=0.186952386440617,
    )
    add(
        "factorisation-80x30", "factorisation", held, 800, _factorisation,
        shape=(80, 30), rank=4, smallest=0.2, noise=0.5, batch=32,
    )  # fmt: skip
    add("mlp-mnist", "mlp", held, 500, _mlp, source="mnist", part=odd, batch=64, hidden=(64,), activation="GELU")
    add(
        "mlp-digits-dropout", "mlp", held, 500, _mlp,
        source="digits", part=odd, batch=32, hidden=(48, 48, 48), dropout=0.1,
    )  # fmt: skip
    add("cnn-mnist", "cnn", held, 300, _cnn, source="mnist", part=odd, batch=32, channels=(8, 16))
    add(
        "resnet-mnist", "resnet", held, 200, _resnet,
        source="mnist", part=odd, batch=32, channels=(12, 12), stem_stride=2,
    )  # fmt: skip
    add(
        "transformer-odd", "transformer", held, 200, _transformer,
        part=odd, batch=16, length=24, layers=2, width=24, heads=3, dropout=0.05,
    )  # fmt: skip
    rescaled("rosenbrock-2d-noisy", parameters=1e3)
    rescaled("quadratic-additive-1e3", loss=1e-3)
    rescaled("mlp-mnist", loss=1e3)
    rescaled("cnn-mnist", parameters=1e-3)
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
