"""The PyTorch optimizer that measures M itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sgdol.free import PROBED, Rule, Settings, next_probe
from sgdol.surrogate import symmetric_signal
from sgdol.torch._passes import BackwardPasses, real_gradient, real_view, scalar_dtype, wide_dtype
from sgdol.torch._ranks import Ranks
from sgdol.torch._rerun import Rerun
from sgdol.torch._vectors import add, inner, lerp, numbers

__all__ = ["SGDOLFree"]

PROBES = 8
"""How many points the first step may probe for a first M; two or three are usual."""

WATCHED = 8
ENTRIES = 256
"""How many tensors, and about how many entries of each, are compared to notice that somebody else moved them."""


class _Evaluation(NamedTuple):
    """What one call of the closure gave; the gradient itself is in ``.grad``."""

    loss: float
    """The mean over the ranks of what the closure returned; negative if it is maximised."""
    u: float
    n: float
    k: int

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.n) and math.isfinite(self.u)


class _Kept(NamedTuple):
    """A point and its gradient, put aside while the closure is evaluated elsewhere."""

    x: list[Tensor]
    g: list[Tensor]


class SGDOLFree(Optimizer):
    r"""SGDOL that needs neither a learning rate nor a smoothness constant. Experimental.

    It measures the smoothness M along its own steps: now and then (about every tenth step) it evaluates the batch of
    the step at the point before the last step as well. Signal and noise come from the independent gradients of the
    batch, as in :class:`sgdol.SGDOL`, and

    .. math:: \eta_t = \frac{\alpha + S}{M (\alpha + S/4 + c N)}, \qquad S = \sum_{j<t} u_j, \quad
        N = \sum_{j<t} (n_j - u_j), \quad \alpha = 4 \|g_1\|^2,

    scales a momentum direction, with c from 1/2, while the loss falls, to 1. A step whose curvature was too much for it
    is taken back, and a loss that jumps sends the run back to its average. What is to be used is that average: see
    :meth:`averaged`. The algorithm, what was measured and what failed is in ``docs/without_smoothness.md``.

    ``step`` takes a closure that evaluates **the same batch** each time it is called within one step, in two or more
    ``backward()`` calls (under DistributedDataParallel one is enough: the ranks are the independent gradients), and
    returns the loss of the batch. Dropout draws the same numbers each time, and buffers such as BatchNorm's
    statistics are updated once.

    Args:
        params: parameters or parameter groups; groups may differ in weight_decay.
        momentum: beta in [0, 1) of :math:`d_t = m_t/(1-\beta^t)`, :math:`m_t = \beta m_{t-1} + (1-\beta) \bar g_t`.
        averaging: a of the polynomial average, at least 0: iterate t counts about as :math:`t^a`.
        weight_decay: decoupled: :math:`x \leftarrow x - \eta_t (d_t + \mathrm{weight\_decay} \cdot x)`.
        maximize: ascend instead; the same in all groups.
        foreach: update many tensors at once or one by one; None for what suits the device.

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
        *,
        momentum: float = 0.9,
        averaging: float = 8.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "momentum": momentum,
            "averaging": averaging,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
        }
        _check_options(defaults)
        self._settings = Settings()
        self._passes: BackwardPasses | None = None
        self._ranks: Ranks | None = None
        self._rerun = Rerun()
        self._left: dict[Tensor, tuple[int, Tensor | None]] = {}
        super().__init__(params, defaults)

    # The public face --------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    @torch.no_grad()
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
        self._refuse_moved()
        rule = Rule(**self.param_groups[0].get("rule", {}))
        rule.evaluations += 1
        self._clear()
        with self._rerun.first({p.device for p in self._all()}), torch.enable_grad():
            result = closure()
        now = self._measure(result)
        if not now.finite:
            self._rerun.undo()
        k = now.k
        point = self._advance(rule, now, closure)
        if point is not None:
            self._step(rule, point)
        for group in self.param_groups:
            group["rule"] = vars(rule).copy()
            group["gradients"] = k
            group["step_size"] = rule.step_size or group["step_size"]
        self._remember_where()
        return result

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged parameters in, for evaluation and saving, and take them out again.

        Only parameters are averaged. A model with BatchNorm wants its statistics for the averaged parameters:
        :func:`torch.optim.swa_utils.update_bn` inside.
        """
        self._refuse_moved()
        pairs = [(p, self.state[p]["average"]) for p in self._all() if "average" in self.state.get(p, {})]
        kept = [p.detach().clone() for p, _ in pairs]
        try:
            with torch.no_grad():
                for p, average in pairs:
                    real_view(p).copy_(average)
            yield
        finally:
            with torch.no_grad():
                for (p, _), x in zip(pairs, kept, strict=True):
                    p.copy_(x)
            if self._left:
                self._remember_where()

    def diagnostics(self) -> dict[str, Any]:
        """What the optimizer has learned, as plain numbers.

        * ``step_size``: eta of the last step, one per parameter group; ``smoothness``: M as measured so far.
        * ``signal_to_noise``: sum of u over sum of n - u, over about the last hundred steps.
        * ``noise_scale``: the gradient noise scale in units of one of the k gradients: that many averaged would have
          as much signal as noise.
        * ``updates``, ``skipped`` (batches that are not finite), ``gradients`` (k of the last step).
        * ``evaluations``: calls of the closure; ``rejections``: steps taken back after a look-back; ``rollbacks``:
          returns to the average after a jump of the loss.
        """
        group = self.param_groups[0]
        rule = Rule(**group.get("rule", {}))
        k = group.get("gradients", 0)
        return {
            "step_size": [g["step_size"] for g in self.param_groups],
            "smoothness": rule.smoothness,
            "signal_to_noise": _quotient(rule.recent_signal, rule.recent_noise),
            "noise_scale": _quotient(k * rule.recent_noise, rule.recent_signal),
            "updates": rule.updates,
            "skipped": rule.skipped,
            "gradients": k,
            "evaluations": rule.evaluations,
            "rejections": rule.rejections,
            "rollbacks": rule.rollbacks,
        }

    def moved(self) -> None:
        """Say that you changed the parameters a little on purpose (clipping, projecting): go on from where they are."""
        self._left = {}

    def restart(self) -> None:
        """Forget everything, as if newly constructed; for instance after other weights were loaded into the model."""
        self.state.clear()
        self._left = {}
        for group in self.param_groups:
            group.pop("rule", None)
            group.pop("gradients", None)
            group["step_size"] = 0.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, and forget the backward passes that made them."""
        super().zero_grad(set_to_none)
        if self._passes is not None:
            self._passes.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; it may bring its own weight_decay."""
        if isinstance(param_group, dict):
            options = {**self.defaults, **param_group}
            _check_options(options)
            for name in ("momentum", "averaging", "maximize"):
                if options[name] != self.defaults[name]:
                    raise ValueError(
                        f"{name} is the same for all parameter groups: this optimizer has {self.defaults[name]!r}, "
                        f"the group has {options[name]!r}"
                    )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if hasattr(p, "device_mesh"):
                raise NotImplementedError(
                    f"SGDOLFree does not support DTensor parameters (fully_shard, tensor parallel), got one of shape "
                    f"{tuple(p.shape)}; DistributedDataParallel is supported"
                )
        first = self.param_groups[0]
        for name in ("rule", "gradients"):
            if name in first:
                group[name] = first[name]
        group.setdefault("step_size", first.get("step_size", 0.0))
        self._ranks = None
        self._watched()

    # One step ---------------------------------------------------------------------------------------------------------

    def _advance(self, rule: Rule, now: _Evaluation, closure: Callable[[], Any]) -> _Evaluation | None:
        """Decide where to step from: there, with the gradients in ``.grad``; None if this batch is to be skipped."""
        if rule.updates == 0:
            if not now.finite or now.n == 0:
                rule.skipped += not now.finite
                return None
            self._begin(rule, now, closure)
        elif rule.alarm(now.loss):
            now = self._guard(rule, now, closure)
        if rule.wants_look_back(math.sqrt(now.n) if now.finite else math.nan, self._settings):
            now = self._look_back(rule, now, closure)
        if not now.finite:
            rule.skipped += 1
            return None
        rule.track(now.loss)
        return now

    def _begin(self, rule: Rule, now: _Evaluation, closure: Callable[[], Any]) -> None:
        """The first point: check the closure, and measure M along the gradient by a difference of gradients."""
        params = self._taking_part()
        kept = self._keep(params)
        norm = math.sqrt(now.n)
        try:
            self._again(rule, closure)
            self._refuse_another_batch(kept, params, norm)
            xx = numbers(inner(kept.x, kept.x))[0]
            # A first guess from the only lengths there are; with x = 0 and f = 0 there is none.
            length = math.sqrt(xx) / 64 or abs(now.loss) / norm / 8 or 1.0
            for _ in range(PROBES):
                self._put(params, kept.x)
                add(self._views(params), kept.g, -self._sign * length / norm)
                probed = self._again(rule, closure)
                y = [q - g for q, g in zip(self._gradients(params), kept.g, strict=True)]
                change = math.sqrt(numbers(inner(y, y))[0]) / norm if probed.finite else math.inf
                longer = next_probe(length, change)
                if longer is None:
                    break
                length, used = longer, length
            else:
                length, change = used, max(change, PROBED[0]) if math.isfinite(change) else 1.0
        finally:
            self._put_back(params, kept)
        rule.begin(change * norm / length, now.n)

    def _guard(self, rule: Rule, now: _Evaluation, closure: Callable[[], Any]) -> _Evaluation:
        """The loss has jumped: go back to the average if this batch is fine there."""
        params = self._taking_part()
        kept = self._keep(params)
        back = False
        try:
            self._put(params, [self.state[p]["average"] for p in params])
            there = self._again(rule, closure)
            back = there.finite and rule.confirms(now.loss, there.loss)
        finally:
            if not back:
                self._put_back(params, kept)
        if not back:
            return now
        rule.roll_back()
        for p in params:
            self.state[p]["momentum"].zero_()
        return there

    def _look_back(self, rule: Rule, now: _Evaluation, closure: Callable[[], Any]) -> _Evaluation:
        """Evaluate this batch before the last step as well, and stay there if the step was too long."""
        params = self._taking_part()
        kept = self._keep(params)
        rejected = False
        try:
            self._move(params, rule, back=True)
            before = self._again(rule, closure)
            if before.finite:
                s = [a - b.to(a.dtype) for a, b in zip(kept.x, self._views(params), strict=True)]
                q = self._gradients(params)
                y = [a - b for a, b in zip(kept.g, q, strict=True)]
                ys, yy, ss, qs = numbers(inner(y, s), inner(y, y), inner(s, s), inner(q, s))
                if not math.isfinite(now.loss):
                    ys = math.nan
                rejected = rule.look_back(self._sign * ys, yy, ss, qs, self._settings)
        finally:
            if not rejected:
                self._put_back(params, kept)
        return before if rejected else now

    def _step(self, rule: Rule, now: _Evaluation) -> None:
        """Move along the momentum direction, and learn from the gradients."""
        params = self._taking_part()
        beta = self.defaults["momentum"]
        momenta = [self._momentum(p) for p in params]
        lerp(momenta, self._gradients(params), 1 - beta, foreach=self._foreach(params))
        rule.momentum_weight = beta * rule.momentum_weight + (1 - beta)
        direction_norm = math.sqrt(numbers(inner(momenta, momenta))[0]) / rule.momentum_weight
        rule.choose_step_size(direction_norm, self._decay(), self._settings)
        rule.observe(now.u, now.n)
        # The average is over the points that steps start from: of none that is taken back afterwards.
        power = self.defaults["averaging"]
        weight = min(1.0, (power + 1) / (rule.updates + power))
        lerp([self._average(p) for p in params], self._views(params), weight, foreach=self._foreach(params))
        self._move(params, rule)

    def _move(self, params: list[Tensor], rule: Rule, *, back: bool = False) -> None:
        """Make the step x <- x - eta (d + weight_decay x), or take it back."""
        factor = -self._sign * rule.step_size / rule.momentum_weight
        for group in self.param_groups:
            mine = set(group["params"])
            some = [p for p in params if p in mine]
            momenta = [self.state[p]["momentum"] for p in some]
            scale = 1 - rule.step_size * group["weight_decay"]
            if back:
                factor_back, scale_back = -factor / scale, 1 / scale
                add(self._views(some), momenta, factor_back, scale=scale_back, foreach=self._foreach(some))
            else:
                add(self._views(some), momenta, factor, scale=scale, foreach=self._foreach(some))

    # Evaluating -------------------------------------------------------------------------------------------------------

    def _again(self, rule: Rule, closure: Callable[[], Any]) -> _Evaluation:
        """Evaluate the same batch where the parameters are now."""
        rule.evaluations += 1
        self._clear()
        with self._rerun.again(), torch.enable_grad():
            result = closure()
        return self._measure(result)

    def _clear(self) -> None:
        """Gradients of another point must neither be added to nor, being kept, be written to."""
        for p in self._all():
            p.grad = None
        self._watched().reset()

    def _measure(self, result: Any) -> _Evaluation:
        loss = _loss(result) * self._sign
        params = [p for p in self._all() if p.grad is not None]
        if not params:
            raise RuntimeError("the closure left no gradient in any parameter: it has to call backward() itself")
        _refuse_sparse(params)
        device, ranks = params[0].device, self._data_parallel()
        found = self._watched().contributions(params, device, scalar_dtype(device))
        self._watched().reset()
        k = found.k * ranks.count
        if k < 2:
            raise RuntimeError(
                f"SGDOLFree needs at least two independent gradients per step, the closure ran backward() {found.k} "
                "time(s). Split the batch: for x, y in zip(inputs.chunk(2), targets.chunk(2)): "
                "(loss_fn(model(x), y) / 2).backward()"
            )
        n, q, loss = self._over_ranks(found.n.sum(), found.q.sum(), loss, ranks, found.k)
        return _Evaluation(loss, symmetric_signal(n, q, k), n, k)

    @staticmethod
    def _over_ranks(n: Tensor, q: Tensor, loss: float, ranks: Ranks, passes: int) -> tuple[float, float, float]:
        """N of the mean gradient, which every rank has; Q and the loss over all ranks, in one all-reduce."""
        if ranks.count == 1:
            return (*numbers(n, q), loss)  # type: ignore[return-value]
        total = ranks.sum_of_squares(torch.stack([q, q.new_tensor(loss * ranks.count)]), passes)
        return tuple(numbers(n, *total.unbind()))  # type: ignore[return-value]

    # Vectors ----------------------------------------------------------------------------------------------------------

    def _all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _taking_part(self) -> list[Tensor]:
        """Parameters that move: those with a gradient now, or with a momentum from before."""
        return [
            p for p in self._all() if p.requires_grad and (p.grad is not None or "momentum" in self.state.get(p, ()))
        ]

    def _views(self, params: list[Tensor]) -> list[Tensor]:
        return [real_view(p.detach()) for p in params]

    def _gradients(self, params: list[Tensor]) -> list[Tensor]:
        return [
            torch.zeros_like(real_view(p), dtype=wide_dtype(p.dtype))
            if p.grad is None
            else real_gradient(p.grad).to(wide_dtype(p.dtype))
            for p in params
        ]

    def _keep(self, params: list[Tensor]) -> _Kept:
        wide = [v.to(wide_dtype(v.dtype), copy=True) for v in self._views(params)]
        return _Kept(wide, [g.clone() for g in self._gradients(params)])

    def _put(self, params: list[Tensor], point: list[Tensor]) -> None:
        for p, x in zip(self._views(params), point, strict=True):
            p.copy_(x)

    def _put_back(self, params: list[Tensor], kept: _Kept) -> None:
        self._put(params, kept.x)
        for p, g in zip(params, kept.g, strict=True):
            grad = g.to(real_view(p).dtype)
            p.grad = torch.view_as_complex(grad) if p.is_complex() else grad

    def _momentum(self, p: Tensor) -> Tensor:
        return self._vector(p, "momentum", torch.zeros_like)

    def _average(self, p: Tensor) -> Tensor:
        return self._vector(p, "average", torch.clone)

    def _vector(self, p: Tensor, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        state = self.state[p]
        if name not in state:
            x = real_view(p.detach())
            state[name] = make(x.to(wide_dtype(x.dtype)))
        return state[name]

    def _foreach(self, params: list[Tensor]) -> bool:
        wanted = self.defaults["foreach"]
        return all(p.device.type != "cpu" for p in params) if wanted is None else wanted

    @property
    def _sign(self) -> float:
        return -1.0 if self.defaults["maximize"] else 1.0

    def _decay(self) -> float:
        return max(float(group["weight_decay"]) for group in self.param_groups)

    def _watched(self) -> BackwardPasses:
        if self._passes is None:
            self._passes = BackwardPasses(self._all(), "norms")
        else:
            self._passes.watch(self._all())
        return self._passes

    def _data_parallel(self) -> Ranks:
        if self._ranks is None:
            self._ranks = Ranks(self._all(), self)
        return self._ranks

    # Misuse -----------------------------------------------------------------------------------------------------------

    def _refuse_another_batch(self, kept: _Kept, params: list[Tensor], norm: float) -> None:
        difference = [a - b for a, b in zip(kept.g, self._gradients(params), strict=True)]
        share = math.sqrt(numbers(inner(difference, difference))[0]) / norm
        allowed = max(_tolerance(p) for p in params)
        if not share <= allowed:
            raise RuntimeError(
                "the closure does not evaluate the same batch each time: called twice at the same point, with the same "
                f"random numbers of torch, its gradients differ by {share:.2g} of their length. Draw the batch before "
                "step(), outside the closure; random augmentation that does not use torch's global generator belongs "
                "outside too"
            )

    def _remember_where(self) -> None:
        largest = set(sorted(self._all(), key=Tensor.numel)[-WATCHED:])
        self._left = {p: (p._version, _entries(p) if p in largest else None) for p in self._all()}

    def _refuse_moved(self) -> None:
        for index, p in enumerate(self._all()):
            version, entries = self._left.get(p, (p._version, None))
            if version != p._version or (entries is not None and not torch.equal(entries, _entries(p))):
                raise RuntimeError(
                    f"parameter {index} of shape {tuple(p.shape)} was changed by something else since the last step of "
                    "SGDOLFree, which compares points and would be misled. If that was on purpose, say so: "
                    "opt.moved() after clipping or projecting, opt.restart() after loading other weights"
                )

    # Saving and loading -----------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict()`` returned, exactly."""
        for index, group in enumerate(state_dict["param_groups"]):
            if "averaging" not in group:
                raise ValueError(f"state_dict was not saved by SGDOLFree: its group {index} has only {sorted(group)}")
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, p in zip(saved, self._all(), strict=True):
            # torch casts floating-point state to the parameter's type, which would round that of narrow parameters
            for key, value in state_dict["state"].get(index, {}).items():
                self.state[p][key] = value.detach().to(device=p.device, copy=True)
        self._left = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "defaults" in state:  # unpickled or copied: new parameters, which nobody watches yet
            self._passes, self._ranks, self._rerun, self._left = None, None, Rerun(), {}
            self._watched()


def _loss(result: Any) -> float:
    if isinstance(result, Tensor) and result.numel() == 1:
        return float(result.detach())
    if isinstance(result, Real) and not isinstance(result, bool):
        return float(result)
    raise TypeError(f"the closure must return the loss of the batch, a number or a tensor with one, got {result!r}")


def _entries(p: Tensor) -> Tensor:
    flat = p.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ENTRIES)].clone()


def _tolerance(p: Tensor) -> float:
    """By how much two gradients of the same batch may differ: kernels on accelerators add in any order."""
    rounding = math.sqrt(torch.finfo(p.dtype).eps)
    return rounding if p.device.type == "cpu" else max(rounding, 0.01)


def _refuse_sparse(params: list[Tensor]) -> None:
    for index, p in enumerate(params):
        if p.grad is not None and p.grad.layout != torch.strided:
            raise RuntimeError(
                f"SGDOLFree does not support sparse gradients: parameter {index} of shape {tuple(p.shape)} has a "
                f"gradient of layout {p.grad.layout}; use a dense one (torch.nn.Embedding(..., sparse=False))"
            )


def _quotient(numerator: float, denominator: float) -> float:
    if denominator == 0:
        return math.nan if numerator == 0 else math.copysign(math.inf, numerator)
    return numerator / denominator


def _check(name: str, value: Any, allowed: Callable[[Any], Any], sentence: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, {sentence}, got {value!r}")
    if not (math.isfinite(value) and allowed(value)):
        raise ValueError(f"{name} must be {sentence}, got {value!r}")


def _check_options(options: dict[str, Any]) -> None:
    _check("momentum", options["momentum"], lambda v: 0 <= v < 1, "at least 0 and less than 1")
    _check("averaging", options["averaging"], lambda v: v >= 0, "at least 0 and finite")
    _check("weight_decay", options["weight_decay"], lambda v: v >= 0, "at least 0 and finite")
    if not isinstance(options["maximize"], bool):
        raise TypeError(f"maximize must be True or False, got {options['maximize']!r}")
    if options["foreach"] not in (None, True, False):
        raise TypeError(f"foreach must be None, True or False, got {options['foreach']!r}")
