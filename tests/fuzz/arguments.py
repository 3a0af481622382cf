"""Bad arguments for both front ends: each gets a sentence that names the argument, at construction.

    python -m tests.fuzz.arguments

Every option is given every one of a list of odd values, some of which are right. What is wrong must raise a TypeError
or a ValueError that names the option; what is right must train without a number that is not finite. Exit code 1
otherwise.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from sgdol import SGDOL, SGDOLFree
from sgdol.jax import sgdol, sgdol_free

HUGE = 1e308
ODD: list[Any] = [
    *(-1, 0, 1, 2, 0.5, -0.5, 1e-300, HUGE, math.nan, math.inf, -math.inf, 10**400, -(10**400), True, False, None),
    *("", "rms", "direction", "global", "nonsense", b"0.5", 1j, 0.5 + 0j, Fraction(1, 2), Fraction(-1, 3), [], [0.5]),
    *({}, (), (0.5,), {0.5}, object(), SGDOL, lambda: 0.5),
    *(np.float32(0.5), np.float64(-1), np.int64(2), np.bool_(True)),
    *(np.array(0.5), np.array([0.5]), np.array([0.5, 0.5]), np.array([]), np.complex64(1), torch.tensor(0.5)),
    *(torch.tensor([0.5]), torch.tensor([]), torch.tensor([0.5, 0.5]), torch.tensor(-1.0), torch.tensor(math.nan)),
    *(jnp.array(0.5), jnp.array(-1.0), jnp.array([0.5, 0.5]), jnp.array(math.inf)),
]

TORCH = (
    *("lr", "smoothness", "alpha", "kappa", "estimator", "granularity", "momentum", "bias_correction", "statistics"),
    *("epoch", "weight_decay", "averaging", "learner", "metric", "maximize", "foreach"),
)
OPTAX = (
    *("learning_rate", "smoothness", "alpha", "kappa", "estimator", "granularity", "momentum", "bias_correction"),
    *("statistics", "epoch", "weight_decay", "averaging", "learner", "metric", "axis_name", "record"),
)
FREE = ("momentum", "weight_decay", "averaging", "metric", "maximize", "foreach")
FREE_OPTAX = ("momentum", "weight_decay", "averaging", "metric")


def _trained(make: Callable[..., Any], **options: Any) -> bool:
    """Whether three steps of two noisy passes end in finite numbers."""
    x = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt = make([x], **options)
    for _ in range(3):
        noise = torch.randn(2, 3, dtype=torch.float64)

        def closure(noise: torch.Tensor = noise) -> torch.Tensor:
            opt.zero_grad()
            losses = [(x * x / 2 + 0.1 * x * e).sum() / 2 for e in noise]
            for loss in losses:
                loss.backward()
            return losses[0] + losses[1]

        opt.step(closure)
    return bool(torch.isfinite(x).all())


def _torch(option: str, value: Any) -> bool:
    rate = {} if option in ("lr", "smoothness") and value is not None else {"lr": 0.1}
    return _trained(SGDOL, **{**rate, option: value})


def _torch_free(option: str, value: Any) -> bool:
    return _trained(SGDOLFree, **{option: value})


def _optax(option: str, value: Any) -> bool:
    rate = {} if option in ("learning_rate", "smoothness") and value is not None else {"learning_rate": 0.1}
    optimizer = sgdol(**{**rate, option: value})
    x = jnp.ones(3)
    if option == "axis_name" and value is not None:
        return True  # a name of devices that are not here: only its kind is checked
    state = optimizer.init(x)
    for seed in range(2):
        updates, state = optimizer.update(jax.random.normal(jax.random.key(seed), (2, 3)), state, x)
        x = x + updates
    return bool(jnp.isfinite(x).all())


def _optax_free(option: str, value: Any) -> bool:
    optimizer = sgdol_free(**{option: value})
    optimizer.init(jnp.ones(3))
    return True


def attack(name: str, build: Callable[[str, Any], bool], options: tuple[str, ...]) -> list[str]:
    """What went wrong, a line each."""
    wrong = []
    for option in options:
        for value in ODD:
            if (option == "weight_decay" and value is HUGE) or (option == "learning_rate" and callable(value)):
                continue  # as large as asked for, and a schedule
            shown = "10**400" if isinstance(value, int) and abs(value) > 1e300 else repr(value)
            try:
                if not build(option, value):
                    wrong.append(f"{name}({option}={shown}) trained to a number that is not finite")
            except (TypeError, ValueError) as error:
                if option not in str(error):
                    wrong.append(f"{name}({option}={shown}): the sentence does not name it: {error}")
            except Exception as error:
                wrong.append(f"{name}({option}={shown}): {type(error).__name__}: {error}")
    return wrong


FRONT_ENDS: dict[str, tuple[Callable[[str, Any], bool], tuple[str, ...]]] = {
    "SGDOL": (_torch, TORCH),
    "SGDOLFree": (_torch_free, FREE),
    "sgdol": (_optax, OPTAX),
    "sgdol_free": (_optax_free, FREE_OPTAX),
}


def main() -> int:
    """Attack all of them."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wrong = [line for name, (build, options) in FRONT_ENDS.items() for line in attack(name, build, options)]
    print(*wrong, sep="\n")
    count = sum(len(options) * len(ODD) for _, options in FRONT_ENDS.values())
    print(f"{count} arguments, {len(wrong)} without a right number or a sentence that names them")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
