"""The PyTorch optimizer that measures M itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Never

import torch
from torch import Tensor

from sgdol import free, metrics, summary
from sgdol.averaging import weight as weight_in_average
from sgdol.free import Settings, State
from sgdol.torch import _checkpoint as checkpoint
from sgdol.torch._averaging import UnusedAverage
from sgdol.torch._base import WatchingOptimizer
from sgdol.torch._checkpoint import FreeBlanks
from sgdol.torch._options import INSTEAD_FREE as INSTEAD
from sgdol.torch._options import OPTIONS_FREE as OPTIONS
from sgdol.torch._options import (
    SHARED,
    checked,
    largest,
    materialise,
    multipliers,
    ratios,
    refuse_scaled,
    unknown_in_group,
)
from sgdol.torch._probes import MOVED, Batch, Evaluation, Probes, root
from sgdol.torch._rerun import Buffers, Replay
from sgdol.torch._update import Gate
from sgdol.torch._vectors import Layout, Vector, sample
from sgdol.torch._world import Measured, local, real_view

__all__ = ["SGDOLFree"]


class SGDOLFree(WatchingOptimizer):
    r"""SGDOL without a learning rate and without a smoothness constant. Experimental: there is no convergence proof.

    SGDOLFree measures the smoothness M along its own steps. In some steps (often at first, every 24th in the long run)
    it evaluates the batch a second time, at the point before the last step: a *look-back*. The change of the gradient
    over the length of the step is a curvature, and M is a mean of curvatures. Signal and noise come from the
    independent gradients of the batch, as in :class:`sgdol.SGDOL`. The step size is

    .. math:: \eta_t = \frac{\alpha + S}{M (\alpha + S/4 + c N)}, \qquad S = \sum_{j<t} u_j, \quad
        N = \sum_{j<t} (n_j - u_j), \quad \alpha = 4 n_1,

    where c is 1/2 while the loss falls and 1 while it stands still. It multiplies a momentum direction in a metric made
    of past gradients. Gradients more than twice as long as usual are shortened to that. If a look-back shows that the
    last step was much too long, the step is undone; if the loss jumps, the run goes back to its average.
    ``docs/explanation/without_smoothness.md`` has the whole algorithm.

    **The loop** is ``loss = backward(loss_fn, *batch); opt.step(); opt.zero_grad()`` with
    :func:`sgdol.torch.backward`, which runs the batch in two parts and remembers how to run it again for a look-back.
    Dropout draws the same numbers in both runs, and buffers such as BatchNorm's statistics are updated once.
    ``step(closure)`` takes a closure that evaluates **the same batch** each time it is called within one step, in two
    or more ``backward()`` calls, and returns its loss. Under DistributedDataParallel and ``fully_shard`` one
    ``backward()`` is enough, because the ranks are the independent gradients.

    **Evaluate and save the average** of the weights: see :meth:`averaged` and :meth:`averaged_state_dict`.

    The losses of all steps must be draws of one objective. Adversarial losses (a GAN) are not: use Adam there.

    Memory: three vectors of the size of the model (momentum, average and last step), and :math:`2 (n^2 + m^2)` numbers
    for a matrix of n x m that the metric ``"kronecker"`` turns, or a fourth vector. See ``state_dtype``.

    Args:
        params: parameters or parameter groups. Groups may differ in lr and weight_decay.
        lr: a multiplier of the learned step size, usually 1. A scheduler multiplies the step sizes. Parameter groups
            may differ: with :math:`\lambda_i` in group i and :math:`\rho_i = \lambda_i / \max_j \lambda_j` everything
            is measured in the metric :math:`D_i / \rho_i`, and :math:`\max_j \lambda_j` multiplies the step. 0 freezes
            a group. If the largest lr looks like another optimizer's learning rate, a warning says so once: if it is
            given as less than 0.02 or more than 50; if it is above 50 later; or if it falls below 0.02 from 50 times
            as much in one step and does not rise after that. Schedulers of torch count by their highest value.
        momentum: beta in [0, 1) of :math:`d_t = D_t^{-1} m_t/(1-\beta^t)`,
            :math:`m_t = \beta m_{t-1} + (1-\beta) \bar g_t`.
        weight_decay: decoupled, in units of the root mean square of :math:`d_t` over all coordinates:
            :math:`x \leftarrow x - \lambda \eta_t (d_t + \mathrm{weight\_decay} \, \mathrm{rms}(d_t) \, x)`. AdamW's
            usual values, 0.01 to 0.1, can be used, because AdamW's direction has a root mean square of about 1.
        averaging: the power a >= 0 of the polynomial average: the weights of step t count about as :math:`t^a`.
        metric: ``"kronecker"``, ``"rms"``, ``"adagrad"``, ``"euclidean"`` (D = 1, one vector less), or an object of
            :mod:`sgdol.metrics`. ``"kronecker"`` measures matrices and convolutions in the eigenbases of their rows and
            columns. It measures vectors, sides of more than 512, and parameters of which ranks have pieces
            (``fully_shard``, tensor parallelism), coordinate by coordinate, as ``"rms"`` does.
        state_dtype: ``torch.bfloat16`` keeps momentum, the squares of a diagonal metric, and the last step in bfloat16,
            rounded stochastically: with ``metric="rms"`` 10 bytes per parameter instead of 16. The average and the
            factors of ``"kronecker"`` stay as they are, and so do its squares of small vectors. An undone step returns
            to the last point up to a relative error of :math:`2^{-7}` of the step. A state that is loaded is converted
            to this type. None, the default, for float32, or float64 where parameters are.
        maximize: maximise the objective instead of minimising it; the same in all groups.
        foreach: as in torch.optim; it makes no difference here.

    >>> import torch
    >>> from sgdol.torch import backward
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = SGDOLFree(model.parameters())
    >>> for _ in range(300):
    ...     x = torch.randn(32, 3)
    ...     y = x.sum(1, keepdim=True) + 0.1 * torch.randn(32, 1)
    ...     loss = backward(lambda x, y: (model(x) - y).square().mean(), x, y)
    ...     opt.step(); opt.zero_grad()
    >>> with opt.averaged():
    ...     bool((model.weight - 1).abs().max() < 0.02)
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        averaging: float = 8.0,
        metric: str | metrics.Metric = "kronecker",
        state_dtype: torch.dtype | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        **unknown: Never,
    ) -> None:
        given = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "averaging": averaging,
            "metric": metric,
            "state_dtype": state_dtype,
            "maximize": maximize,
            "foreach": foreach,
        }
        defaults = checked(given, unknown)
        self._settings = Settings()
        self._prepare()
        super().__init__(materialise(params), defaults)
        self._warnings.given(largest(self.param_groups))

    def _prepare(self) -> None:
        # What is not saved in the state.
        super()._prepare()
        self._probes: Any = None  # Probes; it keeps the recorder of backward passes and its hooks alive
        self._learned_cache: tuple[dict[str, Any] | None, State] = (None, State())  # group["rule"], and it as a State
        # Where the last step left the parameters: a sample of their numbers, and versions (see _note_point).
        self._left: tuple[Layout, Vector, list[int]] | None = None
        if not hasattr(self, "_unused"):
            self._unused = UnusedAverage(self)

    # The public face --------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, with the batch that :func:`sgdol.torch.backward` has run or that the closure evaluates.

        Args:
            closure: computes the loss of one batch in two or more parts, calls ``backward()`` on each part, and returns
                the loss. It is called once or twice, more often in the first step, and must evaluate the same batch
                each time: draw the batch outside.

        Returns:
            The value of the closure's first call; None without a closure.
        """
        if self._swapped:
            raise RuntimeError("step() inside averaged() would train the averaged weights: leave it first")
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._step)(closure)
        if closure is None and checkpoint.is_asked():
            self._blanks.create()
            return None
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        assert self._passes is not None
        if self.state and not self._learned().updates:
            self._drop_blanks()
        try:
            batch = self._batch() if closure is None else Batch([Replay(closure, [self._buffers])], closure=True)
            self._probes.run_first(batch)
            if not self._is_single_gradient(batch):
                with torch.no_grad():
                    self._make_step(batch)
        finally:
            self._passes.reset(used=True)  # the passes refer to the batch: let its memory go
            torch.clear_autocast_cache()  # it holds casts of the weights from before the step
        return None if closure is None else batch.loss

    def _batch(self) -> Batch:
        passes = self._passes
        assert passes is not None
        k, origins = passes.finish(), passes.origins
        usage = "loss = sgdol.torch.backward(lambda x, y: criterion(model(x), y), inputs, targets)"
        if not k:
            raise RuntimeError(f"step() found no new gradients: before each step() write {usage}, or give a closure")
        replays = [replay for replay in dict.fromkeys(origins) if replay is not None]
        if any(replay.loss is None for replay in replays):
            raise RuntimeError(
                "a call of backward() raised an error before its last part, and the gradients of its other parts are "
                "still in .grad: call opt.zero_grad() before you run the batch again"
            )
        if None in origins or not replays:
            raise RuntimeError(
                "SGDOLFree evaluates some batches a second time, which it cannot do after loss.backward(). Write "
                f"{usage} in place of computing the loss and loss.backward(): it costs the same. Or give step() a "
                "closure that evaluates the batch"
            )
        if len(origins) != sum(replay.passes for replay in replays):
            raise RuntimeError(
                "a look-back of another optimizer has added to these gradients: one backward() reached the parameters "
                "of both. Give all parameters to one SGDOLFree, as parameter groups, or call zero_grad() of this "
                "optimizer before its own backward()"
            )
        if passes.left_over:
            raise RuntimeError(
                "gradients were not zeroed after the last step(): call opt.zero_grad() after every step, also after "
                "one that raised an error"
            )
        return Batch(replays, closure=False)

    def _is_single_gradient(self, batch: Batch) -> bool:
        # Usually the last batch of an epoch, with a single sample. One gradient alone does not show its noise.
        assert self._passes is not None
        started = self._learned().updates > 0
        asked_for = all(replay.whole for replay in batch.replays) and not (batch.closure and started)
        if self._passes.finish() != 1 or self._passes.world.ranks > 1 or asked_for:
            return False
        if not started:
            raise RuntimeError(
                "the first batch has a single sample, which is a single gradient, and SGDOLFree needs two to see the "
                "noise: use batches of two or more samples, or call backward() twice before each step()"
            )
        self._warn(
            "a batch of a single sample is a single gradient, in which SGDOLFree cannot see the noise: it leaves such "
            "steps out. DataLoader(..., drop_last=True) drops the last batch of an epoch."
        )
        return True

    def _make_step(self, batch: Batch) -> None:
        state, probes, groups, passes = self._learned(), self._probes, self.param_groups, self._passes
        assert passes is not None
        try:
            multiplier = max(multipliers(groups))  # raises if a scheduler has set an lr that is negative or not finite
            self._warnings.multiplied(largest(groups), state.updates)
            now = first = probes.first_evaluation(batch, self._moved())
            self._warnings.taken(passes.contributions.distorted, self._world().warnings)
            if not state.updates:
                refuse_scaled(now.clipped)
            if not now.finite:
                batch.undo()
            state, now = probes.choose_start(state, first, batch)
            if now is not first:  # the step starts from another point
                self._left = None
                self._warnings.rolled_back(state.rollbacks, state.updates)
            if now.finite and state.first_norm > 0:
                # In the first step contributions are whole vectors: free them before the momentum is allocated.
                passes.contributions.forget()
                state = self._move(state, now, multiplier)
                if abs(now.norm**2 - now.signal) <= now.layout.rounding * now.norm**2:
                    self._warnings.identical_again(state.updates)
            else:
                self._note_point()
                state = state._replace(evaluations=state.evaluations + probes.count)
                if not now.finite:
                    state = state._replace(skipped=state.skipped + 1)
                    self._metrics.forget()
                    self._warnings.skipped(groups, state.updates)
        except BaseException:  # misuse, an error of the closure at another point, or Ctrl-C
            batch.undo()
            for p in self._params():  # gradients may be those of another point
                p.grad = None
            self._metrics.forget()
            self._note_point()
            raise
        self._unused.steps += 1
        rule = state._asdict()
        self._learned_cache = rule, state
        for group in groups:
            group["rule"] = rule
            group["gradients"] = now.k
            group["step_size"] = state.step_size * float(group["lr"]) if state.step_size else group["step_size"]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager: inside, the parameters are the average of the weights, for evaluation and saving.

        Only parameters are averaged. For a model with BatchNorm call :func:`torch.optim.swa_utils.update_bn` inside, so
        that its statistics are those of the averaged parameters; they stay in the model at the end.
        """
        if not self._swapped and self._world().mean(float(self._moved()))[0]:
            raise RuntimeError(MOVED)
        self._unused.asked = True
        with super().averaged():
            yield
        if self._left is not None:
            self._note_point()  # swapping has raised the versions of the parameters

    def diagnostics(self) -> dict[str, Any]:
        """What the optimizer has learned, as plain numbers.

        * ``step_size``: lr eta of the last step, one per parameter group; ``smoothness``: M as measured so far.
        * ``loss``: a running mean of the batch losses, over about ten steps.
        * ``signal_to_noise``: sum of u over sum of n - u, over about the last hundred steps; at least 0.
        * ``noise_scale``: how many of the k gradients have to be averaged until signal and noise are equal; infinite
          if no signal was seen.
        * ``updates``; ``skipped``: steps left out because the batch was not finite; ``gradients``: k of the last step.
        * ``evaluations``: how often a batch was evaluated; ``rejections``: steps undone after a look-back;
          ``rollbacks``: returns to the average after a jump of the loss.
        """
        state = self._learned()
        k = self.param_groups[0].get("gradients", 0)
        length = state.recent_signal + state.recent_noise
        return {
            "step_size": [g["step_size"] for g in self.param_groups],
            "smoothness": state.smoothness,
            "loss": state.mean_loss,
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
        """Call this after you changed the parameters a little (clipping, projecting): training goes on from there."""
        self._left = None

    def restart(self) -> None:
        """Forget everything that was learned. Call this after you loaded other weights into the model."""
        self.state.clear()
        self._prepare()
        for group in self.param_groups:
            for name in ("rule", "gradients", "unit"):
                group.pop(name, None)
            group["step_size"] = 0.0
        self._assemble()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; it may bring its own lr and weight_decay."""
        if isinstance(param_group, dict):
            unknown = unknown_in_group(param_group, len(self.param_groups), "SGDOLFree", OPTIONS, INSTEAD)
            if unknown is not None:
                self._warn(unknown)
            options = checked({**self.defaults, **param_group}, {})
            param_group.update({name: options[name] for name in param_group if name in self.defaults})
            for name in SHARED:
                if options[name] != self.defaults[name]:
                    raise ValueError(
                        f"{name} is the same for all parameter groups: this optimizer has {self.defaults[name]!r}, "
                        f"the group has {options[name]!r}"
                    )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        first = self.param_groups[0]
        for name in ("rule", "gradients", "unit"):
            if name in first:
                group[name] = first[name]
        group.setdefault("step_size", first.get("step_size", 0.0))
        self._warnings.given(largest(self.param_groups), smallest=0.0)  # a small one is a ratio to the others
        self._assemble()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for index, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {index}")
            lines += [f"    {name}: {group[name]}" for name in sorted(group) if name not in ("params", "rule")]
        return "\n".join([*lines, ")"])

    # One step ---------------------------------------------------------------------------------------------------------

    def _move(self, state: State, now: Evaluation, multiplier: float) -> State:
        layout, D, settings, options = now.layout, now.operators, self._settings, self.param_groups[0]
        usual = self._metrics.usual(layout) if state.updates >= settings.young else None
        shortened = free.clipping(state, now.clipped * now.norm, usual, settings)
        clipped = now.clipped * shortened  # by the user and by this optimizer
        decays = any(group["weight_decay"] for group in self.param_groups)

        # m <- beta m + (1 - beta) g, kept in the coordinates of D; d = D^-1 m / weight.
        beta = options["momentum"]
        kept = beta * state.past if state.momentum_weight else 0.0  # after a rollback the momentum starts again
        weight = beta * state.momentum_weight + (1 - beta)  # 1 - beta^t
        directions: Vector = []

        def pairs(e: int) -> list[tuple[Tensor, Tensor]]:
            m = layout.vector("momentum", e).mul_(kept).add_(now.h[e], alpha=(1 - beta) * clipped)
            layout.store("momentum", e, m)
            directions.append(D[e].divided(m))
            return [(m, directions[e]), (directions[e],) * 2] if decays else [(m, directions[e])]

        products = self._probes.products(layout, pairs)
        state = free.track(state, now.loss, settings)
        state = free.choose_step(state, root(products[0]) / weight, settings, multiplier)
        state = free.observe(state, now.norm, now.squares, now.k, shortened, settings, given=now.clipped)

        # The average is over the points from which steps start, so no rejected step is ever in it.
        share = weight_in_average(state.updates, options["averaging"])
        self._average_of_frozen(layout, share)
        eta = float(state.step_size * multiplier)
        factor = eta / weight if options["maximize"] else -eta / weight
        rms = root(products[1] / layout.size) / weight if decays else 0.0
        units = [eta * rms * ratio for ratio in ratios(self.param_groups)]  # d has the group's ratio from D/rho already
        momentum: list[Any] = []
        points: Vector = []
        memory = layout.real_parameters()
        left = self._left[1] if self._left is not None and self._left[0] is layout else None
        for e, entry in enumerate(layout.entries):
            x = left[e] if left is not None and entry.merged else layout.here(e)  # _moved() has compared them
            xs, s = memory[layout.rows(e)], layout.vector("last_step", e)
            layout.vector("average", e, x).lerp_(x, share)
            decay = units[layout.places[entry.group]] * layout.groups[entry.group]["weight_decay"]
            d = D[e].back(directions[e])
            point = torch.add(x * (1 - decay) if decay else x, d, alpha=factor)  # x <- (1 - decay) x - eta d
            if xs[0].dtype != entry.dtype:
                point = point.to(xs[0].dtype).to(entry.dtype)  # rounded as the parameter is
            layout.store("last_step", e, torch.sub(point, x, out=s))
            torch._foreach_copy_(xs, layout.parts(e, point, to_read=True))
            points.append(point if entry.merged else sample(point))
            # The first update has D constant in each tensor, and chooses the bases.
            momentum.append(layout.vector("momentum", e) if D[e].turns or state.updates == 1 else None)
        self._left = layout, points, _versions(layout)
        if state.past != 1:
            self._metrics.shorten_past(state.past)
        self._metrics.observe(layout, now.g, Gate(now.norm, 0.0), clipped, now.h, momentum)
        for e, m in enumerate(momentum):
            if m is not None:
                layout.store("momentum", e, m, draw=1)
        return state._replace(momentum_weight=weight, evaluations=state.evaluations + self._probes.count)

    def _average_of_frozen(self, layout: Layout, share: float) -> None:
        # The average of a parameter that has been frozen approaches its value.
        params = self._params()
        for p in set(params).difference(layout.params) if len(params) > len(layout.params) else ():
            if "average" in self.state.get(p, ()):
                average = local(self.state[p]["average"])
                average.lerp_(real_view(local(p.detach())).to(average.dtype), share)

    # Numbers and vectors ----------------------------------------------------------------------------------------------

    def _learned(self) -> State:
        saved = self.param_groups[0].get("rule", {})
        if saved is not self._learned_cache[0]:
            self._learned_cache = saved, State(**saved)
        return self._learned_cache[1]

    @property
    def _ratios(self) -> Callable[[], list[float]]:
        groups = self.param_groups  # the lambda must not refer to the optimizer, which has it: a cycle keeps memory
        return lambda: ratios(groups)

    def _measured(self) -> Measured:
        return "whole" if super()._measured() == "whole" else "piece"

    @property
    def _metric_of(self) -> Callable[[dict[str, Any]], metrics.Metric]:
        return lambda group: metrics.get(group["metric"])

    def _active_layout(self) -> Layout:
        # Of the parameters that move: those with a gradient now, or with a momentum from before.
        members = [
            [p for p in group["params"] if p.requires_grad and (p.grad is not None or p in self.state)]
            for group in self.param_groups
        ]
        params = [p for of_group in members for p in of_group]
        if not any(p.grad is not None for p in params):
            raise RuntimeError("there is no gradient in any parameter: a closure has to call backward() itself")
        self._refuse_sparse(params)
        layout = self._layout_of(members)
        if self._metrics.without_past(layout) and self._learned().updates:
            self._metrics.join(layout)
        return layout

    def _assemble(self) -> None:
        super()._assemble()
        assert self._passes is not None
        sign = -1.0 if self.param_groups[0]["maximize"] else 1.0
        self._probes = Probes(self._params(), self._passes, sign, self._active_layout, self._settings)
        self._buffers = Buffers(self._params())

    def _note_point(self) -> None:
        layout = self._layout
        if layout is not None:
            self._left = layout, layout.sample(layout.parameters()), _versions(layout)

    def _moved(self) -> bool:
        # Whether somebody else moved the parameters, or this rank's pieces of them, since _note_point().
        if self._left is None:
            return False
        layout, sampled, versions = self._left
        return versions != _versions(layout) or not layout.matches(sampled, layout.parameters())

    # Saving and loading -----------------------------------------------------------------------------------------------

    @property
    def _blanks(self) -> FreeBlanks:
        return FreeBlanks(self.param_groups, self.state, self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """The state for :meth:`load_state_dict`. For torch.distributed.checkpoint call its ``get_state_dict``."""
        state_dict = super().state_dict()
        return self._blanks.complete(state_dict) if checkpoint.is_asked() else state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict()`` returned, exactly."""
        check, then = checkpoint.refuse_other_states, self._loaded
        checkpoint.load(self, super().load_state_dict, state_dict, check, then, in_basis=("momentum",))

    def _loaded(self) -> None:
        self._prepare()
        for group in self.param_groups:  # that of this optimizer, to which what was loaded is converted
            group["state_dtype"] = self.defaults["state_dtype"]
        # Groups that are added later go on with the options that were loaded.
        self.defaults.update({name: self.param_groups[0][name] for name in SHARED})
        self._assemble()
        self._drop_blanks()

    def _drop_blanks(self) -> None:
        # State that torch.distributed.checkpoint made the optimizer create (see _checkpoint) for parameters that have
        # not moved; "moves" tells which these are.
        started = self._learned().updates
        for p in list(self.state):
            if not started or not self.state[p].pop("moves", True) or not self.state[p]:
                del self.state[p]
        if not started:
            for group in self.param_groups:
                group.pop("unit", None)
        self._metrics.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "defaults" in state:  # unpickled or copied: the parameters are new, and have no hooks yet
            self._loaded()


def _versions(layout: Layout) -> list[int]:
    # Of large parameters only a sample is compared; a write in place raises the version.
    return [layout.params[entry.start]._version for entry in layout.entries if not entry.merged]
