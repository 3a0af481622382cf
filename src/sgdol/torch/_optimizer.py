"""The PyTorch optimizer."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sgdol.learners import FTRL, Learner
from sgdol.surrogate import ESTIMATORS, MOMENTUM_STATISTICS, Estimator, MomentumStatistics
from sgdol.torch import _diagnostics as diagnostics
from sgdol.torch._averaging import add_to_average, swapped_in
from sgdol.torch._blocks import GRANULARITIES, Blocks, Granularity, share
from sgdol.torch._closures import draws_afresh
from sgdol.torch._passes import BackwardPasses, Contributions, Keep, real_view, scalar_dtype, wide_dtype
from sgdol.torch._ranks import Ranks
from sgdol.torch._shards import Shards, fitted, is_sharded, like_parameter, local, local_gradient
from sgdol.torch._statistics import Draw, from_contributions, from_pair, from_shards, with_momentum
from sgdol.torch._update import update

__all__ = ["SGDOL"]

OPTIONS = (
    "lr",
    "alpha",
    "estimator",
    "granularity",
    "momentum",
    "weight_decay",
    "learner",
    "maximize",
    "foreach",
    "kappa",
    "statistics",
    "averaging",
)
"""The keyword arguments as they stand in every parameter group."""

SHARED = ("alpha", "estimator", "granularity", "learner", "kappa", "statistics", "averaging")
"""Options that all parameter groups have in common."""

CHECKPOINT = "torch.distributed.checkpoint"
"""Where get_state_dict and set_state_dict are, and save and load, which an optimizer can be given as it is."""


class SGDOL(Optimizer):
    r"""Stochastic gradient descent that learns its step size online (Zhuang, Cutkosky and Orabona, ICML 2019).

    Each update has k >= 2 independent stochastic gradients at the same point. From them come the direction d_t and the
    surrogate loss :math:`\ell_t(\eta) = \frac{M \eta^2}{2} n_t - \eta u_t` (equation 3), whose expectation bounds the
    decrease of the objective (Theorem 1). FTRL on these losses gives

    .. math:: s_t = \mathrm{clip}\!\left(\frac{\alpha + \sum_{j<t} u_j}{\alpha + \sum_{j<t} n_j}, 0, 2\right),
        \qquad x_{t+1} = x_t - \mathrm{lr} \cdot s_t \, d_t, \qquad \mathrm{lr} = 1/M,

    so the step size stays at lr while the gradients agree with each other and falls as they get noisy.

    The independent gradients come from your training loop, in whichever way it already works:

    * several ``backward()`` calls before ``step()`` (gradient accumulation): each is one gradient;
    * DistributedDataParallel and fully_shard (FSDP2): each rank's gradient before it is averaged is one;
    * one ``backward()`` per ``step()``: the first call holds its gradient, the second updates (see :attr:`pending`);
    * ``step(closure)``: the closure draws a fresh batch at each call and is called as often as needed.

    They must be independent draws of the *same* objective. The same batch twice, or two different loss terms in two
    ``backward()`` calls, are not.

    Args:
        params: parameters or parameter groups. Groups may differ in lr, momentum, weight_decay and maximize.
        lr: 1/M, the base rate: the first step size, and half of the largest. A float or a tensor; schedulers may move
            it.
        smoothness: M, instead of lr.
        alpha: how strongly the learner holds on to lr at first, in units of squared gradient norm; a number per block,
            or None for the squared norm of the first direction (each block its even share by size), which makes the
            trajectory equivariant to rescaling the objective and the parameters. The paper's experiments use 10.
        estimator: ``"symmetric"`` moves along the mean of all k gradients; ``"paper"`` is Algorithm 1: it moves along
            the first gradient and uses the second only to measure.
        granularity: how many step sizes are learned: ``"global"`` (one), ``"group"`` (one per parameter group),
            ``"tensor"`` (one per parameter tensor) or ``"coordinate"`` (one per scalar, section 6 of the paper).
        momentum: beta in [0, 1) of :math:`d_t = m_t/(1-\beta^t)`, :math:`m_t = \beta m_{t-1} + (1-\beta) \bar g_t`.
        weight_decay: decoupled: :math:`x \leftarrow x - \eta_t (d_t + \mathrm{weight\_decay} \cdot x)`.
        learner: an online learner from :mod:`sgdol.learners`; None for FTRL, the paper's.
        maximize: ascend instead.
        foreach: update many tensors at once (more memory, fewer kernel launches) or one by one; None for what suits the
            device.
        kappa: how many times the first squared direction alpha is, if alpha is None: the larger, the longer the step
            size stays near lr. 10 suits networks, whose early gradients are mostly noise; 1 noisy convex problems.
        statistics: with momentum, whose (u, n) the learner sees: those of d_t (``"direction"``), or those of the
            gradients alone (``"gradient"``), with which eta falls sooner under heavy noise: momentum hides noise from n
            that stays correlated over the steps.
        averaging: None, or the power a >= 0 of a polynomial average of the iterates (see :meth:`averaged`); 8 is usual.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.nn.Parameter(torch.tensor([3.0, -4.0]))
    >>> opt = SGDOL([x], lr=0.5)
    >>> for _ in range(100):
    ...     for _ in range(2):  # two independent noisy gradients of ||x||^2 / 2
    ...         ((x * x).sum() / 2 + (torch.randn(2) * x).sum()).div(2).backward()
    ...     opt.step(); opt.zero_grad()
    >>> bool(opt.param_groups[0]["step_size"] < 0.4), bool(x.norm() < 1)
    (True, True)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        *,
        smoothness: float | None = None,
        alpha: float | None = None,
        estimator: Estimator = "symmetric",
        granularity: Granularity = "global",
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        learner: Learner | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        kappa: float = 1.0,
        statistics: MomentumStatistics = "direction",
        averaging: float | None = None,
    ) -> None:
        if lr is not None and smoothness is not None:
            raise ValueError(f"give lr or smoothness, not both: got lr={lr!r} and smoothness={smoothness!r} (lr = 1/M)")
        if smoothness is not None:
            _check("smoothness", smoothness, lambda v: v > 0, "positive and finite")
            lr = 1.0 / smoothness
        self.learner: Learner = FTRL() if learner is None else learner
        if isinstance(self.learner, type) or not isinstance(self.learner, Learner):
            raise TypeError(
                f"learner must be an object with initial, predict and observe (see sgdol.learners), got {learner!r}"
            )
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "estimator": estimator,
            "granularity": granularity,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "learner": _name(self.learner),
            "maximize": maximize,
            "foreach": foreach,
            "kappa": kappa,
            "statistics": statistics,
            "averaging": averaging,
        }
        _check_options(defaults)
        params = _materialise(params)
        if lr is None and params and not _every_group_has_a_rate(params):
            raise ValueError(
                "lr or smoothness is needed: got neither. lr = 1/M is the largest step size to start from; "
                "sgdol.SGDOLFree needs neither (experimental)"
            )
        self._warned: tuple[str, ...] = ()
        self._passes: BackwardPasses | None = None
        self._ranks: Ranks | None = None
        self._shards: Shards | None = None
        self._blank = False
        self._spare: dict[Tensor, Tensor] = {}
        self._swapped = False
        super().__init__(params, defaults)

    # The public face --------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # counts passes and looks at versions: nothing to trace, so nothing to recompile
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, or hold the gradient if it is the only one so far.

        Args:
            closure: draws a fresh batch, computes the loss, calls ``backward()`` and returns the loss. It is called
                until there are two gradients: twice, or once if it runs several backward passes itself, if
                DistributedDataParallel averages over ranks, or if a gradient is held already. The closure of a
                Lightning Trainer belongs to one batch and is called once.

        Returns:
            What the first call of the closure returned, or None.
        """
        if self._swapped:
            raise RuntimeError("step() inside averaged() would train the averaged weights: leave it first")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        draw = self._draw()
        if draw is None and closure is not None and self.pending and draws_afresh(closure):
            draw = self._draw_again(closure)
        if draw is not None:
            self._update(*draw)
        return result

    @property
    def pending(self) -> bool:
        """Whether a gradient is held: the next ``step()`` completes the pair and updates."""
        return bool(self.param_groups) and self.param_groups[0].get("pending", False)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        r"""Put the averaged weights into the parameters, for evaluation or saving, and take them out again.

        With ``averaging=a`` every update is followed by

        .. math:: \bar x_t = \bar x_{t-1} + \frac{a + 1}{t + a} (x_{t+1} - \bar x_{t-1}),

        a mean in which iterate t counts about :math:`t^a`. Buffers stay what they are: a BatchNorm keeps the statistics
        of the last weights unless you call :func:`torch.optim.swa_utils.update_bn` inside. What is done to the
        parameters inside is undone. To resume training later, save the model outside, with the optimizer, whose state
        holds the average.

        >>> x = torch.nn.Parameter(torch.tensor([4.0]))
        >>> opt = SGDOL([x], lr=0.5, averaging=0)
        >>> for pair in ((3.0, 5.0), (1.0, 3.0)):
        ...     for g in pair:
        ...         (g * x / 2).sum().backward()
        ...     opt.step(); opt.zero_grad()
        >>> with opt.averaged():
        ...     x.item()  # the mean of 2 and 1.03125
        1.515625
        >>> x.item()
        1.03125
        """
        if self.defaults["averaging"] is None:
            raise RuntimeError("averaged() needs averages, got averaging=None: construct SGDOL with averaging=8")
        if self._swapped:
            raise RuntimeError("the averaged weights are in the parameters already: averaged() does not nest")
        known = [p for group in self.param_groups for p in group["params"] if "average" in self.state.get(p, ())]
        try:
            with torch.no_grad():
                pieces = [local(p) for p in known]
                averages = [local(self.state[p]["average"]) for p in known]
            with swapped_in(pieces, averages):
                self._swapped = True
                self._reshard()
                yield
        finally:
            self._swapped = False
            self._reshard()

    def _reshard(self) -> None:
        if self._shards is not None:
            self._shards.reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, and forget the backward passes that made them."""
        super().zero_grad(set_to_none)
        if self._passes is not None:
            self._passes.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; it may bring its own lr (or smoothness), momentum, weight_decay and maximize."""
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            if not isinstance(param_group["params"], Tensor | set):
                param_group["params"] = list(param_group["params"])
            smoothness = param_group.pop("smoothness", None)
            if smoothness is not None:
                if "lr" in param_group:
                    raise ValueError("give a parameter group lr or smoothness, not both")
                _check("smoothness", smoothness, lambda v: v > 0, "positive and finite")
                param_group["lr"] = 1.0 / smoothness
            _check_options({**self.defaults, **param_group})
            if param_group.get("lr", self.defaults["lr"]) is None:
                raise ValueError("lr or smoothness is needed for this parameter group: the optimizer has no default")
            for name in SHARED:
                if param_group.get(name, self.defaults[name]) != self.defaults[name]:
                    raise ValueError(
                        f"{name} is the same for all parameter groups: this optimizer has {self.defaults[name]!r}, "
                        f"the group has {param_group[name]!r}"
                    )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("step_size", _first_step_size(group))
        share(self.param_groups, self.defaults["granularity"])
        self._ranks, self._shards = None, None
        self._watched()

    def diagnostics(self) -> dict[str, Any]:
        r"""What the optimizer has learned, as plain numbers. Reads them from the device, so not for every step.

        * ``step_size``: eta of the last update, one per parameter group (for finer granularities the length of the move
          over that of the direction, so that coordinates that never move do not count).
        * ``signal_to_noise``: :math:`\sum u / \sum (n - u)` over the recent updates: signal and noise of the direction.
        * ``noise_scale``: the gradient noise scale in units of one of the k gradients: that many averaged would have as
          much signal as noise. Times the microbatch size it is the "simple" one of McCandlish et al. (2018).
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

    # One update ---------------------------------------------------------------------------------------------------

    def _draw(self) -> tuple[Blocks, Draw] | None:
        """The gradients of this step, if they are enough for an update; else hold what there is."""
        pending = self.pending
        params = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None or (pending and "held_gradient" in self.state.get(p, ()))
        ]
        if not any(p.grad is not None for p in params):
            return None
        _refuse_sparse(params)
        passes, ranks, shards = self._watched(), self._data_parallel(), self._shards
        found = passes.contributions(params, params[0].device, scalar_dtype(params[0].device))
        if found.k == 0 and all(group["lr"] == 0 for group in self.param_groups):
            n = found.n if shards is None else shards.sums(params, found.n.unsqueeze(0))[0]
            if n.sum().tolist() == 0:
                # torch.distributed.checkpoint steps with zeros to make optimizers create their state
                self._create_state()
                return None
        if self._blank:
            self._drop_blanks()
        estimator, granularity = self.defaults["estimator"], self.defaults["granularity"]
        blocks = Blocks(granularity, self.param_groups, self.state, params, shards)
        if pending:
            self._refuse_reshaped(params)
            held = [self._take_held(p) for p in params]
            second = [local_gradient(p) for p in params]
            drawn = from_pair(blocks, held, second, estimator, shards, self._momenta_to_measure(blocks))
            self._set_pending(False)
        elif shards is not None and estimator == "symmetric" and found.k * self._averaged_ranks(shards) > 1:
            drawn = from_shards(blocks, found, shards, self._averaged_ranks(shards), self._momenta_to_measure(blocks))
        elif estimator == "symmetric" and found.k * ranks.count > 1:
            self._warn_if_unwrapped(ranks)
            self._warn_of_hook(ranks)
            drawn = from_contributions(blocks, found, ranks)
        elif estimator == "paper" and found.k > 1:
            if shards is not None:
                (n, before), _ = shards.sums(params, torch.stack([found.n, found.before]))
                found = found.rescaled(n, before, found.q)
            pair = _first_two(found, params, ranks)
            drawn = from_pair(blocks, *pair, estimator, shards, self._momenta_to_measure(blocks))
        else:
            for p in params:
                self._hold(p)
            self._set_pending(True)
            drawn = None
        passes.reset()
        return None if drawn is None else (blocks, drawn)

    def _update(self, blocks: Blocks, draw: Draw) -> None:
        n, u = draw.n.sum(), draw.u.sum()
        ok: Tensor | None = torch.isfinite(n + u)
        first = self.param_groups[0]
        totals = first["totals"].to(draw.n) if "totals" in first else diagnostics.zeros(draw.n)
        if _readable(n):
            # A number on the CPU is read without a wait; an accelerator decides on the device, with torch.where.
            length, signal = torch.stack([n, u]).tolist()
            if not math.isfinite(length + signal):
                first["totals"] = diagnostics.skipped(totals)
                share(self.param_groups, blocks.granularity)
                return
            self._warn_if_identical(length, signal, blocks.params[0].dtype)
            ok = None
        if self._has_momentum(blocks):
            momenta = [self._momentum(p) for p in blocks.params]
            weights = self._momentum_weights(blocks, draw.n, ok)
            draw = with_momentum(blocks, draw, momenta, weights, self.defaults["statistics"], ok)
        alpha, kappa = self.defaults["alpha"], self.defaults["kappa"]
        outcome = update(blocks, self.param_groups, draw, self.learner, alpha, kappa, ok)
        first["totals"] = diagnostics.added(totals, outcome, ok)
        if self.defaults["averaging"] is not None:
            self._average(blocks.params, diagnostics.updates(first["totals"]), ok)
        first["gradients"] = draw.k
        for group, eta in zip(self.param_groups, outcome.step_sizes, strict=True):
            if eta is not None:
                group["step_size"] = eta if ok is None else torch.where(ok, eta, group["step_size"].to(eta))
        share(self.param_groups, blocks.granularity)

    def _average(self, moved: list[Tensor], t: Tensor, ok: Tensor | None) -> None:
        """Add the iterate after update t to the average, for every parameter that has ever moved."""
        for p in moved:
            if "average" not in self.state[p]:
                self.state[p]["average"] = p.detach().to(dtype=torch.promote_types(p.dtype, torch.float32), copy=True)
        params = [p for group in self.param_groups for p in group["params"] if "average" in self.state.get(p, ())]
        averages = [local(self.state[p]["average"]) for p in params]
        add_to_average(averages, [local(p) for p in params], t, self.defaults["averaging"], ok)

    def _draw_again(self, closure: Callable[[], Any]) -> tuple[Blocks, Draw] | None:
        """The second gradient of a pair, by itself, whether the closure zeroes gradients or not."""
        params = [p for group in self.param_groups for p in group["params"]]
        first = [p.grad for p in params]
        for p in params:
            p.grad = None
        try:
            with torch.enable_grad():
                closure()
            if all(p.grad is None for p in params):  # it computes nothing: what there was is what there is
                for p, grad in zip(params, first, strict=True):
                    p.grad = grad
            return self._draw()
        finally:
            for p, grad in zip(params, first, strict=True):
                p.grad = grad if p.grad is None else p.grad

    def _hold(self, p: Tensor) -> None:
        buffer = self._spare.pop(p, None)
        if buffer is None or buffer.shape != p.shape or buffer.dtype != p.dtype or buffer.device != p.device:
            buffer = torch.empty_like(p, memory_format=torch.preserve_format)
        local(buffer).copy_(local_gradient(p))
        self.state[p]["held_gradient"] = buffer

    def _take_held(self, p: Tensor) -> Tensor:
        """The held gradient, as memory that may be written to; it is kept for the next one."""
        held = self.state[p].pop("held_gradient", None)
        if not self.state[p]:
            del self.state[p]
        self._spare[p] = torch.zeros_like(p) if held is None else held
        return local(self._spare[p])

    def _refuse_reshaped(self, params: list[Tensor]) -> None:
        for i, p in enumerate(params):
            held = self.state.get(p, {}).get("held_gradient")
            if held is not None and held.shape != p.shape:
                raise ValueError(
                    f"the two gradients of a pair must have the same shape: parameter {i} is {tuple(p.shape)} now, the "
                    f"gradient that is held {tuple(held.shape)}"
                )

    def _set_pending(self, pending: bool) -> None:
        for group in self.param_groups:
            group["pending"] = pending

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum" not in state:
            like = real_view(local(p))
            state["momentum"] = like_parameter(torch.zeros_like(like, dtype=wide_dtype(like.dtype)), p)
        return local(state["momentum"])

    def _has_momentum(self, blocks: Blocks) -> bool:
        return any(blocks.momenta) or any("momentum_weight" in group for group in self.param_groups)

    def _momenta_to_measure(self, blocks: Blocks) -> list[Tensor] | None:
        """The momenta, where their products are to be summed over the ranks with everything else."""
        if blocks.shards is None or self.defaults["statistics"] == "gradient" or not self._has_momentum(blocks):
            return None
        return [self._momentum(p) for p in blocks.params]

    def _momentum_weights(self, blocks: Blocks, like: Tensor, ok: Tensor | None) -> list[Tensor]:
        """How much weight the gradients so far have in each group's momentum; schedulers may move beta."""
        weights = []
        for group, beta, size in zip(self.param_groups, blocks.momenta, blocks.per_group, strict=True):
            old = torch.as_tensor(group.get("momentum_weight", 0.0)).to(like)
            new = beta * old + (1 - beta)
            if size:
                group["momentum_weight"] = new if ok is None else torch.where(ok, new, old)
            weights.append(new)
        return weights

    def _watched(self) -> BackwardPasses:
        params = [p for group in self.param_groups for p in group["params"]]
        if self._shards is None and any(map(is_sharded, params)):
            self._shards, self._passes = Shards(params), None
        shards = self._shards
        if self._passes is not None:
            self._passes.watch(params)
        elif shards is None:
            self._passes = BackwardPasses(params, self._keep)
        else:
            self._passes = passes = BackwardPasses(
                params, self._keep, shards.managed, lambda some, rows: shards.sums(some, rows)[0]
            )
            shards.follow(passes.follow)
        return self._passes

    @property
    def _keep(self) -> Keep:
        if self.defaults["estimator"] == "paper":
            return "gradients"
        return "squares" if self.defaults["granularity"] == "coordinate" else "norms"

    def _averaged_ranks(self, shards: Shards) -> int:
        """How many independent gradients a backward has that fully_shard averages.

        Squares of each coordinate are those of the averaged gradient: what every rank had would have to be sent too.
        """
        return shards.count if self._keep == "norms" else 1

    def _data_parallel(self) -> Ranks:
        if self._ranks is None:
            self._ranks = Ranks((p for group in self.param_groups for p in group["params"]), self)
            if self._shards is not None and self._ranks.count > 1:
                raise NotImplementedError(
                    "SGDOL does not support DTensor parameters inside DistributedDataParallel: use fully_shard on a "
                    "two-dimensional mesh, whose first dimension replicates"
                )
        return self._ranks

    def _warn_if_identical(self, length: float, signal: float, dtype: torch.dtype) -> None:
        """Identical gradients have u = n: the same batch was used twice, or there is no noise at all."""
        if length > 0 and abs(length - signal) <= 8 * torch.finfo(wide_dtype(dtype)).eps * length:
            self._warn(
                "SGDOL was given the same gradient twice, so it cannot see any noise and is plain SGD with step size "
                "lr. Draw a fresh batch for every backward(), split a batch into microbatches, and give each rank its "
                "own data. If the objective has no noise, all is well."
            )

    def _warn_if_unwrapped(self, ranks: Ranks) -> None:
        if ranks.unwrapped:
            self._warn(
                "SGDOL runs on several ranks without DistributedDataParallel around its parameters, so the noise that "
                "it sees is that of its own rank's microbatches. If gradients are averaged by hand, the ranks will "
                "drift apart: use DistributedDataParallel, or one backward() per step(). If every rank trains a model "
                "of its own, all is well."
            )

    def _warn_of_hook(self, ranks: Ranks) -> None:
        if ranks.unknown_hook is not None:
            self._warn(
                f"DistributedDataParallel averages gradients with the communication hook {ranks.unknown_hook}. SGDOL "
                "measures noise on what the ranks had before, which is right if the hook returns their mean, as "
                "fp16_compress_hook and bf16_compress_hook do up to rounding. PowerSGD and others that leave part of "
                "the gradient out, or add what they left out before, bias the step size."
            )

    def _warn(self, message: str) -> None:
        """Say this once, pointing at the training loop."""
        if message not in self._warned:
            self._warned = (*self._warned, message)
            warnings.warn(message, UserWarning, stacklevel=_caller())

    # Saving and loading -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state, as :meth:`load_state_dict` takes it.

        torch.distributed.checkpoint loads into a state dict that is there already, key by key. When it asks, the keys
        are all that there can be, and a gradient that is not held is zero.
        """
        state_dict = super().state_dict()
        if not _asked_by(CHECKPOINT):
            return state_dict
        params = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        state = state_dict["state"]
        for group, blank in zip(state_dict["param_groups"], self._blank_groups(), strict=True):
            group.update({key: value for key, value in blank.items() if key not in group})
        for index, p in zip(indices, params, strict=True):
            if p.requires_grad or index in state:
                state[index] = {**self._blank_state(p), **state.get(index, {})}
        return state_dict

    def _create_state(self) -> None:
        """Everything that there can be, until there is something."""
        for group, blank in zip(self.param_groups, self._blank_groups(), strict=True):
            group.update({key: value for key, value in blank.items() if key not in group})
        for p in (p for group in self.param_groups for p in group["params"] if p.requires_grad):
            for key, value in self._blank_state(p).items():
                self.state[p].setdefault(key, value)
        self._blank = True

    def _drop_blanks(self) -> None:
        """Forget held gradients that nobody holds."""
        self._blank = False
        if not self.pending:
            for p in list(self.state):
                self.state[p].pop("held_gradient", None)
                if not self.state[p]:
                    del self.state[p]

    def _blank_groups(self) -> list[dict[str, Any]]:
        """What each parameter group can have, as it is before any update."""
        like = _first_step_size(self.param_groups[0]).new_zeros(())
        numbers = {"totals": diagnostics.zeros(like)}
        if self.defaults["alpha"] is None:
            numbers["alpha_learned"] = like
        if self._uses_momentum():
            numbers["momentum_weight"] = like
        if self.defaults["granularity"] in ("global", "group"):
            numbers.update(self._blank_learner(like))
        # Each its own memory: a checkpoint is read into it.
        return [
            {"gradients": 0, "pending": False, **{key: value.clone() for key, value in numbers.items()}}
            for _ in self.param_groups
        ]

    def _blank_state(self, p: Tensor) -> dict[str, Any]:
        """What a parameter can have, as it is before any update; copies only of what it has not."""
        like, known, granularity = real_view(local(p.detach())), self.state.get(p, {}), self.defaults["granularity"]
        blank: dict[str, Any] = {}
        if "held_gradient" not in known:
            blank["held_gradient"] = torch.zeros_like(p)
        wide = torch.zeros_like(like, dtype=wide_dtype(like.dtype), memory_format=torch.contiguous_format)
        if self._uses_momentum() and "momentum" not in known:
            blank["momentum"] = like_parameter(torch.zeros_like(wide), p)
        if self.defaults["averaging"] is not None and "average" not in known:
            blank["average"] = p.detach().to(dtype=torch.promote_types(p.dtype, torch.float32), copy=True)
        if granularity == "tensor":
            blank.update(self._blank_learner(torch.zeros((), device=p.device, dtype=scalar_dtype(p.device))))
        elif granularity == "coordinate" and not any(key.startswith("learner.") for key in known):
            number = self._blank_learner(wide.new_zeros(()))
            blank.update({key: like_parameter(value.expand_as(wide).clone(), p) for key, value in number.items()})
        return blank

    def _blank_learner(self, like: Tensor) -> dict[str, Tensor]:
        fresh = self.learner.initial(like)
        return {f"learner.{name}": value.clone() for name, value in zip(fresh._fields, fresh, strict=True)}

    def _uses_momentum(self) -> bool:
        return any(group["momentum"] or "momentum_weight" in group for group in self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned, exactly: sums, counts and the held gradient keep their type.

        Raises:
            ValueError: if it was saved by another configuration (estimator, granularity, learner or alpha).
        """
        loaded: dict[str, Any] = {}

        def check(_: Optimizer, final: dict[str, Any]) -> None:
            self._refuse_another_configuration(final)
            loaded.update(final)

        # Last and first among the hooks that users may have registered: they see and say what they expect to.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._restore(loaded), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _refuse_another_configuration(self, state_dict: dict[str, Any]) -> None:
        for index, group in enumerate(state_dict["param_groups"]):
            if "granularity" not in group:
                raise ValueError(f"state_dict was not saved by SGDOL: its group {index} has only {sorted(group)}")
            for name in SHARED:
                if name in group and group[name] != self.defaults[name]:
                    raise ValueError(
                        f"state_dict was saved with {name}={group[name]!r} in group {index}, this optimizer has "
                        f"{name}={self.defaults[name]!r}: construct it with the same {name}"
                    )

    def _restore(self, state_dict: dict[str, Any]) -> None:
        """Undo torch's cast of floating-point state to the parameter's type, which would round the sums."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, params, strict=True):
            shapes = (p.shape, (*p.shape, 2)) if p.is_complex() else (p.shape,)
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    if value.dim() and value.shape not in shapes:
                        raise ValueError(
                            f"state_dict does not fit: {key} of parameter {index} has shape {tuple(value.shape)}, the "
                            f"parameter {tuple(p.shape)}"
                        )
                    self.state[p][key] = fitted(value, p)
        if self.pending and not any("held_gradient" in state for state in self.state.values()):
            self._set_pending(False)
            self._warn(
                "state_dict was saved in the middle of a pair (pending is True) but has no held_gradient, so the pair "
                "starts anew. torch.distributed.checkpoint drops what the optimizer does not have: let it load into a "
                "new optimizer."
            )
        self._drop_blanks()
        share(self.param_groups, self.defaults["granularity"])
        self._watched().reset()  # parameters that have been moved since have new accumulators

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "learner": self.learner, "_warned": self._warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name in OPTIONS:  # a state saved by an older version may lack some
                group.setdefault(name, self.defaults[name])
            group.setdefault("step_size", _first_step_size(group))
        if "defaults" in state:  # unpickled or copied: new parameters, which nobody watches yet
            self._passes, self._ranks, self._shards = None, None, None
            self._spare, self._swapped, self._blank = {}, False, False
            self._watched()


def _first_two(found: Contributions, params: list[Tensor], ranks: Ranks) -> tuple[list[Tensor], list[Tensor]]:
    """The first two of the accumulated gradients, in the scale of their sum."""
    if ranks.count > 1:
        raise ValueError(
            'estimator="paper" takes one backward per step() on each rank of DistributedDataParallel, got '
            f'{found.k}; estimator="symmetric" uses them all'
        )
    first, second = (
        [
            found.k * gs[i] if i in gs else torch.zeros_like(local(p))
            for gs, p in zip(found.gradients, params, strict=True)
        ]
        for i in (0, 1)
    )
    return first, second


def _first_step_size(group: dict[str, Any]) -> Tensor:
    """The step size before any update: lr."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    return torch.as_tensor(group["lr"], device=device, dtype=scalar_dtype(device)).detach().clone().reshape(())


def _name(learner: Learner) -> str:
    """What tells one learner from another in a saved state: not where it happens to be in memory."""
    kind = type(learner)
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(learner)


def _refuse_sparse(params: list[Tensor]) -> None:
    for index, p in enumerate(params):
        if p.grad is not None and p.grad.layout != torch.strided:
            raise RuntimeError(
                f"SGDOL does not support sparse gradients: parameter {index} of shape {tuple(p.shape)} has a gradient "
                f"of layout {p.grad.layout}; use a dense one (for instance torch.nn.Embedding(..., sparse=False))"
            )


def _asked_by(package: str) -> bool:
    """Whether a function of this package is what called, directly or through others."""
    if package not in sys.modules:
        return False
    frame = sys._getframe(1).f_back
    while frame is not None and not f"{frame.f_globals.get('__name__')}.".startswith(f"{package}."):
        frame = frame.f_back
    return frame is not None


def _caller() -> int:
    """The stack level, seen from whoever asks, of the first frame that is neither torch's nor ours."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "sgdol"):
        level, frame = level + 1, frame.f_back
    return level


def _readable(scalar: Tensor) -> bool:
    """Whether the host can look at this number without waiting for a device."""
    return scalar.device.type == "cpu" and type(scalar) is Tensor


def _materialise(params: Iterable[Any]) -> list[Any]:
    kinds = {
        torch.nn.Module: "a module: give its .parameters()",
        dict: "one dict: put it into a list",
        Tensor: "a single tensor: put it into a list",
    }
    for kind, sentence in kinds.items():
        if isinstance(params, kind):
            raise TypeError(
                f"params argument given to the optimizer should be an iterable of Tensors or dicts, got {sentence}"
            )
    return list(params)


def _every_group_has_a_rate(params: list[Any]) -> bool:
    return all(isinstance(g, dict) and ("lr" in g or "smoothness" in g) for g in params)


def _check(name: str, value: Any, allowed: Callable[[Any], Any], sentence: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real | Tensor):
        raise TypeError(f"{name} must be a number, {sentence}, got {value!r}")
    if not (bool(allowed(value)) and math.isfinite(value)):
        raise ValueError(f"{name} must be {sentence}, got {value!r}")


def _check_options(options: dict[str, Any]) -> None:
    """Every option by name, value and what is allowed; lr may still be missing."""
    lr = options["lr"]
    if lr is not None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element, got lr of shape {tuple(lr.shape)}")
        _check("lr", lr, lambda v: v > 0, "positive and finite")
    if options["alpha"] is not None:
        _check("alpha", options["alpha"], lambda v: v > 0, "None, or positive and finite")
    _check("kappa", options["kappa"], lambda v: v > 0, "positive and finite")
    if options["alpha"] is not None and options["kappa"] != 1:
        raise ValueError(
            f"give alpha or kappa, not both: got alpha={options['alpha']!r} and kappa={options['kappa']!r} "
            "(kappa is in units of the first squared direction)"
        )
    if options["averaging"] is not None:
        _check("averaging", options["averaging"], lambda v: v >= 0, "None, or finite and at least 0")
    allowed = {"estimator": ESTIMATORS, "granularity": GRANULARITIES, "statistics": MOMENTUM_STATISTICS}
    for name, values in allowed.items():
        if options[name] not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, got {options[name]!r}")
    _check("momentum", options["momentum"], lambda v: 0 <= v < 1, "at least 0 and less than 1")
    _check("weight_decay", options["weight_decay"], lambda v: v >= 0, "at least 0 and finite")
    if not isinstance(options["maximize"], bool):
        raise TypeError(f"maximize must be True or False, got {options['maximize']!r}")
    if options["foreach"] not in (None, True, False):
        raise TypeError(f"foreach must be None, True or False, got {options['foreach']!r}")
