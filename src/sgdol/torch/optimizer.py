"""The PyTorch optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sgdol.learners import FTRL, Learner
from sgdol.surrogate import ESTIMATORS, Estimator, loss, momentum_signal, symmetric_signal
from sgdol.torch.passes import BackwardPasses, Contributions, real_view, scalar_dtype, squared_norms, wide_dtype
from sgdol.torch.ranks import Ranks
from sgdol.torch.update import GRANULARITIES, Granularity, learn, move, resolve_alpha

__all__ = ["SGDOL"]

RECENT = 0.99
"""The signal-to-noise ratio and the noise scale are averages over about the last 1 / (1 - RECENT) updates."""

SHARED = ("alpha", "estimator", "granularity", "learner", "momentum")
"""Options that all parameter groups have in common."""

TOTALS = ("updates", "skipped", "surrogate", "signal", "length", "recent_signal", "recent_length")
"""The rows of ``group["totals"]``: sums over the updates so far, weighted by lr, and two moving averages."""


class _Draw(NamedTuple):
    """The independent gradients of one update, reduced to what the surrogate needs."""

    params: list[Tensor]
    directions: list[Tensor]
    """Real views of the mean gradients, one per parameter."""
    n: Tensor
    """||d||^2 of each direction."""
    u: Tensor
    """The signal of each block."""
    u_each: list[Tensor]
    """The signal of each coordinate, for per-coordinate step sizes."""
    k: int
    """How many gradients there were."""


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
    * DistributedDataParallel: each rank's gradient before it is averaged is one;
    * one ``backward()`` per ``step()``: the first call holds its gradient, the second updates (see :attr:`pending`);
    * ``step(closure)``: the closure draws a fresh batch at each call and is called as often as needed.

    They must be independent draws of the *same* objective. The same batch twice, or two different loss terms in two
    ``backward()`` calls, are not.

    Args:
        params: parameters or parameter groups. Groups may differ in lr, weight_decay and maximize.
        lr: 1/M, the base rate: the first step size, and half of the largest. A float or a tensor; schedulers may move it.
        smoothness: M, instead of lr.
        alpha: how strongly the learner holds on to lr at first, in units of squared gradient norm; a number per block, or
            None for the squared norm of the first direction (each block its even share by size), which makes the
            trajectory equivariant to rescaling the objective and the parameters. The paper's experiments use 10.
        estimator: ``"symmetric"`` moves along the mean of all k gradients; ``"paper"`` is Algorithm 1: it moves along the
            first gradient and uses the second only to measure.
        granularity: how many step sizes are learned: ``"global"`` (one), ``"group"`` (one per parameter group),
            ``"tensor"`` (one per parameter tensor) or ``"coordinate"`` (one per scalar, section 6 of the paper).
        momentum: beta in [0, 1) of :math:`d_t = m_t/(1-\beta^t)`, :math:`m_t = \beta m_{t-1} + (1-\beta) \bar g_t`.
        weight_decay: decoupled: :math:`x \leftarrow x - \eta_t (d_t + \mathrm{weight\_decay} \cdot x)`.
        learner: an online learner from :mod:`sgdol.learners`; None for FTRL, the paper's.
        maximize: ascend instead.
        foreach: update many tensors at once (more memory, fewer kernel launches) or one by one; None for what suits the
            device.

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
    ) -> None:
        if lr is not None and smoothness is not None:
            raise ValueError(f"give lr or smoothness, not both: got lr={lr!r} and smoothness={smoothness!r} (lr = 1/M)")
        if smoothness is not None:
            _check("smoothness", smoothness, smoothness > 0, "positive and finite")
            lr = 1.0 / smoothness
        self.learner: Learner = FTRL() if learner is None else learner
        if not isinstance(self.learner, Learner):
            raise TypeError(
                f"learner must be an object with initial, predict and observe (see sgdol.learners), got {learner!r}"
            )
        if lr is None and not _every_group_has_a_rate(params := _materialise(params)):
            raise ValueError("lr or smoothness is needed: got neither. lr = 1/M is the largest step size to start from")
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "estimator": estimator,
            "granularity": granularity,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "learner": repr(self.learner),
            "maximize": maximize,
            "foreach": foreach,
        }
        _check_options(defaults)
        self._warned = False
        self._passes: BackwardPasses | None = None
        self._ranks: Ranks | None = None
        super().__init__(params, defaults)
        self._watch()

    # The public face --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, or hold the gradient if it is the only one so far.

        Args:
            closure: draws a fresh batch, computes the loss, calls ``backward()`` and returns the loss. It is called
                until there are two gradients: twice, or once if it runs several backward passes itself, if
                DistributedDataParallel averages over ranks, or if a gradient is held already.

        Returns:
            What the first call of the closure returned, or None.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        draw = self._draw()
        if draw is None and closure is not None and self.pending:
            self.zero_grad()
            with torch.enable_grad():
                closure()
            draw = self._draw()
        if draw is not None:
            self._update(draw)
        return result

    @property
    def pending(self) -> bool:
        """Whether a gradient is held: the next ``step()`` completes the pair and updates."""
        return any("held_gradient" in state for state in self.state.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, and forget the backward passes that made them."""
        super().zero_grad(set_to_none)
        if self._passes is not None:
            self._passes.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; it may bring its own lr (or smoothness), weight_decay and maximize."""
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            smoothness = param_group.pop("smoothness", None)
            if smoothness is not None:
                if "lr" in param_group:
                    raise ValueError("give a parameter group lr or smoothness, not both")
                _check("smoothness", smoothness, smoothness > 0, "positive and finite")
                param_group["lr"] = 1.0 / smoothness
            _check_options({**self.defaults, **param_group})
            for name in SHARED:
                if param_group.get(name, self.defaults[name]) != self.defaults[name]:
                    raise ValueError(
                        f"{name} is the same for all parameter groups: this optimizer has {self.defaults[name]!r}, "
                        f"the group has {param_group[name]!r}"
                    )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("step_size", group["lr"])
        if len(self.param_groups) > 1:
            self._share(self.param_groups[0], group)
        if self._passes is not None:
            self._watch()

    def diagnostics(self) -> dict[str, Any]:
        r"""What the optimizer has learned, as plain numbers. Reads them from the device, so not for every step.

        * ``step_size``: eta of the last update, one per parameter group (for finer granularities the mean weighted by the
          squared direction, so that coordinates that never move do not count).
        * ``signal_to_noise``: :math:`\sum u / \sum (n - u)` over the recent updates: signal and noise of the direction.
        * ``noise_scale``: the gradient noise scale in units of one of the k gradients: that many averaged would have as much
          signal as noise. Times the microbatch size it is the "simple noise scale" of McCandlish et al. (2018).
        * ``updates``, ``skipped`` (non-finite gradients), ``gradients`` (k of the last update), ``pending``.
        * ``cumulative_surrogate``: :math:`\sum_t \ell_t(\eta_t)`, an estimate of a bound on the change of the objective.
        * ``regret``: that minus what the best fixed multiple of lr would have had, for all blocks the same.
        """
        group = self.param_groups[0]
        totals = (
            dict(zip(TOTALS, group["totals"].tolist(), strict=True))
            if "totals" in group
            else dict.fromkeys(TOTALS, 0.0)
        )
        count = group.get("gradients", 0)
        signal, noise = totals["recent_signal"], totals["recent_length"] - totals["recent_signal"]
        best = min(max(totals["signal"] / totals["length"], 0.0), 2.0) if totals["length"] > 0 else 1.0
        best_loss = loss(best, totals["signal"], totals["length"], 1.0)
        return {
            "step_size": [float(g["step_size"]) for g in self.param_groups],
            "signal_to_noise": _quotient(signal, noise),
            "noise_scale": _quotient(count * noise, signal),
            "updates": int(totals["updates"]),
            "skipped": int(totals["skipped"]),
            "gradients": count,
            "pending": self.pending,
            "cumulative_surrogate": totals["surrogate"],
            "regret": totals["surrogate"] - best_loss,
        }

    # From gradients to statistics -------------------------------------------------------------------------------------

    def _draw(self) -> _Draw | None:
        """The gradients of this step, if they are enough for an update; else hold what there is."""
        params = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None or "held_gradient" in self.state.get(p, ())
        ]
        if not any(p.grad is not None for p in params):
            return None
        self._refuse_sparse(params)
        self._watch()
        assert self._passes is not None
        device, dtype = params[0].device, scalar_dtype(params[0].device)
        if self._ranks is None:
            self._ranks = Ranks(p for group in self.param_groups for p in group["params"])
        found = self._passes.contributions(params, device, dtype)
        self._passes.reset()
        if self.pending:
            return self._draw_pair(params, [self._take_held(p) for p in params], [_grad(p) for p in params])
        if self._estimator == "symmetric" and max(found.k, 1) * self._ranks.count > 1:
            return self._draw_accumulated(params, found)
        if self._estimator == "paper" and found.k > 1:
            if self._ranks.count > 1:
                raise ValueError(
                    'estimator="paper" takes one backward per step() on each rank of DistributedDataParallel, got '
                    f'{found.k}; estimator="symmetric" uses them all'
                )
            pairs = [[found.k * g for g in gs] for gs in found.gradients]
            first, second = ([_nth(pair, i, p) for pair, p in zip(pairs, params, strict=True)] for i in (0, 1))
            return self._draw_pair(params, first, second)
        for p in params:
            self.state[p]["held_gradient"] = _grad(p).clone(memory_format=torch.preserve_format)
        return None

    def _draw_accumulated(self, params: list[Tensor], found: Contributions) -> _Draw:
        """Contributions that ``.grad`` holds the sum of."""
        assert self._ranks is not None
        count = max(found.k, 1) * self._ranks.count
        directions = [real_view(_grad(p)) for p in params]
        if self._granularity != "coordinate":
            q = self._ranks.sum_of_squares(self._by_block(found.q, params))
            return _Draw(
                params, directions, found.n, symmetric_signal(self._by_block(found.n, params), q, count), [], count
            )
        squares = [
            torch.zeros_like(d, dtype=wide_dtype(d.dtype)) if s is None else s
            for s, d in zip(found.squares, directions, strict=True)
        ]
        squares = self._ranks.sums_of_squares(squares)
        u_each = [symmetric_signal(d.to(s.dtype).square(), s, count) for d, s in zip(directions, squares, strict=True)]
        return _Draw(params, directions, found.n, self._sums(u_each, found.n), u_each, count)

    def _draw_pair(self, params: list[Tensor], first: list[Tensor], second: list[Tensor]) -> _Draw:
        """Two gradients that are there themselves."""
        products, directions = [], []
        for p, g1, g2 in zip(params, first, second, strict=True):
            if g1.shape != g2.shape or g1.shape != p.shape:
                raise ValueError(
                    f"the two gradients of a pair must have the parameter's shape {tuple(p.shape)}, got "
                    f"{tuple(g1.shape)} for the held one and {tuple(g2.shape)} for the new one"
                )
            g1, g2 = real_view(g1), real_view(g2)
            wide = wide_dtype(g1.dtype)
            products.append(g1.to(wide) * g2.to(wide) if self._granularity == "coordinate" else _inner(g1, g2))
            directions.append(g1 if self._estimator == "paper" else g1.add(g2).mul_(0.5))
        device, dtype = params[0].device, scalar_dtype(params[0].device)
        n = squared_norms(directions, device, dtype)
        if self._granularity == "coordinate":
            return _Draw(params, directions, n, self._sums(products, n), products, 2)
        u = torch.stack([v.to(device=device, dtype=dtype) for v in products])
        return _Draw(params, directions, n, self._by_block(u, params), [], 2)

    # From statistics to parameters ------------------------------------------------------------------------------------

    def _update(self, draw: _Draw) -> None:
        n_total, u_total = draw.n.sum(), draw.u.sum()
        ok: Tensor | None = torch.isfinite(n_total + u_total)
        if _readable(draw.n):
            # A CPU scalar is read without a wait; an accelerator decides on the device, with torch.where.
            length, signal = torch.stack([n_total, u_total]).tolist()
            if not math.isfinite(length + signal):
                self._skip(draw.n)
                return
            self._warn_if_identical(length, signal, draw.params[0].dtype)
            ok = None
        directions, n, u, u_each = self._with_momentum(draw, ok)
        groups = self._groups_of(draw.params)
        if self._granularity == "coordinate":
            step_sizes, surrogate, weighted = self._learn_coordinates(draw.params, directions, n, u_each, ok)
        else:
            step_sizes, surrogate, weighted = self._learn_blocks(draw.params, n, u, groups, ok)
        views = [real_view(p) for p in draw.params]
        start = 0
        for group, size in zip(self.param_groups, groups, strict=True):
            chunk = slice(start, start + size)
            start += size
            if size:
                move(
                    views[chunk],
                    directions[chunk],
                    step_sizes[chunk],
                    sign=-1.0 if group["maximize"] else 1.0,
                    weight_decay=group["weight_decay"],
                    foreach=_use_foreach(group["foreach"], views[chunk]),
                    ok=ok,
                )
        self._add_totals(surrogate, *weighted, ok=ok)
        for group in self.param_groups:
            group["gradients"] = draw.k

    def _learn_blocks(
        self, params: list[Tensor], n: Tensor, u: Tensor, groups: list[int], ok: Tensor | None
    ) -> tuple[list[Tensor], Tensor, tuple[Tensor, Tensor]]:
        """One multiplier per block; returns eta per parameter, the surrogate and its lr-weighted (u, n)."""
        n_blocks = self._by_block(n, params)
        owners = self._owners(params)
        alpha, state = self._read_alpha(owners, n_blocks), self._read(owners, n_blocks)
        after = self._alpha_after(alpha, self._block_sizes(params, n_blocks), n.sum())
        multiplier, new = learn(self.learner, state, u, n_blocks, alpha, after)
        self._write(owners, "alpha_learned", after, alpha, ok)
        for field, value, old in zip(new._fields, new, state, strict=True):
            self._write(owners, f"learner.{field}", value, old, ok)
        rates = self._rates(n_blocks)
        if self._granularity == "tensor":
            owner = [i for i, size in enumerate(groups) for _ in range(size)]
            rate_each = rates[owner] if len(groups) > 1 else rates.expand(len(params))
            eta = rate_each * multiplier
            each = list(eta.unbind())
            rate_blocks = rate_each
            shown = [_weighted_mean(e, w) for e, w in zip(eta.split(groups), n.split(groups), strict=True)]
        else:
            eta = rates * multiplier
            shown = list(eta.unbind())
            each = [shown[i] for i, size in enumerate(groups) for _ in range(size)]
            rate_blocks = rates
            if self._granularity == "global":
                lengths = torch.stack([part.sum() for part in n.split(groups)]) if len(groups) > 1 else n_blocks
                rate_blocks = _weighted_mean(rates, lengths).reshape(1)
        self._show(shown, groups, ok)
        surrogate = (rate_blocks * loss(multiplier, u, n_blocks, 1.0)).sum()
        each = [e if e.device == p.device else e.to(p.device) for e, p in zip(each, params, strict=True)]
        return each, surrogate, ((rate_blocks * u).sum(), (rate_blocks * n_blocks).sum())

    def _learn_coordinates(
        self, params: list[Tensor], directions: list[Tensor], n: Tensor, u_each: list[Tensor], ok: Tensor | None
    ) -> tuple[list[Tensor], Tensor, tuple[Tensor, Tensor]]:
        """One multiplier per scalar; the learner's state is a tensor per parameter."""
        owners = self._owners(params)
        alpha = self._read_alpha(owners, n)
        after = self._alpha_after(alpha, torch.ones_like(n), n.sum())
        self._write(owners, "alpha_learned", after, alpha, ok)
        groups = self._groups_of(params)
        rates = self._rates(n)
        rate_of = [rates[i] for i, size in enumerate(groups) for _ in range(size)]
        each, sums = [], []
        for i, (p, d, u) in enumerate(zip(params, directions, u_each, strict=True)):
            d = d.to(u.dtype)
            n_each = d.square()
            state = self._read_coordinates(owners[i], u)
            a, b = (x[i].to(device=p.device, dtype=u.dtype) for x in (alpha, after))
            multiplier, new = learn(self.learner, state, u, n_each, a, b)
            for field, value, old in zip(new._fields, new, state, strict=True):
                owners[i][f"learner.{field}"] = value if ok is None else torch.where(ok, value, old)
            scaled = multiplier * d
            sums.append(torch.stack([_inner(scaled, d), _inner(scaled, scaled), _inner(multiplier, u), u.sum()]).to(n))
            each.append(multiplier.mul_(rate_of[i].to(device=p.device, dtype=u.dtype)))
        rate_each = torch.stack(rate_of)
        sn, ssn, su, u_sum = torch.stack(sums).unbind(1)
        shown = [
            _weighted_mean(rate, length) if size else rates[i]
            for i, (size, rate, length) in enumerate(
                zip(groups, (rate_each * sn / torch.where(n > 0, n, 1)).split(groups), n.split(groups), strict=True)
            )
        ]
        self._show(shown, groups, ok)
        surrogate = (rate_each * (ssn / 2 - su)).sum()
        return each, surrogate, ((rate_each * u_sum).sum(), (rate_each * n).sum())

    def _with_momentum(self, draw: _Draw, ok: Tensor | None) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
        """The direction that the update uses and its statistics (n, u); the gradients' own without momentum."""
        beta = self.defaults["momentum"]
        if not beta:
            return draw.directions, draw.n, draw.u, draw.u_each
        correction = 1 - beta ** (self._totals(draw.n)[TOTALS.index("updates")] + 1)
        directions, crosses = [], []
        for p, g in zip(draw.params, draw.directions, strict=True):
            wide = g.to(wide_dtype(g.dtype))
            old = self.state[p].get("momentum")
            old = torch.zeros_like(wide) if old is None else old
            crosses.append(old * wide if self._granularity == "coordinate" else _inner(old, wide))
            new = torch.lerp(old, wide, 1 - beta)
            self.state[p]["momentum"] = new if ok is None else torch.where(ok, new, old)
            directions.append((new / correction.to(new)).to(g.dtype))
        n = squared_norms(directions, draw.n.device, draw.n.dtype)
        if self._granularity == "coordinate":
            u_each = [
                momentum_signal(cross, u, beta, correction.to(u)) for cross, u in zip(crosses, draw.u_each, strict=True)
            ]
            return directions, n, self._sums(u_each, n), u_each
        cross = self._by_block(torch.stack([c.to(n) for c in crosses]), draw.params)
        return directions, n, momentum_signal(cross, draw.u, beta, correction), []

    # Blocks and what is stored for them -------------------------------------------------------------------------------

    def _groups_of(self, params: list[Tensor]) -> list[int]:
        """How many of these parameters each group has; they come in the order of the groups."""
        if len(self.param_groups) == 1:
            return [len(params)]
        taking_part = set(params)
        return [sum(p in taking_part for p in group["params"]) for group in self.param_groups]

    def _by_block(self, values: Tensor, params: list[Tensor]) -> Tensor:
        """Sums of one value per parameter over the blocks."""
        if self._granularity == "global":
            return values.sum(dim=0, keepdim=True)
        if self._granularity == "group":
            return torch.stack([part.sum() for part in values.split(self._groups_of(params))])
        return values

    def _sums(self, tensors: list[Tensor], like: Tensor) -> Tensor:
        return torch.stack([t.sum(dtype=wide_dtype(t.dtype)).to(like) for t in tensors])

    def _owners(self, params: list[Tensor]) -> list[dict[str, Any]]:
        """Where the state of each block is stored, and with it saved."""
        if self._granularity == "global":
            return [self.param_groups[0]]
        if self._granularity == "group":
            return list(self.param_groups)
        return [self.state[p] for p in params]

    def _block_sizes(self, params: list[Tensor], like: Tensor) -> Tensor:
        if self._granularity == "global":
            sizes = [self._size()]
        elif self._granularity == "group":
            sizes = [sum(_size(p) for p in group["params"]) for group in self.param_groups]
        else:
            sizes = [_size(p) for p in params]
        return torch.tensor(sizes, device=like.device, dtype=like.dtype)

    def _size(self) -> int:
        return sum(_size(p) for group in self.param_groups for p in group["params"])

    def _read_alpha(self, owners: list[dict[str, Any]], like: Tensor) -> Tensor:
        fixed = self.defaults["alpha"]
        if fixed is not None:
            return torch.full((len(owners),), float(fixed), device=like.device, dtype=like.dtype)
        unknown = like.new_zeros(())
        return torch.stack([owner.get("alpha_learned", unknown).to(like) for owner in owners])

    def _alpha_after(self, alpha: Tensor, sizes: Tensor, n_total: Tensor) -> Tensor:
        return alpha if self.defaults["alpha"] is not None else resolve_alpha(alpha, sizes, n_total, self._size())

    def _read(self, owners: list[dict[str, Any]], like: Tensor) -> Any:
        """The learner's state as vectors over the blocks."""
        fresh = self.learner.initial(like.new_zeros(()))
        return type(fresh)(
            *(
                torch.stack([owner.get(f"learner.{field}", value).to(like) for owner in owners])
                for field, value in zip(fresh._fields, fresh, strict=True)
            )
        )

    def _read_coordinates(self, owner: dict[str, Any], like: Tensor) -> Any:
        """The learner's state as tensors of one parameter's shape."""
        fresh = self.learner.initial(like.new_zeros(()))
        return type(fresh)(
            *(
                owner.get(f"learner.{field}", value.expand_as(like))
                for field, value in zip(fresh._fields, fresh, strict=True)
            )
        )

    def _write(self, owners: list[dict[str, Any]], name: str, new: Tensor, old: Tensor, ok: Tensor | None) -> None:
        values = new if ok is None else torch.where(ok, new, old)
        for owner, value in zip(owners, values.unbind(), strict=True):
            owner[name] = value
        self._share_all()

    def _share(self, source: dict[str, Any], group: dict[str, Any]) -> None:
        """What belongs to the whole optimizer stands in every group, so that no group can be saved without it."""
        for key, value in source.items():
            if key in ("totals", "gradients") or (
                self._granularity == "global" and (key.startswith("learner.") or key == "alpha_learned")
            ):
                group[key] = value

    def _share_all(self) -> None:
        for group in self.param_groups[1:]:
            self._share(self.param_groups[0], group)

    def _rates(self, like: Tensor) -> Tensor:
        """The base rate lr of each group."""
        rates = [group["lr"] for group in self.param_groups]
        if any(isinstance(rate, Tensor) for rate in rates):
            return torch.stack([torch.as_tensor(rate).to(like).reshape(()) for rate in rates])
        return torch.tensor(rates, device=like.device, dtype=like.dtype)

    def _show(self, step_sizes: list[Tensor], sizes: list[int], ok: Tensor | None) -> None:
        """Put the step size that this update uses where every logger finds it."""
        for group, eta, size in zip(self.param_groups, step_sizes, sizes, strict=True):
            if size:
                before = torch.as_tensor(group["step_size"]).to(eta)
                group["step_size"] = eta if ok is None else torch.where(ok, eta, before)

    def _totals(self, like: Tensor) -> Tensor:
        totals = self.param_groups[0].get("totals")
        return torch.zeros(len(TOTALS), device=like.device, dtype=like.dtype) if totals is None else totals.to(like)

    def _add_totals(self, surrogate: Tensor, u: Tensor, n: Tensor, ok: Tensor | None) -> None:
        old = self._totals(surrogate)
        one = torch.ones_like(surrogate)
        recent = torch.stack([u, n])
        new = torch.cat([old[:5] + torch.stack([one, 0 * one, surrogate, u, n]), torch.lerp(recent, old[5:], RECENT)])
        if ok is not None:
            skipped = old.clone()
            skipped[TOTALS.index("skipped")] += 1
            new = torch.where(ok, new, skipped)
        self.param_groups[0]["totals"] = new
        self._share_all()

    def _skip(self, like: Tensor) -> None:
        totals = self._totals(like).clone()
        totals[TOTALS.index("skipped")] += 1
        self.param_groups[0]["totals"] = totals
        self._share_all()

    # Bookkeeping ------------------------------------------------------------------------------------------------------

    @property
    def _granularity(self) -> str:
        return self.defaults["granularity"]

    @property
    def _estimator(self) -> str:
        return self.defaults["estimator"]

    def _watch(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        if self._passes is None:
            keep = (
                "gradients"
                if self._estimator == "paper"
                else "squares"
                if self._granularity == "coordinate"
                else "norms"
            )
            self._passes = BackwardPasses(params, keep)  # type: ignore[arg-type]
        else:
            self._passes.watch(params)

    def _take_held(self, p: Tensor) -> Tensor:
        held = self.state[p].pop("held_gradient", None)
        return torch.zeros_like(p) if held is None else held

    def _refuse_sparse(self, params: list[Tensor]) -> None:
        for index, p in enumerate(params):
            if p.grad is not None and p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"SGDOL does not support sparse gradients: parameter {index} of shape {tuple(p.shape)} has a gradient of "
                    f"layout {p.grad.layout}; use a dense one (for instance torch.nn.Embedding(..., sparse=False))"
                )

    def _warn_if_identical(self, length: float, signal: float, dtype: torch.dtype) -> None:
        """Identical gradients have u = n: the same batch was used twice, or there is no noise at all."""
        if self._warned or length <= 0 or abs(length - signal) > 8 * torch.finfo(wide_dtype(dtype)).eps * length:
            return
        self._warned = True
        warnings.warn(
            "SGDOL was given the same gradient twice, so it cannot see any noise and is plain SGD with step size lr. "
            "Draw a fresh batch for every backward(), split a batch into microbatches, and give each rank its own data. "
            "If the objective has no noise, all is well.",
            UserWarning,
            stacklevel=5,
        )

    # Saving and loading -----------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned, exactly: sums, counts and the held gradient keep their type.

        Raises:
            ValueError: if it was saved by another configuration (estimator, granularity, learner or alpha).
        """
        for index, group in enumerate(state_dict["param_groups"]):
            for name in SHARED:
                if name in group and group[name] != self.defaults[name]:
                    raise ValueError(
                        f"state_dict was saved with {name}={group[name]!r} in group {index}, this optimizer has "
                        f"{name}={self.defaults[name]!r}: construct it with the same {name}"
                    )
        super().load_state_dict(state_dict)
        # torch casts floating-point state to the parameter's type, which would round the sums.
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, params, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][key] = value.detach().to(device=p.device, copy=True)
        for group in self.param_groups:
            for name in SHARED:
                group[name] = self.defaults[name]
        self._share_all()
        if self._passes is not None:
            self._passes.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "learner": self.learner, "_warned": self._warned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            group.setdefault("step_size", group["lr"])
        if "defaults" in state:  # unpickled or copied: new parameters, which nobody watches yet
            self._passes, self._ranks = None, None
            self._watch()


def _grad(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def _nth(gradients: list[Tensor], index: int, p: Tensor) -> Tensor:
    return gradients[index] if index < len(gradients) else torch.zeros_like(p)


def _size(p: Tensor) -> int:
    return p.numel() * (2 if p.is_complex() else 1)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    wide = wide_dtype(a.dtype)
    return torch.dot(a.to(wide).reshape(-1), b.to(wide).reshape(-1))


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum()
    return torch.where(total > 0, (values * weights).sum() / torch.where(total > 0, total, 1), values.mean())


def _quotient(numerator: float, denominator: float) -> float:
    if denominator == 0:
        return math.nan if numerator == 0 else math.inf
    return numerator / denominator


def _readable(scalar: Tensor) -> bool:
    """Whether the host can look at this number without waiting for a device or breaking a graph."""
    return scalar.device.type == "cpu" and type(scalar) is Tensor and not torch.compiler.is_compiling()


def _use_foreach(wanted: bool | None, tensors: list[Tensor]) -> bool:
    return all(t.device.type != "cpu" for t in tensors) if wanted is None else wanted


def _materialise(params: Iterable[Any]) -> list[Any]:
    if isinstance(params, Tensor):
        raise TypeError(
            f"params must be an iterable of tensors or dicts, got a single tensor of shape {tuple(params.shape)}"
        )
    return list(params)


def _every_group_has_a_rate(params: list[Any]) -> bool:
    return bool(params) and all(isinstance(g, dict) and ("lr" in g or "smoothness" in g) for g in params)


def _check(name: str, value: Any, allowed: Any, sentence: str) -> None:
    if not (bool(allowed) and math.isfinite(value)):
        raise ValueError(f"{name} must be {sentence}, got {value!r}")


def _check_options(options: dict[str, Any]) -> None:
    """Every option by name, value and what is allowed; lr may still be missing."""
    lr = options["lr"]
    if lr is not None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(
                f"lr must be a number or a tensor with one element, got a tensor of shape {tuple(lr.shape)}"
            )
        _check("lr", lr, lr > 0, "positive and finite")
    if options["alpha"] is not None:
        _check("alpha", options["alpha"], options["alpha"] > 0, "None, or positive and finite")
    for name, values in (("estimator", ESTIMATORS), ("granularity", GRANULARITIES)):
        if options[name] not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, got {options[name]!r}")
    _check("momentum", options["momentum"], 0 <= options["momentum"] < 1, "at least 0 and less than 1")
    _check("weight_decay", options["weight_decay"], options["weight_decay"] >= 0, "at least 0 and finite")
