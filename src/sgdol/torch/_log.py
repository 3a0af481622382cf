"""What the optimizer learns, as numbers over time: for TensorBoard, for any other tracker, for ``sgdol.plot``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = ["Log", "finite", "inner", "scalars"]

QUANTITIES = (  # of opt.diagnostics(), besides the step sizes
    "signal_to_noise", "noise_scale", "updates", "skipped", "gradients",
    "loss", "smoothness", "evaluations", "rejections", "rollbacks",
)  # fmt: skip


class Writer(Protocol):
    """A writer such as ``torch.utils.tensorboard.SummaryWriter`` or that of tensorboardX."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


Sink = Callable[[Mapping[str, float], int], Any]


def scalars(optimizer: Any) -> dict[str, float]:
    """The numbers of ``optimizer.diagnostics()`` by name, as trackers take them.

    * ``step_size``, or ``step_size/<group>`` with several parameter groups: the group's ``"name"``, else its number;
    * ``signal_to_noise`` and ``noise_scale``, over the recent updates (see :meth:`sgdol.torch.SGDOL.diagnostics`);
    * ``updates``, ``skipped`` (because a gradient was not finite) and ``gradients`` (k of the last update);
    * with SGDOLFree also ``loss``, ``smoothness``, ``evaluations``, ``rejections`` and ``rollbacks`` (see
      :meth:`sgdol.torch.SGDOLFree.diagnostics`).

    Reads from the device, so not for every step.

    Args:
        optimizer: an SGDOL or SGDOLFree, or a trainer's wrapper around it (Accelerate, Lightning, Fabric).

    >>> import torch
    >>> from sgdol import SGDOL
    >>> x, y = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    >>> opt = SGDOL([{"params": [x], "name": "body"}, {"params": [y], "name": "head", "lr": 0.25}], lr=0.5)
    >>> {name: value for name, value in scalars(opt).items() if name.startswith("step_size")}
    {'step_size/body': 0.5, 'step_size/head': 0.25}
    """
    sgdol = inner(optimizer)
    if sgdol is None:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise TypeError(f"optimizer must be an SGDOL, or a trainer's wrapper around one, got {kind}")
    found = sgdol.diagnostics()
    groups = {i: group for i, group in enumerate(sgdol.param_groups) if group["params"]}
    step_sizes = {label: found["step_size"][i] for i, label in _labels(groups).items()}
    return {**step_sizes, **{name: found[name] for name in QUANTITIES if name in found}}


class Log:
    r"""Records what an optimizer learns, and writes it to TensorBoard or to any other tracker.

    Call it after every ``opt.step()``. It reads from the optimizer every ``every`` steps only, because that waits
    for the device. Numbers that are not finite (before the first update there is no signal-to-noise ratio) are recorded
    but not written.

    Args:
        writer: an object with ``add_scalar(tag, value, step)``, such as
            :class:`torch.utils.tensorboard.SummaryWriter`; a function of a dict of numbers and the step; or None to
            keep the history only.
        every: record when the step is a multiple of this.
        prefix: in front of every name that is written.

    Attributes:
        history: what was recorded, a dict of numbers for each time; :func:`sgdol.plot` draws it.

    >>> import torch
    >>> from sgdol import SGDOL
    >>> x = torch.nn.Parameter(torch.ones(2))
    >>> opt = SGDOL([x], lr=0.5)
    >>> log = Log(every=10)  # or Log(SummaryWriter())
    >>> for _ in range(20):
    ...     for _ in range(2):
    ...         (x * (x + torch.randn(2))).sum().div(2).backward()
    ...     opt.step(); opt.zero_grad(); _ = log(opt)
    >>> [(row["step"], row["gradients"]) for row in log.history]
    [(10, 2), (20, 2)]
    """

    def __init__(self, writer: Writer | Sink | None = None, *, every: int = 10, prefix: str = "sgdol/") -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, got {every!r}")
        if not (writer is None or callable(writer) or callable(getattr(writer, "add_scalar", None))):
            raise TypeError(
                f"writer must be None, a function of (numbers, step), or have add_scalar(tag, value, step) as "
                f"TensorBoard's SummaryWriter has, got {writer!r}"
            )
        self.writer = writer
        self.every = every
        self.prefix = prefix
        self.steps = 0
        self.history: list[dict[str, float]] = []

    def __call__(self, optimizer: Any, step: int | None = None) -> dict[str, float] | None:
        """Record if the step is a multiple of ``every``.

        Args:
            optimizer: an SGDOL or SGDOLFree, or a trainer's wrapper around it.
            step: the number of this step, for the horizontal axis; None counts the calls, from 1.

        Returns:
            What was recorded, or None.
        """
        self.steps = self.steps + 1 if step is None else step
        return None if self.steps % self.every else self.record(optimizer, self.steps)

    def record(self, optimizer: Any, step: int) -> dict[str, float]:
        """Record now, whatever ``every`` says."""
        values = scalars(optimizer)
        row = {"step": step, **values}
        self.history.append(row)
        if self.writer is not None:
            written = finite(values, self.prefix)
            if hasattr(self.writer, "add_scalar"):
                for tag, value in written.items():
                    self.writer.add_scalar(tag, value, step)
            else:
                self.writer(written, step)
        return row

    def state_dict(self) -> dict[str, Any]:
        """The history and the number of steps, to go into a checkpoint."""
        return {"steps": self.steps, "history": [dict(row) for row in self.history]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.steps = state_dict["steps"]
        self.history = [dict(row) for row in state_dict["history"]]


def finite(values: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """The finite numbers, with a prefix to their names.

    >>> finite({"step_size": 0.5, "noise_scale": float("nan")}, prefix="sgdol/")
    {'sgdol/step_size': 0.5}
    """
    return {f"{prefix}{name}": value for name, value in values.items() if math.isfinite(value)}


def inner(optimizer: Any) -> Any:
    """The SGDOL or SGDOLFree inside of a trainer's wrappers, which keep it as ``.optimizer``; None if there is none."""
    while optimizer is not None and not hasattr(optimizer, "diagnostics"):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def _labels(groups: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    names = {i: str(group.get("name", i)) for i, group in groups.items()}
    if len(groups) == 1 and not any("name" in group for group in groups.values()):
        return dict.fromkeys(groups, "step_size")
    taken = list(names.values())
    # Groups may share a name: then their number follows.
    return {i: f"step_size/{name}" + f"-{i}" * (taken.count(name) > 1) for i, name in names.items()}
