"""How much program an optax update is: functions entered when it is traced, time to compile, time of a compiled step.

``OMP_NUM_THREADS=1 python -m benchmarks.calls_jax`` prints two tables for a network 64-64-10 and a batch of 64:
``sgdol`` beside ``optax.sgd`` with momentum, and ``sgdol_free`` beside ``optax.adamw`` on the mean of the same two
microbatches, in several metrics. All times are CPU time. Steps are interleaved; a ratio is the median of the rounds'
ratios, with the quartiles. A step is measured twice, without and with donation of the parameters and the state
(``donate_argnums=(0, 1)``): what is not donated is copied, in ``sgdol`` also the room for a held gradient.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sgdol
from sgdol.jax import microbatch_grads, sgdol_free
from sgdol.jax import sgdol as sgdol_of_optax

ROUNDS, STEPS = 30, 100

Step = Callable[..., Any]


def functions_entered(function: Callable[..., Any], *arguments: Any) -> set[tuple[str, str]]:
    """File and name of every function of this library that tracing enters; comprehensions and lambdas do not count."""
    root = str(Path(sgdol.__file__).parent)
    entered = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            entered.add((code.co_filename[len(root) + 1 :], code.co_qualname))

    sys.setprofile(note)
    try:
        jax.make_jaxpr(function)(*arguments)
    finally:
        sys.setprofile(None)
    return entered


def compile_seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """CPU time from the function to a program, without jax's cache."""
    began = time.process_time()
    jax.jit(function).lower(*arguments).compile()
    return time.process_time() - began


def loss(params: list[dict[str, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def network(sizes: list[int]) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return [
        {"w": jax.random.normal(key, (a, b)) / a**0.5, "b": jnp.zeros(b)}
        for key, a, b in zip(keys, sizes[:-1], sizes[1:], strict=False)
    ]


def plain(optimizer: Any) -> Step:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    return step


def mean_of_halves(optimizer: Any) -> Step:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        halves = microbatch_grads(loss, 2)(params, x, y)
        updates, state = optimizer.update(jax.tree.map(lambda g: (g[0] + g[1]) / 2, halves), state, params)
        return optax.apply_updates(params, updates), state

    return step


def halves(optimizer: Any) -> Step:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        updates, state = optimizer.update(microbatch_grads(loss, 2)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    return step


def free(optimizer: Any) -> Step:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def evaluate(params: Any) -> Any:
            return microbatch_grads(loss, 2, value=True)(params, x, y)

        value, grads = evaluate(params)
        updates, state = optimizer.update(grads, state, params, value=value, value_and_grads=evaluate)
        return optax.apply_updates(params, updates), state

    return step


SGD, ADAMW = "optax.sgd, momentum", "optax.adamw"
OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], Step], str]] = {
    SGD: (optax.sgd(0.1, 0.9), plain, SGD),
    "sgdol": (sgdol_of_optax(0.1), halves, SGD),
    "sgdol, rms": (sgdol_of_optax(0.1, metric="rms"), halves, SGD),
    "sgdol, kronecker": (sgdol_of_optax(0.1, metric="kronecker"), halves, SGD),
    ADAMW: (optax.adamw(1e-3), mean_of_halves, ADAMW),
    "sgdol_free, rms": (sgdol_free(metric="rms"), free, ADAMW),
    "sgdol_free, kronecker": (sgdol_free(), free, ADAMW),
}
"""Optimizer, step, and what it is compared with."""


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    params = network([64, 64, 10])
    x, y = jax.random.normal(jax.random.key(1), (64, 64)), jnp.arange(64) % 10
    programs = {}
    print("| | functions | files | leaves of the state | seconds to compile |\n|---|---:|---:|---:|---:|")
    for name, (optimizer, make, _) in OPTIMIZERS.items():
        arguments = (params, optimizer.init(params), x, y)
        step = make(optimizer)
        entered = functions_entered(step, *arguments)
        leaves, files = len(jax.tree.leaves(arguments[1])), len({file for file, _ in entered})
        print(f"| {name} | {len(entered)} | {files} | {leaves} | {compile_seconds(step, *arguments):.2f} |")
        for donated in ((), (0, 1)):
            programs[name, donated] = (jax.jit(step, donate_argnums=donated), arguments)
    times: dict[Any, list[float]] = {key: [] for key in programs}
    for turn in range(2 + ROUNDS):  # the first compiles, the second warms up
        for key, (program, (p, state, *batch)) in programs.items():
            p, state = jax.tree.map(jnp.array, (p, state))
            began = time.process_time()
            for _ in range(STEPS):
                p, state = program(p, state, *batch)
            jax.block_until_ready(p)
            if turn >= 2:
                times[key].append((time.process_time() - began) / STEPS)
    print("\n| | microseconds | ratio | quartiles | donated | ratio | quartiles | over |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for name, (_, _, baseline) in OPTIMIZERS.items():
        cells = []
        for donated in ((), (0, 1)):
            ratios = [a / b for a, b in zip(times[name, donated], times[baseline, donated], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            micros = 1e6 * statistics.median(times[name, donated])
            cells += [f"{micros:.0f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        print(f"| {name} | {' | '.join(cells)} | {baseline} |")


if __name__ == "__main__":
    main()
