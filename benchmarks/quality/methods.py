"""The methods, as data: which optimizer, with which options, and how its learning rate is chosen.

A :class:`Method` is a way to train; one training gives a result at the last iterate and, where an average is kept, at
the average. A :class:`Contender` is a line of the table: a method, the point at which it says to evaluate, and whether
its learning rate is tuned per problem or is the documented default. To add one is a line in ``METHODS`` and one in
``contenders``; then only it is run.

What is measured is how well the objective is minimised, so no method uses weight decay, but for AdamW as it comes.
Mechanic and COCOB are their authors' own packages. Where authors recommend something else than their defaults, that is
a line of its own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "AVERAGING_POWER",
    "OURS",
    "OURS_FREE",
    "OURS_FREE_RMS",
    "Contender",
    "Method",
    "available",
    "contenders",
    "get",
]

AVERAGING_POWER = 8.0
"""a of the polynomial average xavg += min(1, (a+1)/(t+a)) (x - xavg): every method's, and DoG's own default."""

Point = Literal["last", "average"]
Rate = Literal["gradient", "step"]


@dataclass(frozen=True)
class Method:
    """A way to train."""

    name: str
    optimizer: str
    """"module:name" of its class; "mechanic:name" is torch.optim's class of that name in Mechanic."""
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str = "torch"
    """The distribution whose version is part of what was measured."""
    rate: Rate | None = None
    """In which unit of ``Problem.scales`` its learning rate is; None: it has none to tune."""
    default: float | None = None
    """The documented default learning rate; None: there is none, or the method has no learning rate."""
    parts: int = 1
    """In how many microbatches it takes a batch."""
    schedule: Literal["constant", "cosine", "warmup-cosine"] = "constant"
    """How the learning rate goes on; ``warmup-cosine`` is known to the larger networks only."""
    averaging: Literal["none", "harness", "optimizer", "dog"] = "none"
    """Who keeps the average: nobody, the harness, the optimizer (``averaged()``) or dog's PolynomialDecayAverager."""
    modes: bool = False
    """Whether the optimizer has train() and eval() modes."""
    closure: bool = False
    """Whether ``step`` takes a closure that evaluates the same batch again."""
    with_batchnorm: Mapping[str, Any] = field(default_factory=dict)
    """Options that the documentation gives for networks with BatchNorm."""

    @property
    def points(self) -> tuple[Point, ...]:
        """Where one training can be evaluated."""
        return ("last",) if self.averaging == "none" else ("last", "average")

    def on(self, kind: str) -> Method:
        """The method as its documentation wants it on this kind of problem."""
        if kind != "resnet" or not self.with_batchnorm:
            return self
        return replace(self, options={**self.options, **self.with_batchnorm}, with_batchnorm={})

    def make(self, parameters: Iterable[Tensor], rate: float | None) -> Optimizer:
        """The optimizer, with a learning rate or its default."""
        module, _, name = self.optimizer.partition(":")
        if module == "mechanic":
            from mechanic_pytorch import mechanize

            factory = mechanize(getattr(importlib.import_module("torch.optim"), name))
        else:
            factory = getattr(importlib.import_module(module), name)
        options = dict(self.options)
        if rate is not None:
            options["lr"] = rate
        return factory(parameters, **options)

    def specification(self) -> dict[str, Any]:
        """What makes its numbers, for the cache; the code of this package's optimizers is looked at as well."""
        return {
            "name": self.name,
            "optimizer": self.optimizer,
            "options": repr(sorted(self.options.items())),
            "version": _version(self.package),
            "parts": self.parts,
            "schedule": self.schedule,
            "averaging": self.averaging,
        }


@functools.cache
def _version(package: str) -> str:
    return importlib.metadata.version(package)


OURS_FREE = "SGDOLFree"
OURS_FREE_RMS = f"{OURS_FREE}, metric rms"
OURS = "SGDOL, metric rms + averaging"
"""Labels of the contenders that the verdicts and the figure are about: without a learning rate, and with it tuned."""

_A = AVERAGING_POWER
_OURS: dict[str, Any] = {"optimizer": "sgdol:SGDOL", "package": "sgdol", "rate": "gradient", "parts": 2}

METHODS: tuple[Method, ...] = (
    Method("sgd-plain", "torch.optim:SGD", rate="gradient", averaging="harness"),
    Method("sgd", "torch.optim:SGD", {"momentum": 0.9}, rate="gradient", averaging="harness"),
    Method("sgd-cosine", "torch.optim:SGD", {"momentum": 0.9}, rate="gradient", schedule="cosine"),
    Method("adam", "torch.optim:Adam", rate="step", default=1e-3, averaging="harness"),
    Method("adamw", "torch.optim:AdamW", rate="step", default=1e-3),
    Method("adamw-cosine", "torch.optim:AdamW", {"weight_decay": 0.0}, rate="step", default=1e-3, schedule="cosine"),
    Method(
        "schedulefree-sgd",
        "schedulefree:SGDScheduleFree",
        package="schedulefree",
        rate="gradient",
        default=1.0,
        modes=True,
    ),
    Method(
        "schedulefree-adamw",
        "schedulefree:AdamWScheduleFree",
        package="schedulefree",
        rate="step",
        default=0.0025,
        modes=True,
    ),
    Method("prodigy", "prodigyopt:Prodigy", package="prodigyopt"),
    Method("prodigy-cosine", "prodigyopt:Prodigy", package="prodigyopt", default=1.0, schedule="cosine"),
    Method("dadapt-adam", "dadaptation:DAdaptAdam", package="dadaptation"),
    Method("dadapt-sgd", "dadaptation:DAdaptSGD", package="dadaptation"),
    Method("dadapt-sgd-momentum", "dadaptation:DAdaptSGD", {"momentum": 0.9}, package="dadaptation"),
    Method("dog", "dog:DoG", package="dog-optimizer", averaging="dog", with_batchnorm={"reps_rel": 1e-4}),
    Method("ldog", "dog:LDoG", package="dog-optimizer", averaging="dog", with_batchnorm={"reps_rel": 1e-4}),
    Method("mechanic-sgd", "mechanic:SGD", {"lr": 1.0}, package="mechanic-pytorch"),
    Method("mechanic-sgd-momentum", "mechanic:SGD", {"lr": 1.0, "momentum": 0.9}, package="mechanic-pytorch"),
    Method("mechanic-adamw", "mechanic:AdamW", {"lr": 1.0, "weight_decay": 0.0}, package="mechanic-pytorch"),
    Method("cocob", "parameterfree:COCOB", package="parameterfree"),
    Method("sgdol", options={"averaging": _A}, averaging="optimizer", **_OURS),
    Method("sgdol-rms", options={"metric": "rms", "averaging": _A}, averaging="optimizer", **_OURS),
    Method("sgdol-free", "sgdol:SGDOLFree", package="sgdol", parts=2, averaging="optimizer", closure=True),
    Method(
        "sgdol-free-rms",
        "sgdol:SGDOLFree",
        {"metric": "rms"},
        package="sgdol",
        parts=2,
        averaging="optimizer",
        closure=True,
    ),
)


@dataclass(frozen=True)
class Contender:
    """A line of the table."""

    label: str
    method: Method
    point: Point = "last"
    tuned: bool = False
    """The learning rate is tuned per problem on a grid of powers of ten; otherwise defaults."""

    @property
    def ours(self) -> bool:
        """Whether it is SGDOL."""
        return self.method.package == "sgdol"

    @property
    def group(self) -> str:
        """What has to be tuned: under which heading of the table it stands."""
        if self.tuned:
            return "learning rate tuned per problem"
        return "learning rate at its documented default" if self.method.rate else "no learning rate"


def get(name: str) -> Method:
    """The method of that name."""
    for method in METHODS:
        if method.name == name:
            return method
    raise KeyError(f"no method is called {name!r}; there are {', '.join(m.name for m in METHODS)}")


def available(method: Method) -> bool:
    """Whether what is installed has the optimizer with these options."""
    module, _, name = method.optimizer.partition(":")
    try:
        importlib.metadata.version(method.package)
        if module == "mechanic":
            return True
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, importlib.metadata.PackageNotFoundError):
        return False
    return set(method.options) <= set(inspect.signature(factory).parameters)


def contenders() -> list[Contender]:
    """The lines of the table, for the methods that are installed."""
    lines = [
        Contender("SGD + momentum", get("sgd"), "last", True),
        Contender("SGD + momentum + averaging", get("sgd"), "average", True),
        Contender("SGD + momentum, cosine", get("sgd-cosine"), "last", True),
        Contender("SGD", get("sgd-plain"), "last", True),
        Contender("SGD + averaging", get("sgd-plain"), "average", True),
        Contender("Adam", get("adam"), "last", True),
        Contender("Adam + averaging", get("adam"), "average", True),
        Contender("AdamW, cosine", get("adamw-cosine"), "last", True),
        Contender("Schedule-Free SGD", get("schedulefree-sgd"), "last", True),
        Contender("Schedule-Free AdamW", get("schedulefree-adamw"), "last", True),
        Contender("SGDOL", get("sgdol"), "last", True),
        Contender("SGDOL + averaging", get("sgdol"), "average", True),
        Contender("SGDOL, metric rms", get("sgdol-rms"), "last", True),
        Contender(OURS, get("sgdol-rms"), "average", True),
    ]
    lines += [
        Contender("Adam, lr 1e-3", get("adam"), "last"),
        Contender("Adam + averaging, lr 1e-3", get("adam"), "average"),
        Contender("AdamW, lr 1e-3", get("adamw")),
        Contender("AdamW, cosine, lr 1e-3", get("adamw-cosine")),
        Contender("Schedule-Free SGD, lr 1", get("schedulefree-sgd")),
        Contender("Schedule-Free AdamW, lr 0.0025", get("schedulefree-adamw")),
        Contender("Prodigy", get("prodigy")),
        Contender("Prodigy, cosine", get("prodigy-cosine")),
        Contender("D-Adaptation Adam", get("dadapt-adam")),
        Contender("D-Adaptation SGD", get("dadapt-sgd")),
        Contender("D-Adaptation SGD + momentum", get("dadapt-sgd-momentum")),
        Contender("DoG + averaging", get("dog"), "average"),
        Contender("L-DoG + averaging", get("ldog"), "average"),
        Contender("Mechanic SGD", get("mechanic-sgd")),
        Contender("Mechanic SGD + momentum", get("mechanic-sgd-momentum")),
        Contender("Mechanic AdamW", get("mechanic-adamw")),
        Contender("COCOB", get("cocob")),
        Contender(OURS_FREE, get("sgdol-free"), "average"),
        Contender(OURS_FREE_RMS, get("sgdol-free-rms"), "average"),
    ]
    return [c for c in lines if available(c.method)]
