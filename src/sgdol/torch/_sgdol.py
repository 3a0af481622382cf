"""The PyTorch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Never

import torch
from torch import Tensor

from sgdol.learners import Learner
from sgdol.metrics import Euclidean, Metric
from sgdol.surrogate import Estimator, MomentumStatistics
from sgdol.torch import _checkpoint as checkpoint
from sgdol.torch import _diagnostics as diagnostics
from sgdol.torch._averaging import average_groups
from sgdol.torch._base import WatchingOptimizer
from sgdol.torch._blocks import Blocks, Granularity, Learned, share
from sgdol.torch._checkpoint import Blanks, first_step_size
from sgdol.torch._direction import Directions
from sgdol.torch._gate import Gate
from sgdol.torch._gradients import Gradients
from sgdol.torch._options import LEARNED_WITH, OPTIONS, Catalogue, every_group_has_a_rate, materialise, refuse_unknown
from sgdol.torch._pair import HeldPair
from sgdol.torch._update import move
from sgdol.torch._vectors import Layout, as_number

__all__ = ["SGDOL"]


class SGDOL(WatchingOptimizer):
    r"""Stochastic gradient descent that learns its step size online (Zhuang, Cutkosky and Orabona, ICML 2019).

    Each update has k >= 2 independent stochastic gradients at the same point. From them come the direction d_t, its
    signal u_t and its squared length n_t, and an online learner chooses the multiplier s_t of the base rate:

    .. math:: x_{t+1} = x_t - \mathrm{lr} \cdot s_t \, d_t, \qquad \mathrm{lr} = 1/M.

    **By default** it is SGD with momentum, ``torch.optim.SGD(lr=lr * (1 - momentum), momentum=momentum)``, until the
    curvature that is measured along its steps says that they are too long; then s falls
    (:class:`sgdol.learners.MeasuredCurvature`). That has been measured, not proved: no step is longer than lr.

    **With a proof**, ``SGDOL(params, smoothness=M, **sgdol.PAPER)`` is Algorithm 1 of the paper, whose surrogate losses
    :math:`\ell_t(\eta) = \frac{M \eta^2}{2} n_t - \eta u_t` (equation 3) bound the decrease of the objective in
    expectation (Theorem 1), with FTRL as its learner (Theorem 4):

    .. math:: s_t = \mathrm{clip}\!\left(\frac{\alpha + \sum_{j<t} u_j}{\alpha + \sum_{j<t} n_j}, 0, 2\right).

    The theorems hold for the symmetric estimator, for blocks and in a metric as well, not with momentum
    (:mod:`sgdol.theory`).

    The independent gradients come from your training loop, in whichever way it already works:

    * several ``backward()`` calls before ``step()`` (gradient accumulation): each is one gradient.
      :func:`sgdol.torch.backward` splits a batch for loops that have none;
    * DistributedDataParallel and fully_shard (FSDP2): each rank's gradient before it is averaged is one;
    * one ``backward()`` per ``step()``: the first call holds its gradient, the second updates (see :attr:`pending`);
    * ``step(closure)``: the backward passes inside the closure, which is called once.

    They must be independent draws of the *same* objective. The same batch twice, or two different loss terms in two
    ``backward()`` calls, are not.

    Args:
        params: parameters or parameter groups. Every option below may stand in a group. Groups whose granularity is
            ``"global"`` share a step size if they agree in learner, alpha and kappa.
        lr: 1/M, the base rate: the first step size, and the largest (with the paper's learner half of the largest). A
            float or a tensor; schedulers may move it.
        smoothness: M, instead of lr.
        alpha: how strongly the learner holds on to lr at first, in units of squared gradient norm; a number per block,
            or None for kappa times the squared norm of the first gradient (each block its even share by size), which
            makes the trajectory equivariant to rescaling the objective and the parameters. The paper uses 10.
        kappa: see alpha; None for 10 with a learner that uses hindsight, as the default does, else 1.
        estimator: ``"symmetric"`` moves along the mean of all k gradients; ``"paper"`` is Algorithm 1: it moves along
            the first gradient and uses the second only to measure.
        granularity: how many step sizes are learned: ``"global"`` (one), ``"group"`` (one per parameter group),
            ``"tensor"`` (one per parameter tensor) or ``"coordinate"`` (one per scalar, section 6 of the paper).
        momentum: beta in [0, 1) of :math:`m_t = \beta m_{t-1} + (1-\beta) \bar g_t`: an average, where torch's SGD has
            a sum, so that the lr of a script with SGD is to be divided by 1 - beta.
        bias_correction: whether d_t is :math:`m_t/(1-\beta^t)` or :math:`m_t`; None for the latter with a learner that
            uses hindsight: a first step of full length is too long for a rate at the limit.
        statistics: with momentum, whose (u, n) the learner sees: those of d_t (``"direction"``), or those of the
            gradients alone (``"gradient"``), with which FTRL's eta falls sooner under heavy noise.
        epoch: how many updates an epoch has, where batches are drawn without replacement from few samples
            (``len(loader)`` if each batch is an update): u is corrected for it. None with replacement.
        weight_decay: decoupled: :math:`x \leftarrow x - \eta_t (d_t + \mathrm{weight\_decay} \cdot x)`.
        averaging: None, or the power a >= 0 of a polynomial average of the iterates (see :meth:`averaged`); 8 is usual.
        learner: an online learner from :mod:`sgdol.learners`; None for MeasuredCurvature.
        metric: ``"euclidean"``, ``"rms"``, ``"adagrad"`` or an object of :mod:`sgdol.metrics`: the norm in which
            gradients are measured and directions made. All but the first keep a vector.
        maximize: ascend instead.
        foreach: update many tensors at once (more memory, fewer kernel launches) or one by one; None for what suits the
            device.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.nn.Parameter(torch.tensor([3.0, -4.0]))
    >>> opt = SGDOL([x], lr=50.0)  # with this momentum, a constant step diverges from 38 on
    >>> for _ in range(200):
    ...     for _ in range(2):  # two independent noisy gradients of ||x||^2 / 2
    ...         ((1 + 0.1 * torch.randn(2)) * x * x / 2).sum().div(2).backward()
    ...     opt.step(); opt.zero_grad()
    >>> bool(opt.param_groups[0]["step_size"] < 20), bool(x.norm() < 1)
    (True, True)
    """

    _pair: HeldPair
    _directions: Directions
    _blocks: Blocks | None
    _host = True
    """Whether numbers on the CPU may be read; False decides as on a device."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        *,
        smoothness: float | None = None,
        alpha: float | None = None,
        kappa: float | None = None,
        estimator: Estimator = "symmetric",
        granularity: Granularity = "global",
        momentum: float = 0.9,
        bias_correction: bool | None = None,
        statistics: MomentumStatistics = "direction",
        epoch: int | None = None,
        weight_decay: float = 0.0,
        averaging: float | None = None,
        learner: Learner | None = None,
        metric: str | Metric = "euclidean",
        maximize: bool = False,
        foreach: bool | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown, type(self).__name__)
        given: dict[str, Any] = {
            "lr": lr,
            "smoothness": smoothness,
            "alpha": alpha,
            "kappa": kappa,
            "estimator": estimator,
            "granularity": granularity,
            "momentum": momentum,
            "bias_correction": bias_correction,
            "statistics": statistics,
            "epoch": epoch,
            "weight_decay": weight_decay,
            "averaging": averaging,
            "learner": learner,
            "metric": metric,
            "maximize": maximize,
            "foreach": foreach,
        }
        self._catalogue = Catalogue(given)
        params = materialise(params)
        if self._catalogue.defaults["lr"] is None and params and not every_group_has_a_rate(params):
            raise ValueError(
                "lr or smoothness is needed: got neither. lr = 1/M is the largest step size to start from; "
                "sgdol.SGDOLFree needs neither (experimental)"
            )
        self._prepare()
        self._blank = False
        super().__init__(params, self._catalogue.defaults)

    @property
    def learner(self) -> Learner:
        """The online learner of the groups that bring none."""
        return self._catalogue.learner

    # The public face --------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, or hold the gradient if it is the only one so far.

        Args:
            closure: computes the loss of the batch of the moment, calls ``backward()`` and returns the loss. It is
                called once, and the backward passes in it are the gradients: with one alone, it is held and the next
                ``step()`` updates.

        Returns:
            What the closure returned, or None.
        """
        if torch.compiler.is_compiling():  # it counts passes: nothing to trace, so nothing to recompile
            return torch.compiler.disable(self._step)(closure)
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self._swapped:
            raise RuntimeError("step() inside averaged() would train the averaged weights: leave it first")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        with torch.no_grad():
            gradients = self._take()
            if gradients is not None:
                self._update(gradients)
        return result

    @property
    def pending(self) -> bool:
        """Whether a gradient is held: the next ``step()`` completes the pair and updates."""
        return self._pair.pending

    def averaged(self) -> AbstractContextManager[None]:
        r"""Put the averaged weights into the parameters, for evaluation or saving, and take them out again.

        With ``averaging=a`` every update is followed by

        .. math:: \bar x_t = \bar x_{t-1} + \frac{a + 1}{t + a} (x_{t+1} - \bar x_{t-1}),

        a mean in which iterate t counts about :math:`t^a`. Buffers stay what they are: a BatchNorm keeps the statistics
        of the last weights unless you call :func:`torch.optim.swa_utils.update_bn` inside. What is done to the
        parameters inside is undone. To resume training later, save the model outside, with the optimizer, whose state
        holds the average. Parameters of groups without averaging stay what they are.

        >>> x = torch.nn.Parameter(torch.tensor([4.0]))
        >>> opt = SGDOL([x], lr=0.5, momentum=0, averaging=0)
        >>> for pair in ((3.0, 5.0), (1.0, 3.0)):
        ...     for g in pair:
        ...         (g * x / 2).sum().backward()
        ...     opt.step(); opt.zero_grad()
        >>> with opt.averaged():
        ...     x.item()  # the mean of 2 and 1
        1.5
        >>> x.item()
        1.0
        """
        if all(group["averaging"] is None for group in self.param_groups):
            raise RuntimeError("averaged() needs averages, got averaging=None: construct SGDOL with averaging=8")
        return self._averaged()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; it may bring any of the constructor's options."""
        if isinstance(param_group, dict):
            param_group = self._catalogue.group(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("step_size", first_step_size(group))
        share(self.param_groups)
        self._assemble()

    def diagnostics(self) -> dict[str, Any]:
        r"""What the optimizer has learned, as plain numbers. Reads them from the device, so not for every step.

        * ``step_size``: eta of the last update, one per parameter group (for finer granularities the length of the move
          over that of the direction, so that coordinates that never move do not count).
        * ``signal_to_noise``: :math:`\sum u / \sum (n - u)` over the recent updates: signal and noise of the direction.
          From 0 (a sum of u that noise has made negative counts as 0) to :math:`2^{52}` (no noise at all).
        * ``noise_scale``: the gradient noise scale in units of one of the k gradients: that many averaged would have as
          much signal as noise. Times the microbatch size it is the "simple" one of McCandlish et al. (2018). From 0
          (no noise) to infinity (no signal was seen). Both are not a number before the first update.
        * ``updates``, ``skipped`` (non-finite gradients), ``gradients`` (k of the last update), ``pending``.
        * ``cumulative_surrogate``: :math:`\sum_t \ell_t(\eta_t)`, which bounds the change of f in expectation.
        * ``regret``: that minus what the best fixed multiple of lr would have had, for all blocks the same.
        """
        group = self.param_groups[0]
        return {
            "step_size": [float(g["step_size"]) for g in self.param_groups],
            "pending": self.pending,
            **diagnostics.report(group.get("totals"), group.get("gradients", 0)),
        }

    # One update -------------------------------------------------------------------------------------------------------

    def _take(self) -> Gradients | None:
        """The gradients of this step, if they are enough for an update; else hold what there is."""
        pair, passes, pending = self._pair, self._passes, self.pending
        assert passes is not None
        members = [
            [p for p in group["params"] if p.grad is not None or (pending and pair.holds(p))]
            for group in self.param_groups
        ]
        params = [p for some in members for p in some]
        if not params or (pending and all(p.grad is None for p in params)):
            return None
        self._refuse_sparse(params)
        unseen = passes.unseen(params)
        if unseen:
            passes.watch()
            if checkpoint.is_creating(self.param_groups, params, passes.k, self._world()):
                checkpoint.create(self.param_groups, self.state, self._blanks)
                self._blank = True
                return None
        if self._blank:
            self._blank, self._blocks = False, None
            checkpoint.drop_blanks(self.state, pending)
        layout, world, k = self._layout_of(members), self._world(), passes.k
        host = self._host and layout.like.device.type == "cpu"
        pooled = host and world.ranks == 1 and not world.spread and self._blocks_of(layout).pooled()
        gradients = None
        if pending:
            gradients = pair.take(layout, pooled=pooled)
        elif k * world.ranks >= 2 and not self._holds_first(k):
            gradients = passes.take(layout, pooled=pooled)
            self._warnings.taken(passes.bent, world.remarks)
        else:
            pair.hold(params)
            self._warnings.held(self.param_groups)
        self._warnings.not_zeroed(passes.left_over)
        passes.reset(used=True)
        if unseen:
            self._assemble()  # from the next backward on they are watched
        return gradients

    def _holds_first(self, k: int) -> bool:
        """Whether the paper's estimator waits for the second gradient of its pair; it takes one backward per step."""
        paper = any(group["estimator"] == "paper" for group in self.param_groups)
        if paper and k > 1:
            raise ValueError(
                f'estimator="paper" takes one backward() per step(), got {k}: the first step() holds its gradient and '
                'the second updates. estimator="symmetric" uses all gradients of a step'
            )
        return paper

    def _update(self, gradients: Gradients) -> None:
        """One update, from its gradients to the new parameters: the whole algorithm."""
        gate = Gate(gradients.squared, gradients.signal, self._host)
        first, layout, world = self.param_groups[0], gradients.layout, self._world()
        totals = first["totals"].to(layout.like) if "totals" in first else diagnostics.zeros(layout.like)
        if gate.skip:
            self._skip(totals)
            return
        direction = self._directions.make(gradients, gate.number(diagnostics.updates(totals)), gate)
        learned = self._blocks_of(layout).learn(direction, gradients.squared, gate, world)
        move(layout, direction, learned.etas, gate)
        self._metrics.observe(layout, gate.finite(gradients.g), gate)
        self._record(layout, learned, totals, gradients.k, gate)

    def _skip(self, totals: Tensor) -> None:
        self.param_groups[0]["totals"] = diagnostics.skipped(totals)
        share(self.param_groups)
        self._metrics.forget()
        self._warnings.skipped(self.param_groups)

    def _record(self, layout: Layout, learned: Learned, totals: Tensor, k: int, gate: Gate) -> None:
        """Keep what diagnostics, loggers and averages need of an update."""
        first = self.param_groups[0]
        first["totals"], first["gradients"] = diagnostics.added(totals, learned, gate), k
        for group, eta in zip(layout.groups, learned.step_sizes, strict=True):
            eta = as_number(eta, layout.like)
            group["step_size"] = gate.choose(eta, as_number(group["step_size"], eta))
        share(self.param_groups)
        if gate.host:
            self._warnings.updated(layout.groups, learned.step_sizes)
            self._warnings.identical(gate.squared, gate.signal, layout.params[0].dtype)
        average_groups(self.param_groups, self.state, layout.params, diagnostics.updates(first["totals"]), gate)

    def _blocks_of(self, layout: Layout) -> Blocks:
        """The blocks of these parameters: those of the last update, if nothing has changed."""
        known = self._blocks
        if known is None or known.layout is not layout or not known.current():
            known = self._blocks = Blocks(self.param_groups, layout, self.state, self._catalogue.learner_of)
        return known

    # The parts --------------------------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        """The parts of which this optimizer is made, on its groups and state as they are now."""
        super()._assemble()
        self._blocks = None
        catalogue, finder = self._catalogue, self._finder
        assert finder is not None
        self._pair = HeldPair(self.param_groups, self.state, self._metrics, lambda: finder.world)
        self._directions = Directions(
            catalogue.asks, lambda group: isinstance(catalogue.metric_of(group), Euclidean), lambda: finder.world
        )

    def _measures_own(self) -> bool:
        pairs = any(
            group["estimator"] == "paper" or group["granularity"] == "coordinate" for group in self.param_groups
        )
        return super()._measures_own() and not pairs

    @property
    def _metric_of(self) -> Callable[[dict[str, Any]], Metric]:
        return self._catalogue.metric_of

    @property
    def _blanks(self) -> Blanks:
        return Blanks(
            self.param_groups,
            self.state,
            self._catalogue.learner_of,
            self._metrics,
            self._directions.keeps_direction,
        )

    # Saving and loading -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state, as :meth:`load_state_dict` takes it; see ``_checkpoint`` for torch.distributed.checkpoint."""
        state_dict = super().state_dict()
        return checkpoint.complete(state_dict, self._blanks) if checkpoint.is_asked() else state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned, exactly: sums, counts and the held gradient keep their type.

        Raises:
            ValueError: if it was saved by another configuration (estimator, granularity, learner, metric or alpha).
        """
        checkpoint.load(self, super().load_state_dict, state_dict, self._refuse_another, self._loaded)

    def _refuse_another(self, state_dict: dict[str, Any]) -> None:
        checkpoint.refuse_another_configuration(state_dict, self.param_groups, LEARNED_WITH)

    def _loaded(self) -> None:
        self._assemble()
        if self.pending and not any("held_gradient" in state for state in self.state.values()):
            self._pair.pending = False
            self._warn(
                "state_dict was saved in the middle of a pair (pending is True) but has no held_gradient, so the pair "
                "starts anew. torch.distributed.checkpoint drops what the optimizer does not have: let it load into a "
                "new optimizer."
            )
        self._blank = False
        checkpoint.drop_blanks(self.state, self.pending)
        share(self.param_groups)
        assert self._passes is not None
        self._passes.reset()  # parameters that have been moved since have new accumulators

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_catalogue", "_warned")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name in OPTIONS:  # a state saved by an older version may lack some
                group.setdefault(name, self.defaults[name])
            group.setdefault("step_size", first_step_size(group))
        if "defaults" in state:  # unpickled or copied: new parameters, which nobody watches yet
            warned = self._warned
            self._prepare()
            self._warned, self._blank = warned, False
            self._assemble()
