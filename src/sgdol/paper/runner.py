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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sgdol.paper.methods import Method
from sgdol.paper.problems import Noise, Problem
from sgdol.paper.recording import DIVERGENCE, EveryIteration, Exact, OneOfEachStratum, Recorder, Trace

__all__ = ["STEPS", "Lanes", "evaluate", "run_noiseless", "run_noisy", "seed_of"]

STEPS = 1000
"""The length of a chunk of a noisy run."""

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


def seed_of(seed: int, *names: str) -> int:
    """A number of 63 bits from the seed and the names of a run, so that runs do not depend on their order.

    >>> seed_of(0, "adult", "batch=1", "SGD") == seed_of(0, "adult", "batch=1", "Adam")
    False
    """
    digest = hashlib.sha256("\x1f".join([str(seed), *names]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _double_precision() -> AbstractContextManager[Any]:
    return jax.enable_x64(True)


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
        recorders = [Exact(lanes.size, horizon) for lanes in group]
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
        recorder: Recorder = (
            EveryIteration(functools.partial(at, data), lanes.size, horizon)
            if problem.cheap
            else OneOfEachStratum(functools.partial(at, data), lanes.size, horizon, np.random.default_rng(own_seed))
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


def _out_of_bounds(x: jax.Array) -> jax.Array:
    return ~jnp.all(jnp.abs(x) <= DIVERGENCE, axis=-1)


def _judged(trace: Trace, problem: Problem) -> Trace:
    return trace._replace(diverged=trace.diverged | (trace.objective[:, -1] > problem.ceiling))


def _chunks(horizon: int, length: int) -> Iterator[int]:
    for start in range(0, horizon, length):
        yield min(length, horizon - start)
