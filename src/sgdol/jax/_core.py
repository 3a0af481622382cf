"""From independent gradients to direction times multiplier: what every form of the optimizer has in common."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from sgdol import summary, surrogate
from sgdol.jax._axes import sum_over
from sgdol.jax._blocks import Blocks, as_real, numbers, total
from sgdol.jax._metric import Memory, Norm, choose_unit, divided, in_unit
from sgdol.jax._options import Scaling
from sgdol.jax._sources import Gradients, refuse_integers, take
from sgdol.learners import uses_hindsight
from sgdol.metrics import Euclidean, is_scale_free

__all__ = ["Core", "Learned", "ScaleBySGDOLState"]


class ScaleBySGDOLState(NamedTuple):
    """Everything that SGDOL remembers between two calls of ``update``.

    Numbers lie in few arrays, because every array of a state costs a compiled step about as much as a layer's update;
    the properties give them their names.
    """

    counts: jax.Array
    """Whole numbers: updates, whether a gradient is held, updates that were skipped because a gradient was not finite,
    updates that had the same gradient twice, and k of the last update."""
    numbers: jax.Array
    """The sum of the weights of the gradients in m_t, the unit, and what :func:`sgdol.jax.diagnostics` reads."""
    blocks: Any
    """alpha, multiplier and the learner's state of each block, along the last axis of one array; for
    ``"coordinate"``, a :class:`Learned`."""
    held: Any
    """The held gradient, of the shape of the parameters; means nothing unless ``pending``."""
    trace: Any
    """The momentum m_t in units of ``unit``, like the parameters (complex numbers as pairs); empty without momentum."""
    metric: Any
    """What the metric remembers (:class:`sgdol.jax._metric.Memory`); empty with Euclid's."""
    direction: Any
    """d_t of the last update, times the weight that m_t is divided by, in units of ``unit``, like the parameters, if
    the learner uses hindsight and nothing else tells it; else empty."""

    @property
    def count(self) -> jax.Array:  # type: ignore[override]  # optax's word for it hides a tuple's method
        """How many updates were made; a call that only holds a gradient is none."""
        return self.counts[..., 0]

    @property
    def pending(self) -> jax.Array:
        """Whether a gradient is held and waits for its partner."""
        return self.counts[..., 1] > 0

    @property
    def trace_weight(self) -> jax.Array:
        """The sum of the weights of the gradients in m_t, 1 - beta^t if beta stays the same."""
        return self.numbers[..., 0]

    @property
    def unit(self) -> jax.Array:
        """The unit of gradients, a power of two: 1 unless they are very large or very small; 0 before the first."""
        return self.numbers[..., 1]

    @property
    def alpha(self) -> Any:
        """Alpha of each block, in units of ``unit`` squared; 0 until its default, the first squared gradient, is known.

        A scalar (``"global"``), a vector (``"group"``, ``"tensor"``) or a tree like the parameters (``"coordinate"``).
        """
        return self.blocks.alpha if isinstance(self.blocks, Learned) else self.blocks[..., 0]

    @property
    def multiplier(self) -> Any:
        """s_t = M eta_t of the last update, of each block; before the first, the multiplier that it will use."""
        return self.blocks.multiplier if isinstance(self.blocks, Learned) else self.blocks[..., 1]

    @property
    def learner(self) -> Any:
        """The learner's state, sums in units of ``unit`` squared: its fields in their order along the last axis.

        For ``"coordinate"``, its named tuple, of trees like the parameters.
        """
        return self.blocks.learner if isinstance(self.blocks, Learned) else self.blocks[..., 2:]


class Learned(NamedTuple):
    """What is learned per coordinate: trees like the parameters, which shard as they do."""

    alpha: Any
    multiplier: Any
    learner: Any
    """The learner's named tuple of such trees."""


class _Statistics(NamedTuple):
    """What an update is made of; gradients in units, products in their squares, of each block."""

    d: list[jax.Array]
    """The direction, real, in float32 or wider..."""
    scale: jax.Array
    """...which has to be divided by this."""
    trace: list[jax.Array]
    """The momentum m_t; empty without."""
    weight: jax.Array
    """The sum of the weights of the gradients in m_t."""
    u: list[jax.Array]
    """The signal that the learner sees..."""
    n: list[jax.Array]
    """...and the squared length."""
    own_u: list[jax.Array]
    """The same two of the gradients themselves..."""
    own_n: list[jax.Array]
    """...which without momentum are those above."""
    last: list[jax.Array]
    """<gbar_t, d_{t-1}>, if the learner uses hindsight; else zeros."""


class Core:
    """From gradients to s d/(1 - beta); the rate lr is only needed for the record."""

    def __init__(self, options: Scaling) -> None:
        self._options = options
        self._learner = cast(Any, options.learner)  # options have made objects of names
        self._metric = cast(Any, options.metric)
        self._memory = Memory(self._metric)
        self._kind: Any = jax.tree.structure(self._learner.initial(0.0))
        self._hindsight = uses_hindsight(self._learner)
        self._scale_free = is_scale_free(self._metric)
        # With Euclid's norm and momentum, d is the trace, but for a number.
        self._follows_trace = isinstance(self._metric, Euclidean) and options.momentum is not None
        self._keeps_direction = self._hindsight and not self._follows_trace

    def init(self, params: Any, rate: Any = 1.0) -> ScaleBySGDOLState:
        refuse_integers(params)
        options = self._options
        blocks = Blocks(options.granularity, params, options.param_labels)
        states = [self._learner.initial(zero) for zero in blocks.zeros]
        self._refuse_other_shapes(states, blocks.zeros)
        alphas, unit = blocks.zeros, jnp.zeros((), blocks.dtype)
        if options.alpha is not None:
            one = jnp.ones((), blocks.dtype)
            if blocks.holds_squares:
                unit = choose_unit([jnp.sqrt(in_unit(options.alpha, one))], blocks.dtype)
            first = in_unit(options.alpha, jnp.where(unit > 0, unit, one))
            alphas = [zero + first.astype(zero.dtype) for zero in blocks.zeros]
        multipliers = [self._learner.predict(s, a) for s, a in zip(states, alphas, strict=True)]
        vectors = [jnp.zeros_like(as_real(jnp.asarray(leaf))) for leaf in jax.tree.leaves(params)]
        like_params = jax.tree.unflatten(blocks.tree, vectors)
        rates = jnp.broadcast_to(jnp.asarray(rate, blocks.dtype), blocks.count if options.granularity == "group" else 1)
        record = [jnp.zeros(5, blocks.dtype), rates] if options.record else []
        state = ScaleBySGDOLState(
            counts=jnp.zeros(5, jnp.int32),
            numbers=jnp.concatenate([jnp.stack([jnp.zeros_like(unit), unit]), *record]),
            blocks=self._packed(blocks, alphas, multipliers, states),
            held=jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.result_type(p)), params),
            trace=like_params if options.momentum is not None else (),
            metric=self._memory.pack([self._metric.initial(v) for v in vectors], blocks.tree, blocks.dtypes),
            direction=like_params if self._keeps_direction else (),
        )
        # Each its own memory, as a learner may use one zero twice: nobody can donate the same buffer twice.
        return jax.tree.map(jnp.array, state)

    def update(
        self, updates: Any, state: ScaleBySGDOLState, params: Any, others: Any, rate: Any = 1.0
    ) -> tuple[Any, ScaleBySGDOLState]:
        if not jax.tree.leaves(state.held):  # a mask can leave nothing
            return updates, state
        self._refuse_another_configuration(state)
        options = self._options
        blocks = Blocks(options.granularity, state.held, options.param_labels)
        if options.weight_decay is not None and params is None:
            raise ValueError("weight_decay needs the parameters: call update(grads, state, params)")
        found = take(updates, others, state.held, options.estimator, options.axis_name, blocks)

        # Gradients in units; D of the past, which without a past is made of the present mean.
        unit = state.unit
        if options.alpha is None or not blocks.holds_squares:
            # A branch, as this is needed once: the largest entry of all gradients takes time to find. Its condition
            # waits for the gradient on purpose: the more kernels could run as soon as the step begins, the likelier XLA
            # for CPUs hands them to other threads, which costs a small network more than the kernels do.
            known = (unit > 0) | ~jnp.isfinite(jnp.sum(found.mean[0].ravel()[:1]))
            unit += jax.lax.cond(known, lambda: jnp.zeros_like(unit), lambda: choose_unit(found.mean, blocks.dtype))
        has_unit, unit = unit > 0, jnp.where(unit > 0, unit, 1.0)
        given = found.mean
        found = found._replace(mean=divided(found.mean, unit), others=divided(found.others, unit))
        mean = found.mean if self._scale_free else given
        memory = [] if self._memory.is_empty else self._memory.unpack(state.metric, blocks.tree, blocks.dtypes)
        norm = Norm(self._metric, memory, mean, blocks)

        # (d, u, n) -> multiplier s; the update is s d/(1 - beta): d is an average, and lr the rate of a sum, as in sgd.
        seen = self._measure(state, found, norm, blocks)
        alphas, multipliers, learned = self._learn(state, seen, unit, blocks)
        share = 1 - jnp.asarray(0.0 if options.momentum is None else options.momentum, blocks.dtype)

        # Squares of a finite gradient may overflow, and one infinite sum would end the learning for ever.
        finite = jnp.isfinite(total(seen.own_u) + total(seen.own_n) + total(seen.last))
        enough: Any = True if found.waiting is None else state.pending
        go = finite & enough
        # A signal without a direction, of gradients that cancel, has been taken in this unit, too.
        values = [seen.weight, jnp.where(has_unit | (total(seen.own_u) != 0), unit, 0.0)]
        if options.record:
            values += self._recorded(state.numbers[..., 2:], blocks, seen, multipliers, rate, share)
        metric = state.metric
        if norm.operators is not None:
            observed = [self._metric.observe(s, g) for s, g in zip(memory, blocks.split(mean), strict=True)]
            metric = self._memory.pack(observed, blocks.tree, blocks.dtypes)
        direction = blocks.split(seen.d)
        nothing = cast(Any, ())  # what is not chosen by go
        old = state._replace(counts=nothing, held=nothing)
        new = old._replace(
            numbers=numbers(values, blocks.dtype),
            blocks=self._packed(blocks, alphas, multipliers, learned),
            trace=jax.tree.unflatten(blocks.tree, blocks.split(seen.trace)) if seen.trace else (),
            metric=metric,
            direction=jax.tree.unflatten(blocks.tree, direction) if self._keeps_direction else (),
        )
        new = jax.tree.map(lambda a, b: jnp.where(go, a, b).astype(b.dtype), new, old)
        if self._follows_trace:
            # Without the barrier, XLA computes the update from the old trace and not from the new one. A trace that is
            # donated is then copied first: it cannot be overwritten as long as anybody reads it.
            new = new._replace(trace=jax.lax.optimization_barrier(new.trace))
            direction = jax.tree.leaves(new.trace)
        else:
            direction = [jnp.where(go, d, 0.0) for d in direction]
        factors = [jnp.where(go, s / share.astype(s.dtype), 0.0) for s in multipliers]
        moves = self._moves(factors, direction, unit / seen.scale, params, found, state, blocks)

        own_u, own_n = total(seen.own_u), total(seen.own_n)
        identical = (own_n > 0) & (jnp.abs(own_n - own_u) <= 8 * jnp.finfo(blocks.dtype).eps * own_n)
        count, _, skipped, same, k = (state.counts[..., i] for i in range(5))
        counts = [
            jnp.where(go & (count < jnp.iinfo(jnp.int32).max), count + 1, count),
            ~jnp.asarray(enough),
            skipped + (~finite & enough),
            same + (go & identical),
            jnp.where(go, found.k, k),
        ]
        held = state.held
        if found.waiting is not None:
            held = jax.tree.map(lambda g: jnp.where(enough, jnp.zeros_like(g), g), found.waiting)
        return jax.tree.unflatten(blocks.tree, moves), new._replace(counts=numbers(counts, jnp.int32), held=held)

    def _measure(self, state: ScaleBySGDOLState, found: Gradients, norm: Norm, blocks: Blocks) -> _Statistics:
        r"""The statistics of the update.

        Over the devices of a named axis the k gradients are those of all devices, and besides their mean one number
        per block is communicated: :math:`V = \sum_i \|g_i - \bar g\|^2, u = \|\bar g\|^2 - \frac{V}{k(k-1)}`.
        """
        options, mean, k = self._options, found.mean, found.k
        d = norm.sharp(mean)
        own_n = n = blocks.products(mean, d)
        if options.estimator == "paper":
            own_u = blocks.products(mean, norm.sharp(found.others))
        else:
            several = found.others[0].ndim > mean[0].ndim
            squares = blocks.products(found.others, norm.sharp(found.others, several))
            squares = sum_over(found.axes, squares) if found.axes else squares
            own_u = [length - v / (k * (k - 1)) for length, v in zip(n, squares, strict=True)]
        low = blocks.zeros  # by how much products with earlier gradients in the momentum are low
        if options.epoch is not None:
            # Products of two gradients of one epoch are low by a number of which (n - u)/B is an unbiased estimate.
            # Of m_{t-1}, a share of 1 - beta^p, p the updates since the epoch began, is of the same epoch.
            low = [(n_ - u_) / jnp.asarray(options.epoch, u_.dtype) for u_, n_ in zip(own_u, n, strict=True)]
            own_u = [u_ + c for u_, c in zip(own_u, low, strict=True)]
            beta = jnp.asarray(0.0 if options.momentum is None else options.momentum)
            share = 1 - beta ** jnp.mod(state.count, jnp.asarray(options.epoch, state.count.dtype))
            low = [share.astype(c.dtype) * c for c in low]
        u, crosses, trace, weight = own_u, low, [], state.trace_weight
        before = after = jnp.ones((), blocks.dtype)  # the weights that m_{t-1} and m_t are divided by
        if options.momentum is not None:
            beta = jnp.asarray(options.momentum, blocks.dtype)
            if options.bias_correction:
                before = jnp.where(weight > 0, weight, 1.0)
            weight = beta * weight + (1 - beta)
            after = weight if options.bias_correction else after
            past = blocks.join(blocks.tree.flatten_up_to(state.trace))
            # <m_{t-1}, D^-1 gbar_t>, D being symmetric.
            crosses = [cross + c for cross, c in zip(blocks.products(past, d), low, strict=True)]
            trace = [beta.astype(m.dtype) * m + (1 - beta).astype(m.dtype) * g for m, g in zip(past, mean, strict=True)]
            d = norm.sharp(trace)
            if options.statistics == "direction":
                n = [v / after.astype(v.dtype) ** 2 for v in blocks.products(trace, d)]
                u = [
                    surrogate.momentum_signal(cross, own, beta.astype(own.dtype), after.astype(own.dtype))
                    for cross, own in zip(crosses, own_u, strict=True)
                ]
        last = blocks.zeros
        if self._keeps_direction:
            products = blocks.products(mean, blocks.join(blocks.tree.flatten_up_to(state.direction)))
            last = [(v + c) / before.astype(c.dtype) for v, c in zip(products, low, strict=True)]
        elif self._hindsight:
            last = [cross / before.astype(cross.dtype) for cross in crosses]
        return _Statistics(d, after, trace, weight, u, n, own_u, own_n, last)

    def _learn(
        self, state: ScaleBySGDOLState, seen: _Statistics, unit: jax.Array, blocks: Blocks
    ) -> tuple[list[jax.Array], list[jax.Array], list[Any]]:
        """alpha, the multiplier and the learner's state of each block."""
        if blocks.per_coordinate:
            trees = [state.alpha, state.multiplier, *self._kind.flatten_up_to(state.learner)]
            rows = [list(row) for row in zip(*map(blocks.tree.flatten_up_to, trees), strict=True)]
        else:
            rows = [[state.blocks[..., i] for i in range(state.blocks.shape[-1])]]
        alphas, states = [row[0] for row in rows], [jax.tree.unflatten(self._kind, row[2:]) for row in rows]
        after = alphas
        if self._options.alpha is None:
            # kappa times the first non-zero squared gradient, to each block its even share by size.
            length = total(seen.own_n)
            kappa: Any = self._options.kappa
            top = blocks.largest
            kappa = min(kappa, top) if isinstance(kappa, float) else jnp.minimum(kappa, top).astype(length.dtype)
            first = jnp.where(length > 0, jnp.minimum(kappa * length, top), 0.0)
            unset = jnp.max(alphas[0]) == 0 if alphas[0].size else total(alphas) == 0
            after = [
                jnp.where(unset, jnp.broadcast_to((first * share).astype(a.dtype), a.shape), a)
                for a, share in zip(alphas, blocks.shares, strict=True)
            ]
        elif not blocks.holds_squares:
            first = in_unit(self._options.alpha, unit)
            after = alphas = [jnp.where(state.unit > 0, a, first.astype(a.dtype)) for a in alphas]
        multipliers = [self._learner.predict(s, a) for s, a in zip(states, alphas, strict=True)]
        hindsight = [{"last": v} for v in seen.last] if self._hindsight else [{}] * len(states)
        together = zip(states, multipliers, seen.u, seen.n, after, hindsight, strict=True)
        return after, multipliers, [self._learner.observe(s, m, u, n, a, **v) for s, m, u, n, a, v in together]

    def _packed(self, blocks: Blocks, alphas: list[Any], multipliers: list[Any], learned: list[Any]) -> Any:
        """What is learned of each block, as it stands in the state."""
        rows = [
            [alpha, s, *jax.tree.leaves(state)] for alpha, s, state in zip(alphas, multipliers, learned, strict=True)
        ]
        if not blocks.per_coordinate:
            return numbers(rows[0], blocks.dtype)
        alpha, multiplier, *entries = (
            jax.tree.unflatten(blocks.tree, [row[i] for row in rows]) for i in range(2 + self._kind.num_leaves)
        )
        return Learned(alpha, multiplier, jax.tree.unflatten(self._kind, entries))

    def _recorded(
        self, record: jax.Array, blocks: Blocks, seen: _Statistics, multipliers: list[jax.Array], rate: Any, share: Any
    ) -> list[jax.Array]:
        """The record after one more update, in the unit of the optimizer's products.

        Five sums over the updates, weighted by the base rate lr/(1 - beta): of the surrogate losses at the step sizes
        that were played, of u and of n; then moving averages of u and n. Then lr s of the last update; for ``"group"``,
        of each group.
        """
        rate = jnp.asarray(rate, blocks.dtype)
        base = rate / share
        signal, length = base * total(seen.u), base * total(seen.n)
        losses = [surrogate.loss(s, u, n, 1.0) for s, u, n in zip(multipliers, seen.u, seen.n, strict=True)]
        before = [record[..., i] for i in range(5)]
        sums = [a + b for a, b in zip(before, [base * total(losses), signal, length], strict=False)]
        sums += [summary.recent(a, b) for a, b in zip(before[3:], [signal, length], strict=True)]
        s = multipliers[0]
        if blocks.granularity not in ("global", "group"):
            # One number for all: the length of the move over that of the direction, so that what stays does not count.
            lengths = blocks.products(seen.d, seen.d) if blocks.per_coordinate else seen.n
            move = total([s * s * squared for s, squared in zip(multipliers, lengths, strict=True)])
            whole = total(lengths)
            s = jnp.sqrt(jnp.where(whole > 0, move / jnp.where(whole > 0, whole, 1), 1)).astype(blocks.dtype)
        return [*sums, *([rate * s] if s.ndim == 0 else [rate * s[i] for i in range(s.shape[0])])]

    def _moves(
        self,
        factors: list[jax.Array],
        direction: list[jax.Array],
        unit: jax.Array,
        params: Any,
        found: Gradients,
        state: ScaleBySGDOLState,
        blocks: Blocks,
    ) -> list[jax.Array]:
        """S (d + weight_decay x)/(1 - beta) of each leaf, in the type that an update of it has."""
        moves = []
        for i, (d, held) in enumerate(zip(direction, jax.tree.leaves(state.held), strict=True)):
            s = factors[i if blocks.per_coordinate else 0]
            s = s if blocks.granularity in ("global", "coordinate") else s[blocks.block_of[i]]
            d = unit.astype(d.dtype) * d
            if self._options.weight_decay is not None:
                x = as_real(jnp.asarray(jax.tree.leaves(params)[i]))
                d = d + jnp.asarray(self._options.weight_decay).astype(d.dtype) * x
            move, dtype = (s * d).astype(d.dtype), jnp.result_type(found.dtypes[i], held)
            if jnp.issubdtype(dtype, jnp.complexfloating):
                move = jax.lax.complex(move[..., 0], move[..., 1])
            moves.append(move.astype(dtype))
        return moves

    def _refuse_other_shapes(self, states: list[Any], zeros: list[jax.Array]) -> None:
        for state, zero in zip(states, zeros, strict=True):
            shapes = [jnp.shape(entry) for entry in jax.tree.leaves(state)]
            if jax.tree.structure(state) != self._kind or any(shape not in ((), zero.shape) for shape in shapes):
                raise ValueError(
                    "learner.initial(zero) must return arrays of the shape of zero, always in the same structure: for "
                    f"the shape {zero.shape}, {type(self._learner).__name__} returned {jax.tree.structure(state)} with "
                    f"the shapes {shapes}"
                )

    def _refuse_another_configuration(self, state: ScaleBySGDOLState) -> None:
        options, learned = self._options, self._kind.num_leaves
        per_coordinate = isinstance(state.blocks, Learned)
        parts = {
            "momentum": (bool(jax.tree.leaves(state.trace)), options.momentum is not None),
            "record": (state.numbers.shape[-1] > 2, options.record),
            "a metric": (bool(jax.tree.leaves(state.metric)), not self._memory.is_empty),
            "a learner that uses hindsight": (bool(jax.tree.leaves(state.direction)), self._keeps_direction),
            'granularity="coordinate"': (per_coordinate, options.granularity == "coordinate"),
        }
        for name, (has, wanted) in parts.items():
            if has != wanted:
                words = ("without", "with") if wanted else ("with", "without")
                raise ValueError(
                    f"state was made {words[0]} {name} and this optimizer is {words[1]}: make a new state by its "
                    "init(params)"
                )
        if not per_coordinate and state.blocks.shape[-1] != 2 + learned:
            raise ValueError(
                f"state was made with another learner: it has {state.blocks.shape[-1] - 2} numbers, and "
                f"{type(self._learner).__name__} has {learned}: make a new state by init(params)"
            )
