"""The PyTorch optimizer that measures M itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Never

import torch

from sgdol import free, metrics, summary
from sgdol.averaging import weight as weight_in_average
from sgdol.free import Settings, State
from sgdol.torch import _checkpoint as checkpoint
from sgdol.torch._base import WatchingOptimizer
from sgdol.torch._direction import Direction
from sgdol.torch._free_options import SHARED, Group, checked, refuse_other_shapes, refuse_other_states
from sgdol.torch._gate import Gate
from sgdol.torch._probes import Evaluation, Probes, loss_of, root
from sgdol.torch._update import move
from sgdol.torch._vectors import Layout, Vector

__all__ = ["SGDOLFree"]


class SGDOLFree(WatchingOptimizer):
    r"""SGDOL that needs neither a learning rate nor a smoothness constant. Experimental.

    It measures the smoothness M along its own steps: now and then (about every twelfth step) it evaluates the batch of
    the step at the point before the last step as well. Signal and noise come from the independent gradients of the
    batch, as in :class:`sgdol.SGDOL`, and

    .. math:: \eta_t = \frac{\alpha + S}{M (\alpha + S/4 + c N)}, \qquad S = \sum_{j<t} u_j, \quad
        N = \sum_{j<t} (n_j - u_j), \quad \alpha = 4 n_1,

    scales a momentum direction, with c from 1/2, while the loss falls, to 1. All lengths are taken in a metric that is
    made of past gradients, and a gradient counts as at most twice as long as those are. A step whose curvature was too
    much for it is taken back, and a loss that jumps sends the run back to its average. What is to be used is that
    average: see :meth:`averaged`. The algorithm, what was measured and what failed is in
    ``docs/without_smoothness.md``.

    ``step`` takes a closure that evaluates **the same batch** each time it is called within one step, in two or more
    ``backward()`` calls (under DistributedDataParallel one is enough: the ranks are the independent gradients), and
    returns the loss of the batch. Dropout draws the same numbers each time, and buffers such as BatchNorm's
    statistics are updated once. Between steps it keeps four vectors of the size of the model: momentum, metric,
    average and last point.

    Args:
        params: parameters or parameter groups; groups may differ in weight_decay.
        momentum: beta in [0, 1) of :math:`d_t = D_t^{-1} m_t/(1-\beta^t)`,
            :math:`m_t = \beta m_{t-1} + (1-\beta) \bar g_t`.
        weight_decay: decoupled: :math:`x \leftarrow x - \eta_t (d_t + \mathrm{weight\_decay} \cdot x)`.
        averaging: a of the polynomial average, at least 0: iterate t counts about as :math:`t^a`.
        metric: ``"rms"``, ``"adagrad"``, ``"euclidean"`` (D = 1, one vector less), or an object of
            :mod:`sgdol.metrics`.
        maximize: ascend instead; the same in all groups.
        foreach: as in torch.optim; every vector is one tensor here, so it makes no difference.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = SGDOLFree(model.parameters())
    >>> for _ in range(300):
    ...     x = torch.randn(32, 3)
    ...     y = x.sum(1, keepdim=True) + 0.1 * torch.randn(32, 1)
    ...     def closure():
    ...         opt.zero_grad()
    ...         losses = [(model(a) - b).square().mean() / 2 for a, b in zip(x.chunk(2), y.chunk(2))]
    ...         for loss in losses:
    ...             loss.backward()
    ...         return sum(losses)
    ...     loss = opt.step(closure)
    >>> with opt.averaged():
    ...     bool((model.weight - 1).abs().max() < 0.02)
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        *rate: Never,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        averaging: float = 8.0,
        metric: str | metrics.Metric = "rms",
        maximize: bool = False,
        foreach: bool | None = None,
        **unknown: Never,
    ) -> None:
        given = {
            "momentum": momentum,
            "weight_decay": weight_decay,
            "averaging": averaging,
            "metric": metric,
            "maximize": maximize,
            "foreach": foreach,
        }
        defaults = checked(given, {"lr": rate[0], **unknown} if rate else unknown)  # as in Adam(params, 1e-3)
        self._settings = Settings()
        self._prepare()
        super().__init__(params, defaults)

    def _prepare(self) -> None:
        """What is not saved: it is found again."""
        super()._prepare()
        self._probes: Probes | None = None
        self._known: tuple[dict[str, Any] | None, State] = (None, State())
        self._left: tuple[Layout, Any] | None = None
        """Where the last step left the parameters."""

    # The public face --------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the batch that the closure evaluates.

        Args:
            closure: computes the loss of one batch in two or more parts, calls ``backward()`` on each, and returns
                the loss. It is called once or twice, more often in the first step, and has to evaluate the same batch
                each time: draw the batch outside.

        Returns:
            What the first call of the closure returned.
        """
        if closure is None:
            raise TypeError(
                "SGDOLFree.step needs a closure: a function that computes the loss of one batch in two or more parts, "
                "calls backward() on each and returns the loss. Got closure=None"
            )
        if self._swapped:
            raise RuntimeError("step() inside averaged() would train the averaged weights: leave it first")
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._step)(closure)
        return self._step(closure)

    def _step(self, closure: Callable[[], Any]) -> Any:
        result = self._evaluator().first(closure)
        with torch.no_grad():
            self._learn(closure, result)
        return result

    def _learn(self, closure: Callable[[], Any], result: Any) -> None:
        """Make the step, after the first call of the closure."""
        state, probes = self._rule(), self._evaluator()
        try:
            now = probes.evaluation(loss_of(result))
            self._refuse_moved()
            self._warnings.taken(self._passes.bent, self._world().remarks)  # type: ignore[union-attr]
            if not now.finite:
                probes.undo()
            state, now = probes.advance(state, now, closure, self._vector)
            if now.finite and state.first_norm > 0:
                state = self._move(state, now)
                self._warnings.finite()
            elif not now.finite:
                state = state._replace(skipped=state.skipped + 1)
                self._metrics.forget()
                self._warnings.skipped(self.param_groups)
        except BaseException:  # misuse, the closure raised at another point, or somebody pressed Ctrl-C
            probes.undo()
            self._metrics.forget()
            self._remember()
            raise
        self._keep_rule(state._replace(evaluations=state.evaluations + probes.count), now.k)
        self._remember()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged parameters in, for evaluation and saving, and take them out again.

        Only parameters are averaged. A model with BatchNorm wants its statistics for the averaged parameters:
        :func:`torch.optim.swa_utils.update_bn` inside.
        """
        if not self._swapped:
            self._refuse_moved()
        with super()._averaged():
            yield
        if self._left is not None:
            self._remember()

    def diagnostics(self) -> dict[str, Any]:
        """What the optimizer has learned, as plain numbers.

        * ``step_size``: eta of the last step, one per parameter group; ``smoothness``: M as measured so far.
        * ``signal_to_noise``: sum of u over sum of n - u, over about the last hundred steps; at least 0.
        * ``noise_scale``: the gradient noise scale in units of one of the k gradients: that many averaged would have
          as much signal as noise; infinite if no signal was seen.
        * ``updates``, ``skipped`` (batches that are not finite), ``gradients`` (k of the last step).
        * ``evaluations``: calls of the closure; ``rejections``: steps taken back after a look-back; ``rollbacks``:
          returns to the average after a jump of the loss.
        """
        state = self._rule()
        k = self.param_groups[0].get("gradients", 0)
        length = state.recent_signal + state.recent_noise
        return {
            "step_size": [g["step_size"] for g in self.param_groups],
            "smoothness": state.smoothness,
            "signal_to_noise": summary.signal_to_noise(state.recent_signal, length),
            "noise_scale": summary.noise_scale(state.recent_signal, length, k),
            "updates": state.updates,
            "skipped": state.skipped,
            "gradients": k,
            "evaluations": state.evaluations,
            "rejections": state.rejections,
            "rollbacks": state.rollbacks,
        }

    def moved(self) -> None:
        """Say that you changed the parameters a little on purpose (clipping, projecting): go on from where they are."""
        self._left = None

    def restart(self) -> None:
        """Forget everything, as if newly constructed; for instance after other weights were loaded into the model."""
        self.state.clear()
        self._prepare()
        for group in self.param_groups:
            for name in ("rule", "gradients", "unit"):
                group.pop(name, None)
            group["step_size"] = 0.0
        self._assemble()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; it may bring its own weight_decay."""
        if isinstance(param_group, dict):
            options = checked({**self.defaults, **param_group}, {})
            param_group.update({name: options[name] for name in param_group if name in self.defaults})
            for name in SHARED:
                if options[name] != self.defaults[name]:
                    raise ValueError(
                        f"{name} is the same for all parameter groups: this optimizer has {self.defaults[name]!r}, "
                        f"the group has {options[name]!r}"
                    )
        super().add_param_group(param_group)
        group = self.param_groups[-1] = Group(self.param_groups[-1])
        for p in group["params"]:
            if hasattr(p, "device_mesh"):
                raise NotImplementedError(
                    f"SGDOLFree does not support DTensor parameters (fully_shard, tensor parallel), got one of shape "
                    f"{tuple(p.shape)}; DistributedDataParallel is supported"
                )
        first = self.param_groups[0]
        for name in ("rule", "gradients", "unit"):
            if name in first:
                group[name] = first[name]
        group.setdefault("step_size", first.get("step_size", 0.0))
        self._assemble()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for index, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {index}")
            lines += [f"    {name}: {group[name]}" for name in sorted(group) if name not in ("params", "rule")]
        return "\n".join([*lines, ")"])

    # One step ---------------------------------------------------------------------------------------------------------

    def _move(self, state: State, now: Evaluation) -> State:
        """Move along the momentum direction, and learn from the gradients. Calls no closure."""
        layout, D, options = now.layout, now.operators, self.param_groups[0]
        usual = self._metrics.usual(layout) if state.updates >= self._settings.clip_from else None
        clipped = free.clipping(state, now.norm, usual, self._settings)
        beta = options["momentum"]
        m = self._vector("momentum")
        for old, g in zip(m, now.g, strict=True):
            if state.momentum_weight == 0:
                old.zero_()  # what was there before a rollback is forgotten
            old.mul_(beta).add_(g, alpha=(1 - beta) * clipped)
        weight = beta * state.momentum_weight + (1 - beta)
        state = free.track(state, now.loss, self._settings)._replace(momentum_weight=weight)
        d = D.sharp(m)
        direction_norm = root(*self._evaluator().products(layout, (m, d))) / weight
        decay = max(group["weight_decay"] for group in self.param_groups)
        state = free.choose_step(state, direction_norm, decay, self._settings)
        state = free.observe(state, now.norm, now.squares, now.k, clipped, self._settings)
        # The average is over the points that steps start from: of none that is taken back afterwards.
        share = weight_in_average(state.updates, options["averaging"])
        for e, x in enumerate(layout.gather([p.detach() for p in layout.params])):
            layout.vector("average", e, x).lerp_(x, share)
            layout.vector("previous", e, x).copy_(x)
        gate = Gate(now.norm, 0.0)
        scales, etas = [1 / weight] * len(d), [float(state.step_size)] * len(d)
        move(layout, Direction(d, scales, [], [], []), etas, gate)
        self._metrics.observe(layout, now.g, gate, clipped)
        return state

    # Numbers and vectors ----------------------------------------------------------------------------------------------

    def _rule(self) -> State:
        saved = self.param_groups[0].get("rule", {})
        if saved is not self._known[0]:
            self._known = saved, State(**saved)
        return self._known[1]

    def _keep_rule(self, state: State, k: int) -> None:
        rule = state._asdict()
        self._known = rule, state
        for group in self.param_groups:
            group["rule"] = rule
            group["gradients"] = k
            group["step_size"] = state.step_size or group["step_size"]

    @property
    def _metric_of(self) -> Callable[[dict[str, Any]], metrics.Metric]:
        return lambda group: metrics.get(group["metric"])

    def _taking_part(self) -> Layout:
        """The parameters that move: those with a gradient now, or with a momentum from before."""
        members = [
            [p for p in group["params"] if p.requires_grad and (p.grad is not None or p in self.state)]
            for group in self.param_groups
        ]
        params = [p for some in members for p in some]
        if not any(p.grad is not None for p in params):
            raise RuntimeError("the closure left no gradient in any parameter: it has to call backward() itself")
        self._refuse_sparse(params)
        layout = self._layout_of(members)
        if not self._metrics.known(layout.params) and self._rule().updates:
            self._metrics.join(layout)
        return layout

    def _vector(self, name: str) -> Vector:
        """A vector that is kept; each parameter's state holds its part of it."""
        layout = self._layout
        assert layout is not None
        fill: Vector | None = None
        if name in ("average", "previous") and not layout.keeps(name):  # a parameter that is new begins where it is
            fill = layout.gather([p.detach() for p in layout.params])
        return [layout.vector(name, e, None if fill is None else fill[e]) for e in range(len(layout.entries))]

    def _evaluator(self) -> Probes:
        if self._probes is None:
            assert self._passes is not None
            sign = -1.0 if self.param_groups[0]["maximize"] else 1.0
            self._probes = Probes(self._params(), self._passes, sign, self._taking_part, self._settings)
        return self._probes

    def _assemble(self) -> None:
        super()._assemble()
        self._probes = None

    def _remember(self) -> None:
        """Note where the parameters are left."""
        layout = self._layout
        if layout is not None:
            self._left = layout, (layout.sample(layout.gather([p.detach() for p in layout.params])), _versions(layout))

    def _refuse_moved(self) -> None:
        """Raise if the parameters are not where the last step left them: the optimizer compares points."""
        if self._left is None:
            return
        layout, (sample, versions) = self._left
        now = layout.gather([p.detach() for p in layout.params])
        if versions != _versions(layout) or not layout.matches(sample, now):
            raise RuntimeError(
                "the parameters were changed by something else since the last step of SGDOLFree, which compares points "
                "and would be misled. If that was on purpose, say so: opt.moved() after clipping or projecting, "
                "opt.restart() after loading other weights"
            )

    # Saving and loading -----------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict()`` returned, exactly."""
        refuse_other_states(state_dict)

        def check(final: dict[str, Any]) -> None:
            saved = [index for group in final["param_groups"] for index in group["params"]]
            refuse_other_shapes(saved, final["state"], self._params())

        checkpoint.load(self, super().load_state_dict, state_dict, check, self._loaded)

    def _loaded(self) -> None:
        self._prepare()
        self._assemble()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.param_groups = [Group(group) for group in self.param_groups]
        if "defaults" in state:  # unpickled or copied: new parameters, which nobody watches yet
            self._loaded()


def _versions(layout: Layout) -> list[int]:
    """How often large parameters, of which only a sample is compared, were written to."""
    return [layout.params[entry.start]._version for entry in layout.entries if not entry.merged]
