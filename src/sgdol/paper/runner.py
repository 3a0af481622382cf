r"""Run methods on problems, compiled: ``lax.scan`` over time, ``vmap`` over lanes (repeats, or rates to be tuned).

Time is cut into chunks. The randomness of a whole chunk is drawn at once, from a stream of its own for every repeat
and for each of the gradients of an iteration; one call of a compiled program scans over the chunk's steps and hands
back what is to be recorded. So a run of any length is one small program, and the path of a short run is the beginning
of that of a long one, whatever the number of repeats.

What is recorded, at log-spaced iterations t, is the running mean :math:`\frac1t \sum_{s \le t} \|\nabla f(x_s)\|^2` of
*true* gradients, which is :math:`E\|\nabla f(x_k)\|^2` over the uniformly random output of Algorithm 1, with the
squared gradient, the objective and the step size at t itself; all at :math:`x_t`, before update t.

Where a true gradient is cheap (Rosenbrock) or is what the method uses anyway (no noise), the running mean is exact. On
the adult data a full gradient costs as much as a hundred minibatch ones, so there it is estimated: the iterations up to
t are cut into strata, short ones first, and one iteration drawn uniformly from each stratum stands for all of it. The
estimate is unbiased, its cost is :attr:`Trace.evaluations` full gradients per repeat, and its standard error is
:attr:`Trace.sampling_error`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sgdol.paper.methods import Method
from sgdol.paper.problems import Noise, Problem

__all__ = [
    "DIVERGENCE",
    "Lanes",
    "Strata",
    "Trace",
    "evaluate",
    "record_iterations",
    "run_noiseless",
    "run_noisy",
    "strata",
]

DIVERGENCE = 1e10
"""A run has diverged once a coordinate of an iterate is beyond this, or is no number any more.

It has also diverged if it ends with an objective above the problem's ceiling."""

STEPS = 1000
"""The length of a chunk of a noisy run."""

EVALUATIONS = 256
"""How many points (all lanes of some iterations) one evaluation of true gradients takes at least."""

Array = NDArray[np.float64]
Progress = Callable[[int], None]
"""Called with the number of iterations done since the last call."""


class Lanes(NamedTuple):
    """A method and the hyperparameters of each of its lanes."""

    method: Method
    hyperparameters: Mapping[str, Array]
    """Arrays of one shape (lanes,)."""

    @property
    def size(self) -> int:
        """How many lanes there are."""
        return len(next(iter(self.hyperparameters.values())))


class Trace(NamedTuple):
    """What a run recorded; arrays of shape (lanes, recorded iterations) unless said otherwise."""

    iteration: NDArray[np.int64]
    """Shape (recorded,), from 1 to the horizon."""
    mean_squared_gradient: Array
    squared_gradient: Array
    objective: Array
    step_size: Array
    sampling_error: Array
    """The standard error of the running mean as an estimate of the exact one; 0 where it is exact."""
    diverged: NDArray[np.bool_]
    """Shape (lanes,)."""
    evaluations: int
    """How many true gradients per lane were computed only to record them."""


def record_iterations(horizon: int, per_decade: int = 30) -> NDArray[np.int64]:
    """Log-spaced iterations from 1 to the horizon inclusive.

    >>> record_iterations(1000, per_decade=3).tolist()
    [1, 2, 5, 10, 22, 46, 100, 215, 464, 1000]
    """
    count = max(2, math.ceil(per_decade * math.log10(horizon)) + 1) if horizon > 1 else 1
    return np.unique(np.rint(np.geomspace(1, horizon, count)).astype(np.int64))


class Strata(NamedTuple):
    """The iterations at which true gradients are evaluated to estimate the running mean."""

    position: NDArray[np.int64]
    """The iteration that stands for each stratum."""
    size: NDArray[np.int64]
    """How many iterations each stratum has."""
    ends: NDArray[np.int64]
    """For each recorded iteration, how many strata end at or before it."""


def strata(
    recorded: NDArray[np.int64], rng: np.random.Generator, fraction: float = 1 / 200, longest: int = 40
) -> Strata:
    """Cut 1, ..., T into strata of at most ``fraction`` of t and at most ``longest``, and draw a position in each.

    >>> strata(np.array([1, 2, 10]), np.random.default_rng(0)).size.sum()
    np.int64(10)
    """
    sizes: list[NDArray[np.int64]] = []
    ends = []
    total = 0
    previous = 0
    for end in recorded.tolist():
        width = min(max(1, int(end * fraction)), longest)
        number = math.ceil((end - previous) / width)
        edges = np.rint(np.linspace(previous, end, number + 1)).astype(np.int64)
        sizes.append(np.diff(edges))
        total += number
        ends.append(total)
        previous = end
    size = np.concatenate(sizes)
    first = np.cumsum(size) - size + 1
    return Strata(first + rng.integers(0, size), size, np.array(ends))


def seed_of(seed: int, *names: str) -> int:
    """A number of 63 bits from the seed and the names of a run, so that runs do not depend on their order.

    >>> seed_of(0, "adult", "batch=1", "SGD") == seed_of(0, "adult", "batch=1", "Adam")
    False
    """
    digest = hashlib.sha256("\x1f".join([str(seed), *names]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _double_precision() -> AbstractContextManager[Any]:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return importlib.import_module("jax.experimental").enable_x64()  # where it was before


def evaluate(problem: Problem, x: Any) -> tuple[Array, Array]:
    """The objective and the gradient of a problem at each row of ``x``, in double precision.

    >>> from sgdol.paper.problems import Rosenbrock
    >>> evaluate(Rosenbrock(), [[0.0, 0.0]])
    (array([1.]), array([[-2.,  0.]]))
    """
    with _double_precision():
        objective, gradient = problem.objective_and_gradient(problem.data, jnp.asarray(x, float))
        return np.array(objective), np.array(gradient) + 0.0


# --------------------------------------------------------------------------------------------------- without noise


def run_noiseless(
    problem: Problem, group: Sequence[Lanes], horizon: int, progress: Progress | None = None
) -> list[Trace]:
    """Run several methods, each with several lanes, in one program that computes all their gradients together.

    A full gradient is a product with a matrix, which is far faster for many points at once.

    Args:
        problem: the problem; its true gradients are used.
        group: the methods and their lanes.
        horizon: T.
        progress: called as iterations are done.
    """
    with _double_precision():
        chunk = _noiseless_program(problem, tuple(lanes.method for lanes in group))
        data = jax.device_put(problem.data)
        hyperparameters = [{k: jnp.asarray(v) for k, v in lanes.hyperparameters.items()} for lanes in group]
        x = tuple(_first_points(problem, lanes) for lanes in group)
        states = tuple(
            _initial(lanes.method)(h, points) for lanes, h, points in zip(group, hyperparameters, x, strict=True)
        )
        recorders = [_ExactRecorder(lanes.size, horizon) for lanes in group]
        for steps in _chunks(horizon, problem.chunk):
            x, states, outputs = chunk(data, hyperparameters, x, states)
            for recorder, output in zip(recorders, outputs, strict=True):
                recorder.add(*(np.asarray(part)[:steps] for part in output))
            if progress:
                progress(steps)
        return [_judged(recorder.trace(), problem) for recorder in recorders]


@functools.lru_cache(maxsize=4)
def _noiseless_program(problem: Problem, group: tuple[Method, ...]) -> Any:
    def chunk(data: Any, hyperparameters: Any, x: Any, states: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            points, inner = carry
            together = jnp.concatenate(points)
            objective, gradient = problem.objective_and_gradient(data, together)
            after, outputs, first = [], [], 0
            for method, h, state, point in zip(group, hyperparameters, inner, points, strict=True):
                last = first + len(point)
                g, f = gradient[first:last], objective[first:last]
                pair = jnp.broadcast_to(g[:, None], (len(point), method.gradients, g.shape[1]))
                moved, state, eta = jax.vmap(method.step)(h, state, point, pair)
                after.append((moved, state))
                outputs.append((jnp.sum(g * g, axis=1), f, eta, _out_of_bounds(point)))
                first = last
            return tuple(zip(*after, strict=True)), outputs

        (x, states), outputs = jax.lax.scan(step, (x, states), None, length=problem.chunk)
        return x, states, outputs

    return jax.jit(chunk)


# ------------------------------------------------------------------------------------------------------ with noise


def run_noisy(
    problem: Problem,
    lanes: Lanes,
    noise: Noise,
    horizon: int,
    *,
    seed: int,
    progress: Progress | None = None,
) -> Trace:
    """Run one method with noise; lane i is repeat i.

    Args:
        problem: the problem.
        lanes: the method, and its hyperparameters for each repeat.
        noise: which noise.
        horizon: T.
        seed: with the names of the problem, the noise and the method, it determines all randomness.
        progress: called as iterations are done.
    """
    own_seed = seed_of(seed, problem.name, noise.name, lanes.method.name)
    with _double_precision():
        chunk = _noisy_program(problem, lanes.method)
        at = _evaluator(problem)
        data = jax.device_put(problem.data)
        hyperparameters = {k: jnp.asarray(v) for k, v in lanes.hyperparameters.items()}
        streams = _streams(own_seed, lanes)
        x = _first_points(problem, lanes)
        state = _initial(lanes.method)(hyperparameters, x)
        recorder: _Recorder = (
            _EveryIteration(functools.partial(at, data), lanes.size, horizon)
            if problem.cheap
            else _OneOfEachStratum(functools.partial(at, data), lanes.size, horizon, np.random.default_rng(own_seed))
        )
        for steps in _chunks(horizon, STEPS):
            samples = np.stack([np.stack([problem.draw(s, STEPS, noise) for s in lane], 1) for lane in streams], 1)
            x, state, path, eta = chunk(data, hyperparameters, x, state, samples)
            recorder.add_path(np.asarray(path), np.asarray(eta), steps)
            if progress:
                progress(steps)
        return _judged(recorder.trace(), problem)


def _first_points(problem: Problem, lanes: Lanes) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(problem.x1), (lanes.size, len(problem.x1)))


@functools.lru_cache(maxsize=64)
def _initial(method: Method) -> Any:
    return jax.jit(jax.vmap(method.initial))


def _streams(seed: int, lanes: Lanes) -> list[list[np.random.Generator]]:
    """A stream for each lane and each gradient of an iteration; a lane's own do not depend on how many there are."""

    def stream(lane: int, which: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, lane, which])))

    return [[stream(lane, which) for which in range(lanes.method.gradients)] for lane in range(lanes.size)]


@functools.lru_cache(maxsize=64)
def _noisy_program(problem: Problem, method: Method) -> Any:
    """The steps of a chunk, from samples (steps, lanes, gradients, ...): the iterate before each, the step size."""
    k = method.gradients

    def chunk(data: Any, hyperparameters: Any, x: Any, state: Any, samples: Any) -> Any:
        lanes, dimension = x.shape

        def step(carry: Any, sample: jax.Array) -> Any:
            point, inner = carry
            each = jnp.broadcast_to(point[:, None], (lanes, k, dimension)).reshape(lanes * k, dimension)
            flat = sample.reshape(lanes * k, *sample.shape[2:])
            gradients = problem.stochastic_gradient(data, each, flat).reshape(lanes, k, dimension)
            moved, inner, eta = jax.vmap(method.step)(hyperparameters, inner, point, gradients)
            return (moved, inner), (point, eta)

        (x, state), (path, eta) = jax.lax.scan(step, (x, state), samples)
        return x, state, path, eta

    return jax.jit(chunk)


@functools.lru_cache(maxsize=8)
def _evaluator(problem: Problem) -> Any:
    """The true squared gradient norm, the objective and whether it has diverged, at each of many points."""

    def evaluate(data: Any, points: jax.Array) -> Any:
        objective, gradient = problem.objective_and_gradient(data, points)
        return jnp.sum(gradient * gradient, axis=1), objective, _out_of_bounds(points)

    return jax.jit(evaluate)


# ------------------------------------------------------------------------------------------------------- recording


def _out_of_bounds(x: jax.Array) -> jax.Array:
    return ~jnp.all(jnp.abs(x) <= DIVERGENCE, axis=-1)


def _judged(trace: Trace, problem: Problem) -> Trace:
    return trace._replace(diverged=trace.diverged | (trace.objective[:, -1] > problem.ceiling))


def _chunks(horizon: int, length: int) -> Iterator[int]:
    for start in range(0, horizon, length):
        yield min(length, horizon - start)


class _Recorder(Protocol):
    """What becomes of the iterates of a noisy run."""

    def add_path(self, path: Array, eta: Array, steps: int) -> None:
        """The first ``steps`` of a chunk's iterates (steps, lanes, dimension) and step sizes (steps, lanes)."""

    def trace(self) -> Trace:
        """What was recorded, lanes first."""
        ...


class _ExactRecorder:
    """The running mean from the squared gradient of every iteration."""

    def __init__(self, lanes: int, horizon: int) -> None:
        self.iteration = record_iterations(horizon)
        self.done = 0
        self.total = np.zeros(lanes)
        self.diverged = np.zeros(lanes, dtype=bool)
        self.columns: list[list[Array]] = [[], [], [], []]

    def add(self, squared: Array, objective: Array, eta: Array, outside: NDArray[np.bool_]) -> None:
        """One chunk, of shape (steps, lanes)."""
        steps = len(squared)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = self.total + np.cumsum(squared, axis=0)
        self.total = sums[-1]
        self.diverged |= outside.any(axis=0) | ~np.isfinite(squared).all(axis=0)
        here = self.iteration[(self.iteration > self.done) & (self.iteration <= self.done + steps)]
        index = here - self.done - 1
        for column, values in zip(
            self.columns, (sums[index] / here[:, None], squared[index], objective[index], eta[index]), strict=True
        ):
            column.append(values)
        self.done += steps

    def trace(self) -> Trace:
        """Everything recorded so far, lanes first."""
        mean, squared, objective, eta = (np.ascontiguousarray(np.concatenate(c).T) for c in self.columns)
        return Trace(self.iteration, mean, squared, objective, eta, np.zeros_like(mean), self.diverged, 0)


class _EveryIteration(_ExactRecorder):
    """The running mean from true gradients that are evaluated at every iterate."""

    def __init__(self, evaluate: Callable[..., Any], lanes: int, horizon: int) -> None:
        super().__init__(lanes, horizon)
        self.evaluate = evaluate

    def add_path(self, path: Array, eta: Array, steps: int) -> None:
        """All of the chunk is evaluated, so that the program has one shape."""
        parts = self.evaluate(path.reshape(-1, path.shape[-1]))
        squared, objective, outside = (np.asarray(part).reshape(eta.shape)[:steps] for part in parts)
        self.add(squared, objective, eta[:steps], outside)


class _OneOfEachStratum:
    """The running mean from one iteration of each stratum, by evaluating the true gradient at saved iterates."""

    def __init__(self, evaluate: Callable[..., Any], lanes: int, horizon: int, rng: np.random.Generator) -> None:
        self.iteration = record_iterations(horizon)
        self.strata = strata(self.iteration, rng)
        self.needed = np.union1d(self.strata.position, self.iteration)
        self.evaluate = evaluate
        self.together = -(-EVALUATIONS // lanes)
        self.lanes = lanes
        self.done = 0
        self.waiting: list[Array] = []
        self.squared: list[Array] = []
        self.objective: list[Array] = []
        self.eta: list[Array] = []
        self.diverged = np.zeros(lanes, dtype=bool)

    def add_path(self, path: Array, eta: Array, steps: int) -> None:
        """Keep the iterates that are needed, and evaluate them once there are enough."""
        path = path[:steps]
        here = self.needed[(self.needed > self.done) & (self.needed <= self.done + steps)]
        self.waiting.extend(path[here - self.done - 1])
        with np.errstate(invalid="ignore"):
            self.diverged |= ~(np.abs(path) <= DIVERGENCE).all(axis=(0, 2))
        recorded = self.iteration[(self.iteration > self.done) & (self.iteration <= self.done + steps)]
        self.eta.append(eta[recorded - self.done - 1])
        self.done += steps
        while len(self.waiting) >= self.together:
            self._evaluate(self.together)

    def _evaluate(self, count: int) -> None:
        points = np.stack(self.waiting[:count])
        del self.waiting[:count]
        padded = np.zeros((self.together, *points.shape[1:]))
        padded[:count] = points
        squared, objective, _ = self.evaluate(padded.reshape(-1, points.shape[-1]))
        self.squared.append(np.asarray(squared).reshape(self.together, self.lanes)[:count])
        self.objective.append(np.asarray(objective).reshape(self.together, self.lanes)[:count])

    def trace(self) -> Trace:
        """The estimates at the recorded iterations, lanes first."""
        if self.waiting:
            self._evaluate(len(self.waiting))
        squared, objective = np.concatenate(self.squared), np.concatenate(self.objective)
        sampled = squared[np.searchsorted(self.needed, self.strata.position)]
        size = self.strata.size[:, None]
        until, t = self.strata.ends - 1, self.iteration[:, None]
        with np.errstate(invalid="ignore", over="ignore"):
            mean = np.cumsum(size * sampled, axis=0)[until] / t
            # Half the squared difference of neighbours estimates the variance within a stratum (and a little too much).
            variance = np.where(size > 1, np.diff(sampled, axis=0, prepend=sampled[:1]) ** 2 / 2, 0.0)
            error = np.sqrt(np.cumsum(size**2 * variance, axis=0)[until]) / t
        at = np.searchsorted(self.needed, self.iteration)
        eta = np.concatenate(self.eta)
        columns = (mean, squared[at], objective[at], eta, error)
        mean, now, value, eta, error = (np.ascontiguousarray(column.T) for column in columns)
        return Trace(self.iteration, mean, now, value, eta, error, self.diverged, len(self.needed))
