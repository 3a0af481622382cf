"""The PyTorch optimizer that measures M itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Never

import torch

from sgdol import free, metrics, summary
from sgdol.averaging import weight as weight_in_average
from sgdol.free import Settings, State
from sgdol.metrics import RMS
from sgdol.torch import _checkpoint as checkpoint
from sgdol.torch._base import WatchingOptimizer
from sgdol.torch._elsewhere import Elsewhere
from sgdol.torch._evaluations import Evaluation, Evaluator, Here, loss_of, root
from sgdol.torch._free_options import SHARED, Group, checked, of_this_version, refuse_other_shapes
from sgdol.torch._remarks import Remarks
from sgdol.torch._tensors import real_view
from sgdol.torch._vectors import Space, Vector, dot, numbers
from sgdol.torch._whereabouts import Whereabouts
from sgdol.torch._world import Finder, World

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
        self._remarks = Remarks(self._warn)
        self._calls: Evaluator | None = None
        self._space: Space | None = None
        self._vectors: dict[str, Vector] = {}
        self._whereabouts = Whereabouts()
        self._turn = False
        self._known: tuple[dict[str, Any] | None, State] = (None, State())

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
        result = self._evaluator().first(closure, choose=self._rule().updates == 0)
        with torch.no_grad():
            self._learn(closure, result)
        return result

    def _learn(self, closure: Callable[[], Any], result: Any) -> None:
        """Make the step, after the first call of the closure."""
        state = self._rule()
        here: Here | None = None
        try:
            here, now = self._arrive(state, result)
            if not now.finite:
                self._evaluator().undo()
            elsewhere = Elsewhere(self._evaluator(), closure, self._settings, self._vector)
            state, here, now = elsewhere.advance(state, here, now)
            if now.finite and state.first_norm > 0:
                state = self._move(state, here, now)
                self._remarks.finite()
            elif not now.finite:
                state = state._replace(skipped=state.skipped + 1)
                self._remarks.skipped(self.param_groups)
        except BaseException:  # misuse, the closure raised at another point, or somebody pressed Ctrl-C
            self._evaluator().undo()
            if here is not None:
                here.space.put(here.x)
                self._whereabouts.remember(here)
            raise
        self._keep_rule(state._replace(evaluations=state.evaluations + self._evaluator().count), now.k)
        self._whereabouts.remember(here)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged parameters in, for evaluation and saving, and take them out again.

        Only parameters are averaged. A model with BatchNorm wants its statistics for the averaged parameters:
        :func:`torch.optim.swa_utils.update_bn` inside.
        """
        if self._space is not None and not self._swapped:
            self._whereabouts.refuse_moved(self._space, self._space.point("there"))
        with super()._averaged():
            yield
        self._whereabouts.written()

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
        self._whereabouts = Whereabouts()

    def restart(self) -> None:
        """Forget everything, as if newly constructed; for instance after other weights were loaded into the model."""
        self.state.clear()
        self._prepare()
        for group in self.param_groups:
            for name in ("rule", "gradients", "unit"):
                group.pop(name, None)
            group["step_size"] = 0.0

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
        self._refuse_subclasses(self._params())
        first = self.param_groups[0]
        for name in ("rule", "gradients", "unit"):
            if name in first:
                group[name] = first[name]
        group.setdefault("step_size", first.get("step_size", 0.0))
        self._finder = self._calls = None

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for index, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {index}")
            lines += [f"    {name}: {group[name]}" for name in sorted(group) if name not in ("params", "rule")]
        return "\n".join([*lines, ")"])

    # One step ---------------------------------------------------------------------------------------------------------

    def _arrive(self, state: State, result: Any) -> tuple[Here, Evaluation]:
        """The point, the metric there, and what the first call of the closure says."""
        loss = loss_of(result)
        space = self._taking_part()
        self._refuse_sparse(space.params)
        self._turn = not self._turn  # the memory of the last point is still needed
        here = Here(space, space.point(f"x, {self._turn}"))
        self._whereabouts.refuse_moved(space, here.x)
        metric = self._metric()
        if state.updates == 0:
            for group in self.param_groups:
                group["unit"] = self._evaluator().unit
            if isinstance(metric, RMS):
                inverse = space.inverse_diagonal(metric, None, 0.0, space.gradients(self._evaluator().factor, "g"))
                here = here._replace(inverse=inverse)
        elif isinstance(metric, RMS):
            weight, squares, usual = _geometric_sum(metric.decay, state.updates), self._vector("squares"), None
            inverse = space.inverse_diagonal(metric, squares, weight, [])
            if state.updates >= self._settings.clip_from:
                usual = root(numbers(dot(squares, inverse))[0] / weight) / self._evaluator().unit
            here = here._replace(inverse=inverse, usual=usual)
        found = self._evaluator().gradient(here)
        if found.bent:
            self._remarks.bent()
        return here, self._evaluator().measure_found(here, loss, found)

    def _move(self, state: State, here: Here, now: Evaluation) -> State:
        """Move along the momentum direction, and learn from the gradients; ``here.x`` goes along. Calls no closure."""
        options = self.param_groups[0]
        beta, unit = options["momentum"], self._evaluator().unit
        clipped = free.clipping(state, now.norm, here.usual, self._settings)
        if clipped < 1:
            for g in now.g:
                g.mul_(clipped)
            for square in now.squared or ():
                square.mul_(clipped**2)
        m = self._vector("momentum")
        for old, g in zip(m, now.g, strict=True):
            torch.mul(g, 1 - beta, out=old) if state.momentum_weight == 0 else old.lerp_(g, 1 - beta)
        weight = beta * state.momentum_weight + (1 - beta)
        state = free.track(state, now.loss, self._settings)._replace(momentum_weight=weight)
        d = here.sharp(m)
        direction_norm = root(numbers(dot(m, d))[0]) / weight / unit
        decay = max(group["weight_decay"] for group in self.param_groups)
        state = free.choose_step(state, direction_norm, decay, self._settings)
        state = free.observe(state, now.norm, now.squares, now.k, clipped, self._settings)
        # The average is over the points that steps start from: of none that is taken back afterwards.
        share = weight_in_average(state.updates, options["averaging"])
        x = here.x
        for average, previous, a in zip(self._vector("average"), self._vector("previous"), x, strict=True):
            average.lerp_(a, share)
            previous.copy_(a)
        if decay:
            decays = {p: group["weight_decay"] for group in self.param_groups for p in group["params"]}
            here.space.scale(x, {p: 1 - state.step_size * decays[p] for p in here.space.params})
        for a, b in zip(x, d, strict=True):
            a.add_(b, alpha=-state.step_size / weight / unit)
        here.space.put(x)
        metric = self._metric()
        if isinstance(metric, RMS):
            assert now.squared is not None
            for v, square in zip(self._vector("squares"), now.squared, strict=True):
                torch.add(square, v, alpha=metric.decay, out=v)
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

    def _metric(self) -> Any:
        return metrics.get(self.param_groups[0]["metric"])

    def _taking_part(self) -> Space:
        """The parameters that move: those with a gradient now, or with a momentum from before."""
        params = [p for p in self._params() if p.requires_grad and (p.grad is not None or p in self.state)]
        if not any(p.grad is not None for p in params):
            raise RuntimeError("the closure left no gradient in any parameter: it has to call backward() itself")
        space = self._evaluator().space_of(params)
        if space is not self._space:
            self._space, self._vectors = space, {}
        return space

    def _vector(self, name: str) -> Vector:
        """A vector that is kept; each parameter's state holds its part of it."""
        if name not in self._vectors:
            space = self._space
            assert space is not None
            start = space.zeros()
            for p, piece in space.pieces(start):
                if name in self.state[p]:
                    piece.copy_(self.state[p][name])
                elif name in ("average", "previous"):
                    piece.copy_(real_view(p))
                self.state[p][name] = piece
            self._vectors[name] = start
        return self._vectors[name]

    def _evaluator(self) -> Evaluator:
        if self._calls is None:
            group = self.param_groups[0]
            self._finder = Finder(self._params(), True, self)
            sign = -1.0 if group["maximize"] else 1.0
            self._calls = Evaluator(self._params(), self._finder, sign, group.get("unit", 1.0))
        return self._calls

    def _world(self) -> World:
        self._evaluator()
        return super()._world()

    # Saving and loading -----------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict()`` returned, exactly; or one that version 0.1 saved, in Euclid's norm."""

        def check(final: dict[str, Any]) -> None:
            saved = [index for group in final["param_groups"] for index in group["params"]]
            refuse_other_shapes(saved, final["state"], self._params())

        checkpoint.load(self, super().load_state_dict, of_this_version(state_dict), check, self._prepare)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.param_groups = [Group(group) for group in self.param_groups]
        if "defaults" in state:  # unpickled or copied: new parameters, which nobody watches yet
            self._prepare()


def _geometric_sum(ratio: float, count: int) -> float:
    """1 + ratio + ... + ratio^(count - 1)."""
    return float(count) if ratio == 1 else (1 - ratio**count) / (1 - ratio)
