r"""Averages of the iterates, for :class:`torch.optim.swa_utils.AveragedModel`.

Algorithm 1 returns an iterate drawn uniformly from :math:`x_1, \dots, x_T`, which is what the theorems speak of. A
polynomial average weights the later iterates more.

>>> import torch
>>> from torch.optim.swa_utils import AveragedModel
>>> model = torch.nn.Linear(2, 1)
>>> averaged = AveragedModel(model, avg_fn=polynomial_average(power=8))
>>> averaged.update_parameters(model)  # after every opt.step()
>>> with averaged_weights(model, averaged):
...     _ = model(torch.ones(1, 2))  # evaluate or save here
"""

from __future__ import annotations

import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from sgdol.torch._update import Gate
from sgdol.torch._vectors import scalar_dtype
from sgdol.torch._world import local

__all__ = ["UnusedAverage", "average_groups", "averaged_weights", "polynomial_average", "random_iterate", "swapped_in"]

AverageFunction = Callable[[Tensor, Tensor, Tensor | int], Tensor]


def polynomial_average(power: float = 8.0) -> AverageFunction:
    r"""An ``avg_fn`` that weights iterate t in proportion to about :math:`t^a`.

    .. math:: \bar x_t = \bar x_{t-1} + \min\left(1, \frac{a + 1}{t + a}\right) (x_t - \bar x_{t-1})

    ``power=0`` is the uniform average. (Shamir and Zhang 2013.)

    Args:
        power: a, at least 0: the larger, the more the late iterates count.

    >>> average = polynomial_average(power=0)
    >>> average(torch.tensor(1.0), torch.tensor(4.0), 2)  # the third iterate joins the mean of two
    tensor(2.)
    """
    if not 0 <= power < float("inf"):
        raise ValueError(f"power must be finite and at least 0, got {power!r}")

    @torch.no_grad()
    def average(averaged: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
        # AveragedModel counts the iterates before this one, so t = num_averaged + 1.
        before = num_averaged.to(scalar_dtype(current.device)) if isinstance(num_averaged, Tensor) else num_averaged
        weight = (power + 1) / (before + 1 + power)
        return averaged + (current - averaged) * weight

    return average


def random_iterate(seed: int = 0) -> AverageFunction:
    r"""An ``avg_fn`` that holds an iterate drawn uniformly from those so far: the output of Algorithm 1.

    Reservoir sampling: iterate t replaces the one that is held with probability 1/t. The decision depends on the seed
    and on t alone, so that all parameters of a model, and all ranks of a job, take the same iterate, also after
    resuming.

    Args:
        seed: the seed of the draw.

    >>> choose = random_iterate(seed=0)
    >>> choose(torch.tensor(1.0), torch.tensor(2.0), 0)  # the first iterate is always taken
    tensor(2.)
    """

    @torch.no_grad()
    def choose(held: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
        t = int(num_averaged) + 1
        takes = random.Random(f"{seed}:{t}").random() < 1 / t  # a generator of its own: nobody else's draws change
        return current.clone() if takes else held

    return choose


@contextmanager
def averaged_weights(model: torch.nn.Module, averaged: AveragedModel) -> Iterator[None]:
    """Put the averaged weights into the model, for evaluation or saving, and take them out again.

    Parameters always; buffers only if ``averaged`` averages them (``use_buffers=True``): else a BatchNorm keeps the
    statistics of the model itself (see :func:`torch.optim.swa_utils.update_bn`). What is changed inside is undone.

    Args:
        model: the model that is trained; its tensors stay the same objects, so that the optimizer does not notice.
        averaged: its average.

    >>> model = torch.nn.Linear(1, 1)
    >>> averaged = AveragedModel(model, avg_fn=polynomial_average())
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(3.0), averaged.module.weight.fill_(2.0)
    >>> with averaged_weights(model, averaged):
    ...     model.weight.item()
    2.0
    >>> model.weight.item()
    3.0
    """
    tensors: list[Tensor] = [*model.parameters()]
    averages: list[Tensor] = [*averaged.module.parameters()]
    if averaged.use_buffers:
        tensors += model.buffers()
        averages += averaged.module.buffers()
    with swapped_in(tensors, averages):
        yield


@contextmanager
def swapped_in(tensors: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Context manager: inside, the tensors have these values. The tensors stay the same objects."""
    kept = [tensor.detach().clone() for tensor in tensors]
    try:
        _copy(values, tensors)
        yield
    finally:
        _copy(kept, tensors)


@torch.no_grad()
def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class UnusedAverage:
    """Warns when an optimizer that has made many steps is deleted and its average was never used.

    The optimizer cannot see an evaluation without ``averaged()``, and before it is deleted one with it may still come.
    """

    MANY = 500

    def __init__(self, optimizer: object) -> None:
        self.steps = 0
        self.asked = False
        weakref.finalize(optimizer, self._warn)  # called at the latest when the program ends

    def _warn(self) -> None:
        if self.steps >= self.MANY and not self.asked:
            warnings.warn(
                f"SGDOLFree has made {self.steps} steps, and its averaged weights, which are better than the latest, "
                "were not used. Evaluate inside `with opt.averaged():`, and save opt.averaged_state_dict(model) for "
                "use. Ignore this if another program does that from opt.state_dict().",
                stacklevel=1,
            )


def average_groups(
    groups: list[dict[str, Any]], state: dict[Any, Any], moved: list[Tensor], t: Tensor, gate: Gate
) -> None:
    r"""Add the iterate after update t to the averages: :math:`\bar x \leftarrow \bar x + \frac{a+1}{t+a} (x - \bar x)`.

    Args:
        groups: the parameter groups; those with averaging have an average of every parameter that has ever moved.
        state: the optimizer's state, which keeps the averages.
        moved: the parameters that this update moved.
        t: how many updates there have been.
        gate: whether this update counts.
    """
    averaging = [group for group in groups if group["averaging"] is not None]
    now = set(moved) if averaging else set()
    for group in averaging:
        power = group["averaging"]
        weight = gate.weight((power + 1) / (gate.number(t) + power))
        for p in group["params"]:
            held = state.get(p, {})
            if p in now and "average" not in held:
                held = state[p]
                held["average"] = p.detach().to(dtype=torch.promote_types(p.dtype, torch.float32), copy=True)
            if "average" in held:
                average = local(held["average"])  # also of a parameter that did not move now: t counts for all
                share = weight.to(average.device, average.real.dtype) if isinstance(weight, Tensor) else weight
                average.lerp_(local(p.detach()).to(average.dtype), share)
