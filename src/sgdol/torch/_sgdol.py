"""The PyTorch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
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
from sgdol.torch._gradients import Gradients, HeldPair
from sgdol.torch._options import (
    OPTIONS,
    Catalogue,
    materialise,
    refuse_scheduled,
    refuse_unknown,
    unknown_in_group,
)
from sgdol.torch._update import Gate, move
from sgdol.torch._vectors import Layout
from sgdol.torch._world import Measured

__all__ = ["SGDOL"]


class SGDOL(WatchingOptimizer):
    r"""SGD with momentum that learns its step size online (Zhuang, Cutkosky and Orabona, ICML 2019).

    Each update has k >= 2 independent stochastic gradients at the same point. From these gradients come the direction
    :math:`d_t`, its signal :math:`u_t` (an estimate of :math:`\langle d_t, \nabla f(x_t)\rangle`) and its squared
    length :math:`n_t = \|d_t\|^2`. An online learner chooses the multiplier :math:`s_t` of the base rate 1/M:

    .. math:: x_{t+1} = x_t - \eta_t \, d_t, \qquad \eta_t = \frac{s_t}{M}, \qquad
        \frac1M = \frac{\mathrm{lr}}{1 - \beta}.

    ``lr`` is the number that ``torch.optim.SGD(lr=lr, momentum=momentum)`` takes: with s = 1 the update is SGD's.
    (SGD's momentum buffer is a sum of gradients; :math:`d_t` is their average, :math:`1 - \beta` times that sum.)

    **By default** s is 1 until the curvature measured along the steps shows that they are too long; then s falls
    (:class:`sgdol.learners.MeasuredCurvature`). There is no convergence proof for this learner. s is never larger than
    1. SGDOL cannot correct a rate whose first steps ruin a network, and on CNNs with BatchNorm s hardly ever falls.

    **With a proof**: ``SGDOL(params, smoothness=M, **sgdol.PAPER)`` is Algorithm 1 of the paper. Its surrogate losses
    :math:`\ell_t(\eta) = \frac{M \eta^2}{2} n_t - \eta u_t` (equation 3) bound the decrease of the objective in
    expectation (Theorem 1), and FTRL on them converges (Theorem 4):

    .. math:: s_t = \mathrm{clip}\!\left(\frac{\alpha + \sum_{j<t} u_j}{\alpha + \sum_{j<t} n_j}, 0, 2\right).

    The theorems also hold for the symmetric estimator, for blocks, in a metric, and with momentum at a lower base rate
    (:mod:`sgdol.theory`).

    **Where the independent gradients come from**:

    * :func:`sgdol.torch.backward` splits a batch into two parts, each of which is one gradient;
    * several ``backward()`` calls before ``step()`` (gradient accumulation): each call is one gradient;
    * DistributedDataParallel and ``fully_shard`` (FSDP2): the gradient of each rank, before the average, is one;
    * one ``backward()`` per ``step()``: the first call holds its gradient, the second updates (see :attr:`pending`);
    * ``step(closure)``: each backward pass inside the closure, which is called once, is one gradient.

    The gradients must be independent draws of the *same* objective. Two passes over the same batch are not independent,
    and two different loss terms in two ``backward()`` calls are not the same objective. k is the number of passes that
    reached the tensor which most of them reached, so all passes should reach some tensor.

    Args:
        params: parameters or parameter groups. Every option below may stand in a group. Groups with granularity
            ``"global"`` share a step size if they have the same learner, alpha and kappa.
        lr: the learning rate of SGD with the same momentum. The step size starts there and never exceeds it (with the
            paper's learner it may double). A float or a tensor; schedulers may change ``lr`` and ``momentum``.
        smoothness: M, instead of lr: lr is then (1 - momentum)/M.
        alpha: how strongly the learner keeps the step size at lr at first, in units of squared gradient norm; a number
            per block. None for kappa times the squared norm of the first gradient (each block its share by size), which
            makes the run independent of the scale of the objective and of the parameters. The paper uses 10.
        kappa: see alpha. None for 10 with a learner that uses hindsight, as the default does, else 1.
        estimator: ``"symmetric"`` moves along the mean of all k gradients. ``"paper"`` is Algorithm 1: it moves along
            the first gradient and uses the second one only to measure.
        granularity: how many step sizes are learned: ``"global"`` (one), ``"group"`` (one per parameter group),
            ``"tensor"`` (one per parameter tensor) or ``"coordinate"`` (one per scalar, section 6 of the paper).
        momentum: beta in [0, 1) of the average :math:`m_t = \beta m_{t-1} + (1-\beta) \bar g_t`.
        bias_correction: True for :math:`d_t = m_t/(1-\beta^t)`, False for :math:`d_t = m_t`. None for False with a
            learner that uses hindsight, as the default does, else True.
        statistics: with momentum, which (u, n) the learner sees: ``"direction"``, those of :math:`d_t`, or
            ``"gradient"``, those of the gradients alone; with the latter FTRL lowers the step size sooner.
        epoch: the number of updates in an epoch if batches are drawn without replacement from few samples
            (``len(loader)`` if each batch is an update): u is corrected for it. None for batches with replacement.
        weight_decay: decoupled: :math:`x \leftarrow x - \eta_t (d_t + \mathrm{weight\_decay} \cdot x)`. With s = 1 it
            decays as much as SGD with the same lr, momentum and weight_decay.
        averaging: the power a >= 0 of a polynomial average of the weights (see :meth:`averaged`), usually 8; None for
            no average.
        learner: an online learner of :mod:`sgdol.learners`; None for MeasuredCurvature.
        metric: the norm in which gradients are measured and directions made: ``"euclidean"``, ``"rms"``, ``"adagrad"``,
            ``"kronecker"`` or an object of :mod:`sgdol.metrics`.
        maximize: maximise the objective instead of minimising it.
        foreach: accepted as in torch.optim; it makes no difference here.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.nn.Parameter(torch.tensor([3.0, -4.0]))
    >>> opt = SGDOL([x], lr=5.0)  # with this momentum, a constant step diverges from 3.8 on
    >>> for _ in range(200):
    ...     for _ in range(2):  # two independent noisy gradients of ||x||^2 / 2
    ...         ((1 + 0.1 * torch.randn(2)) * x * x / 2).sum().div(2).backward()
    ...     opt.step(); opt.zero_grad()
    >>> bool(opt.param_groups[0]["step_size"] < 2), bool(x.norm() < 1)
    (True, True)
    """

    _pair: HeldPair
    _directions: Directions
    _blocks: Blocks | None
    _host = True  # numbers on the CPU may be read; tests set False, which decides everything as on an accelerator

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
        given = {name: value for name, value in locals().items() if name in OPTIONS or name == "smoothness"}
        refuse_unknown(unknown, type(self).__name__)
        self._catalogue = Catalogue(given)
        self._prepare()
        self._has_blanks = False
        super().__init__(materialise(params), self._catalogue.defaults)

    @property
    def learner(self) -> Learner:
        """The online learner of parameter groups that do not set their own."""
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
            return torch.compiler.disable(self.step)(closure)
        if self._swapped:
            raise RuntimeError("step() inside averaged() would train the averaged weights: leave it first")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for index, group in enumerate(self.param_groups):
            lr, beta = group["lr"], group["momentum"]
            # An lr on an accelerator is not read.
            if not 0 <= beta < 1 or not ((isinstance(lr, Tensor) and not lr.is_cpu) or 0 <= lr < math.inf):
                refuse_scheduled(index, float(lr), beta)
        with torch.no_grad():
            taken = self._take()
            if taken is not None:
                self._update(*taken)
        return result

    @property
    def pending(self) -> bool:
        """True if one gradient is held: the next ``step()`` adds the second one and updates."""
        return self._pair.pending

    def averaged(self) -> AbstractContextManager[None]:  # type: ignore[override]
        r"""Context manager: inside, the parameters are the average of the weights, for evaluation or saving.

        With ``averaging=a`` every update is followed by

        .. math:: \bar x_t = \bar x_{t-1} + \frac{a + 1}{t + a} (x_{t+1} - \bar x_{t-1}),

        a mean in which the weights of step t count about as :math:`t^a`. Buffers are not averaged: for BatchNorm call
        :func:`torch.optim.swa_utils.update_bn` inside. Changes of parameters inside are undone at the end, changes of
        buffers stay. To resume training later, save the model outside, together with the optimizer, whose state holds
        the average.
        Groups without averaging keep their parameters.

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
        return super().averaged()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; it may bring any of the constructor's options."""
        if isinstance(param_group, dict):
            unknown = unknown_in_group(param_group, len(self.param_groups), "SGDOL", ("smoothness", *OPTIONS))
            if unknown is not None:
                self._warn(unknown)
            param_group = self._catalogue.group(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("step_size", first_step_size(group))
        share(self.param_groups)
        self._assemble()

    def diagnostics(self) -> dict[str, Any]:
        r"""What the optimizer has learned, as plain numbers. Reads them from the device, so not for every step.

        * ``step_size``: lr s of the last update, one per parameter group, to be compared with lr: the lr at which SGD
          would have made this step. The averaged direction is multiplied by eta = step_size/(1 - momentum). For finer
          granularities s is the length of the move over that of a move with s = 1, so that coordinates that never move
          do not count.
        * ``signal_to_noise``: :math:`\sum u / \sum (n - u)` over the recent updates: signal and noise of the direction.
          From 0 (a sum of u that noise has made negative counts as 0) to :math:`2^{52}` (no noise at all).
        * ``noise_scale``: how many of the k gradients have to be averaged until signal and noise are equal, from 0 (no
          noise) to infinity (no signal was seen). Times the microbatch size it is the "simple" gradient noise scale of
          McCandlish et al. (2018). Both ratios are nan before the first update.
        * ``updates``, ``skipped`` (non-finite gradients), ``gradients`` (k of the last update), ``pending``.
        * ``cumulative_surrogate``: :math:`\sum_t \ell_t(\eta_t)`, which bounds the change of f in expectation.
        * ``regret``: ``cumulative_surrogate`` minus its value had the best fixed s been used in all blocks.
        """
        group = self.param_groups[0]
        return {
            "step_size": [float(g["step_size"]) for g in self.param_groups],
            "pending": self.pending,
            **diagnostics.report(group.get("totals"), group.get("gradients", 0)),
        }

    # One update -------------------------------------------------------------------------------------------------------

    def _take(self) -> tuple[Gradients, Blocks] | None:
        """The gradients of this step and their blocks; None if there are not enough: a single gradient is held."""
        pair, passes, groups = self._pair, self._passes, self.param_groups
        assert passes is not None
        pending = groups[0].get("pending", False)
        # A parameter takes part if it has a gradient now or in the first half of the pair.
        members = [
            [p for p in group["params"] if p.grad is not None or (pending and pair.holds(p))] for group in groups
        ]
        params = members[0] if len(members) == 1 else [p for some in members for p in some]
        if not params or (pending and all(p.grad is None for p in params)):
            return None
        k, world, contributions = passes.finish(), passes.world, passes.contributions
        counts = contributions.counts
        # Gradients that no hook has seen are sparse, or of parameters that were unfrozen, or written by hand.
        unseen = not (len(counts) == len(params) and all(counts)) and passes.unseen(params)
        if unseen or passes.overlapping:
            self._refuse_sparse(params)
        if unseen:
            passes.watch()
            # torch.distributed.checkpoint makes the state by a step() with gradients of 0.
            if checkpoint.is_creating(groups, params, k, world):
                self._blanks.create()
                self._has_blanks = True
                return None
        if self._has_blanks:  # that state has held gradients which nobody holds, and the blocks have read it
            self._has_blanks, self._blocks = False, None
            checkpoint.drop_blanks(self.state, pending)
        layout, blocks = self._layout, self._blocks
        if layout is None or not layout.serves(members):
            layout = self._layout_of(members)
        if blocks is None or not blocks.serves(layout):
            blocks = self._blocks = Blocks(groups, layout, self.state, self._catalogue.learner_of, self._world)
        # One block on the host: the learner takes one Python float for all tensors.
        pooled = self._host and layout.like.is_cpu and world.alone and blocks.pooled()
        gradients = None
        paper = any(group["estimator"] == "paper" for group in groups)  # its pairs are of two steps, also on many ranks
        if pending:
            gradients = pair.take(layout, pooled=pooled)
        elif paper and k > 1:
            raise ValueError(
                f'estimator="paper" takes one backward() per step(), got {k}: the first step() holds its gradient and '
                'the second updates. estimator="symmetric" uses all gradients of a step'
            )
        elif k * world.ranks < 2 or paper:
            pair.hold(params)
            self._warnings.held(groups)
        else:
            gradients = contributions.take(layout, world, pooled=pooled)
            if contributions.distorted or world.warnings or not self._warnings.several:
                self._warnings.taken(contributions.distorted, world.warnings)
        if passes.left_over:
            self._warnings.not_zeroed()
        passes.reset(used=True)
        if unseen:
            self._assemble()  # from the next backward on the hooks see them
        return None if gradients is None else (gradients, blocks)

    def _update(self, gradients: Gradients, blocks: Blocks) -> None:
        """One update, from its gradients to the new parameters: the whole algorithm."""
        layout, first = gradients.layout, self.param_groups[0]
        totals = first["totals"].to(layout.like) if "totals" in first else diagnostics.zeros(layout.like)
        gate = Gate(gradients.squared, gradients.signal, self._host)
        if gate.skip:
            return self._skipped(totals)
        if not gate.host:
            gradients = gradients._replace(g=gate.finite(gradients.g))
        assert self._passes is not None
        direction = self._directions.make(gradients, gate.number(totals[0]), gate, self._passes.world)
        learned = blocks.learn(direction, gradients.squared, totals, gate)
        move(layout, direction.d, direction.scales, learned.etas, gate)
        if not self._metrics.euclidean:  # after the update: D of a step is made of the gradients before it
            self._metrics.observe(layout, gradients.g, gate)
        return self._record(layout, learned, totals, gradients.k, gate)

    def _skipped(self, totals: Tensor) -> None:
        self.param_groups[0]["totals"] = diagnostics.skipped(totals)
        share(self.param_groups)
        self._metrics.forget()  # D that was made of the present gradient
        self._warnings.skipped(self.param_groups, int(totals[0]))

    def _record(self, layout: Layout, learned: Learned, totals: Tensor, k: int, gate: Gate) -> None:
        first = self.param_groups[0]
        first["totals"] = learned.totals if gate.host else gate.choose(learned.totals, diagnostics.skipped(totals))
        first["gradients"] = k
        for group, value in zip(layout.groups, learned.step_sizes, strict=True):
            group["step_size"] = gate.kept(value, group["step_size"], layout.like)
        if len(self.param_groups) > 1:
            share(self.param_groups)
        # u = n means that the gradients were equal: squared and signal are the sums of n and u.
        if gate.host and gate.squared > 0 and abs(gate.squared - gate.signal) <= layout.rounding * gate.squared:
            self._warnings.identical()
        if gate.host and not any(learned.step_sizes):
            self._warnings.stood_still(layout.groups, int(totals[0]))
        if any(group["averaging"] is not None for group in self.param_groups):
            average_groups(self.param_groups, self.state, layout.params, first["totals"][0], gate)

    # The parts --------------------------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        super()._assemble()
        self._blocks = None
        catalogue = self._catalogue
        self._pair = HeldPair(self.param_groups, self.state, self._metrics, self._world)
        self._directions = Directions(
            self.param_groups,
            catalogue.uses_hindsight,
            lambda group: isinstance(catalogue.metric_of(group), Euclidean),
        )

    def _measured(self) -> Measured:
        for group in self.param_groups:
            if group["estimator"] == "paper" or group["granularity"] == "coordinate":
                return "mean"  # held gradients, and arrays of coordinates, are those of the sharded .grad
        return super()._measured()

    @property
    def _metric_of(self) -> Callable[[dict[str, Any]], Metric]:
        return self._catalogue.metric_of

    @property
    def _blanks(self) -> Blanks:
        return Blanks(
            self.param_groups,
            self.state,
            self._metrics,
            self._catalogue.learner_of,
            self._directions.keeps_direction,
        )

    # Saving and loading -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state for :meth:`load_state_dict`. For torch.distributed.checkpoint call its ``get_state_dict``."""
        state_dict = super().state_dict()
        return self._blanks.complete(state_dict) if checkpoint.is_asked() else state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned, exactly: sums, counts and the held gradient keep their type.

        Raises:
            ValueError: if it was saved by another configuration (estimator, granularity, learner, metric or alpha).
        """
        check = partial(checkpoint.refuse_another_configuration, self.param_groups)
        checkpoint.load(self, super().load_state_dict, state_dict, check, self._loaded)

    def _loaded(self) -> None:
        self._assemble()
        if self.pending and not any("held_gradient" in state for state in self.state.values()):
            self._pair.pending = False
            self._warn(
                "state_dict was saved in the middle of a pair (pending is True) but has no held_gradient, so the pair "
                "starts anew. torch.distributed.checkpoint drops what the optimizer does not have: let it load into a "
                "new optimizer."
            )
        self._has_blanks = False
        checkpoint.drop_blanks(self.state, self.pending)
        share(self.param_groups)
        assert self._passes is not None
        self._passes.reset()  # passes before loading are not of the run that is loaded

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_catalogue", "_warned")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if "bias_correction" not in group:  # saved by version 0.1, whose lr was the rate of the averaged direction
                rates = ("lr", "initial_lr", "step_size")
                group.update({name: group[name] * (1 - group["momentum"]) for name in rates if name in group})
            for name in OPTIONS:  # options that the version that saved it did not have
                group.setdefault(name, self.defaults[name])
            group.setdefault("step_size", first_step_size(group))
        if "defaults" in state:  # unpickled or copied: new parameters, which have no hooks yet
            warned = self._warned
            self._prepare()
            self._warned, self._has_blanks = warned, False
            self._assemble()
