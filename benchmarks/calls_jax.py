"""How much program an optax update is: functions entered when it is traced, time to compile, time of a compiled step.

``python -m benchmarks.calls_jax`` prints two tables for a network 64-64-10: ``optax.sgd`` with momentum, ``sgdol`` and
``sgdol_free`` in several metrics. Compiling is CPU time; steps are interleaved, and the fastest of 30 rounds counts. A
step is measured twice, without and with donation of the parameters and the state (``donate_argnums=(0, 1)``); what is
not donated is copied, in ``sgdol`` also the room for a held gradient.
"""

from __future__ import annotations

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


OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], Step]]] = {
    "optax.sgd, momentum": (optax.sgd(0.1, 0.9), plain),
    "sgdol": (sgdol_of_optax(0.1), halves),
    "sgdol, rms": (sgdol_of_optax(0.1, metric="rms"), halves),
    "sgdol, kronecker": (sgdol_of_optax(0.1, metric="kronecker"), halves),
    "sgdol_free, rms": (sgdol_free(metric="rms"), free),
    "sgdol_free, kronecker": (sgdol_free(), free),
}


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    params = network([64, 64, 10])
    x, y = jax.random.normal(jax.random.key(1), (64, 64)), jnp.arange(64) % 10
    programs, best = {}, {}
    print(f"{'':24}functions  files  seconds to compile")
    for name, (optimizer, make) in OPTIMIZERS.items():
        arguments = (params, optimizer.init(params), x, y)
        step = make(optimizer)
        entered = functions_entered(step, *arguments)
        seconds = compile_seconds(step, *arguments)
        print(f"{name:24}{len(entered):9}  {len({file for file, _ in entered}):5}  {seconds:18.2f}")
        for donated in ((), (0, 1)):
            programs[name, donated] = (jax.jit(step, donate_argnums=donated), arguments)
            best[name, donated] = float("inf")
    for _ in range(1 + ROUNDS):  # the first compiles
        for key, (program, (p, state, *batch)) in programs.items():
            p, state = jax.tree.map(jnp.array, (p, state))
            began = time.perf_counter()
            for _ in range(STEPS):
                p, state = program(p, state, *batch)
            jax.block_until_ready(p)
            best[key] = min(best[key], (time.perf_counter() - began) / STEPS)
    print(f"\n{'':24}microseconds a step  over optax.sgd  donated  over optax.sgd, donated")
    plain_least, donated_least = (best["optax.sgd, momentum", donated] for donated in ((), (0, 1)))
    for name in OPTIMIZERS:
        plain, given = best[name, ()], best[name, (0, 1)]
        print(
            f"{name:24}{1e6 * plain:19.0f}  {plain / plain_least:14.2f}  {1e6 * given:7.0f}  "
            f"{given / donated_least:23.2f}"
        )


if __name__ == "__main__":
    main()
