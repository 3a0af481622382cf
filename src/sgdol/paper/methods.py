r"""The eleven methods of the paper's experiments, as optax transformations.

Seven come from optax with its or PyTorch's usual constants; AdaGrad Global, Hypergradient and SGDOL (this library's own
front end) are not there. SGD GL is SGD with the step size of Ghadimi and Lan (2013). A :class:`Method` builds its
transformation from its hyperparameters, which may be traced arrays: that is how a compiled program runs one method
with many rates at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from sgdol import PAPER
from sgdol.jax import ScaleBySGDOLState, sgdol

__all__ = [
    "ADAGRAD_FORMS",
    "METHODS",
    "AdaGradForm",
    "AdaGradGlobalState",
    "HypergradientState",
    "Method",
    "adagrad_global",
    "ghadimi_lan_step_size",
    "hypergradient",
    "methods",
]

Hyperparameters = Mapping[str, Any]
AdaGradForm = Literal["current", "delayed"]
ADAGRAD_FORMS: tuple[str, ...] = get_args(AdaGradForm)


@dataclass(frozen=True)
class Method:
    """One method: how it is built, what is tuned and what its step size is."""

    name: str
    transform: Callable[..., optax.GradientTransformationExtraArgs]
    """From the hyperparameters, by keyword."""
    tuned: tuple[str, ...] = ("learning_rate",)
    """The hyperparameters that tuning chooses; the first is the rate."""
    gradients: int = 1
    """How many stochastic gradients an iteration takes."""
    known: tuple[str, ...] = ()
    """What a method that is not tuned is told: some of smoothness, alpha, gap, total_variance and horizon."""
    from_known: Callable[..., dict[str, float]] = dict
    """Its hyperparameters from that, by keyword."""
    step_size_of: Callable[[Hyperparameters, Any], jax.Array] | None = None
    """eta_t, from the hyperparameters and the state after update t; None if the method has no step size."""

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return self.name.lower().replace(" ", "-")

    def initial(self, hyperparameters: Hyperparameters, x: jax.Array) -> Any:
        """The optimizer's state at the first point."""
        return self.transform(**hyperparameters).init(x)

    def step(
        self, hyperparameters: Hyperparameters, state: Any, x: jax.Array, gradients: jax.Array
    ) -> tuple[jax.Array, Any, jax.Array]:
        """The next point, the next state and the step size, from the iteration's stacked gradients."""
        others = {"others": gradients[1]} if self.gradients == 2 else {}
        transform = optax.with_extra_args_support(self.transform(**hyperparameters))
        updates, state = transform.update(gradients[0], state, x, **others)
        eta = jnp.nan if self.step_size_of is None else self.step_size_of(hyperparameters, state)
        return x + updates, state, jnp.asarray(eta, x.dtype)


class AdaGradGlobalState(NamedTuple):
    """The sum of the squared gradient norms, and the step size of the last update."""

    sum_of_squares: jax.Array
    step_size: jax.Array


def adagrad_global(
    learning_rate: float | jax.Array, *, eps: float = 1e-10, form: AdaGradForm = "current", initial: float | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""AdaGrad with one step size for all coordinates (AdaGrad-Norm).

    .. math:: \eta_t = \frac{\mathrm{lr}}{\sqrt{b_0^2 + \sum_{s \le t} \|g_s\|^2} + \epsilon}

    Args:
        learning_rate: lr.
        eps: epsilon.
        form: ``"current"``: the sum includes g_t, as everyone runs it; ``"delayed"``: it ends at g_{t-1}, so that the
            step size is independent of g_t, as Li and Orabona (2019) analyse it.
        initial: b_0^2; None for 0, or 1 in the delayed form, which has no first step size without it.

    >>> optimizer = adagrad_global(1.0)
    >>> updates, state = optimizer.update(jnp.array([3.0, 4.0]), optimizer.init(jnp.zeros(2)))
    >>> [round(float(u), 6) for u in updates]
    [-0.6, -0.8]
    """
    if form not in ADAGRAD_FORMS:
        raise ValueError(f"form must be 'current' or 'delayed', got {form!r}")
    start = (1.0 if form == "delayed" else 0.0) if initial is None else initial

    def init(params: Any) -> AdaGradGlobalState:
        dtype = jnp.result_type(*jax.tree.leaves(params))
        return AdaGradGlobalState(jnp.full((), start, dtype), jnp.full((), jnp.nan, dtype))

    def update(updates: Any, state: AdaGradGlobalState, params: Any = None) -> tuple[Any, AdaGradGlobalState]:
        del params
        total = state.sum_of_squares + optax.tree.norm(updates, squared=True)
        step_size = learning_rate / (jnp.sqrt(total if form == "current" else state.sum_of_squares) + eps)
        return jax.tree.map(lambda g: -step_size * g, updates), AdaGradGlobalState(total, step_size)

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


class HypergradientState(NamedTuple):
    """The current rate and the last gradient."""

    step_size: jax.Array
    previous: Any


def hypergradient(learning_rate: float | jax.Array, beta: float | jax.Array) -> optax.GradientTransformationExtraArgs:
    r"""SGD with hypergradient descent, additive rule (SGD-HD of Baydin et al. 2018).

    .. math:: \eta_t = \eta_{t-1} + \beta \langle g_t, g_{t-1}\rangle, \qquad x_{t+1} = x_t - \eta_t g_t

    Args:
        learning_rate: eta_0, which the first update uses.
        beta: the rate of the rate.

    >>> optimizer = hypergradient(0.5, beta=0.25)
    >>> state = optimizer.init(jnp.zeros(1))
    >>> for _ in range(2):
    ...     updates, state = optimizer.update(jnp.array([2.0]), state)
    >>> updates.tolist()
    [-3.0]
    """

    def init(params: Any) -> HypergradientState:
        rate = jnp.asarray(learning_rate, jnp.result_type(*jax.tree.leaves(params)))
        return HypergradientState(rate, optax.tree.zeros_like(params))

    def update(updates: Any, state: HypergradientState, params: Any = None) -> tuple[Any, HypergradientState]:
        del params
        step_size = state.step_size + beta * optax.tree.vdot(updates, state.previous)
        return jax.tree.map(lambda g: -step_size * g, updates), HypergradientState(step_size, updates)

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def ghadimi_lan_step_size(*, smoothness: float, gap: float, total_variance: float, horizon: int) -> float:
    r"""The step size of Ghadimi and Lan (2013), which knows everything that one cannot know.

    .. math:: \eta = \min\left\{\frac1M, \frac{\sqrt{2 (f(x_1) - f^\star) / M}}{\sigma \sqrt T}\right\}

    The paper's own formula, in its section 4, has lost the square root of 1/M.

    Args:
        smoothness: M.
        gap: f(x_1) - f*.
        total_variance: sigma^2 = E ||g - grad f||^2.
        horizon: T.

    >>> ghadimi_lan_step_size(smoothness=2.0, gap=1.0, total_variance=0.0, horizon=100)
    0.5
    >>> ghadimi_lan_step_size(smoothness=2.0, gap=1.0, total_variance=1.0, horizon=100)
    0.1
    """
    if total_variance == 0:
        return 1 / smoothness
    return min(1 / smoothness, (2 * gap / smoothness) ** 0.5 / (total_variance * horizon) ** 0.5)


def _rate(hyperparameters: Hyperparameters, state: Any) -> jax.Array:
    return hyperparameters["learning_rate"]


def _state_step_size(hyperparameters: Hyperparameters, state: Any) -> jax.Array:
    return state.step_size


def _sgdol_step_size(hyperparameters: Hyperparameters, state: Any) -> jax.Array:
    """eta_t; of many, the mean weighted by the squared gradients seen.

    A coordinate whose feature never occurs keeps 1/M, so an unweighted mean would not show what the method does.
    """
    inner: ScaleBySGDOLState = state[0]
    multiplier = inner.multiplier
    if multiplier.ndim:
        multiplier = _weighted_mean(multiplier, inner.learner.n_sum)
    return multiplier / hyperparameters["smoothness"]


def _adagrad_step_size(hyperparameters: Hyperparameters, state: Any) -> jax.Array:
    """The same weighted mean of lr / sqrt(sum of squares)."""
    sums = state[0].sum_of_squares
    return hyperparameters["learning_rate"] * _weighted_mean(jnp.where(sums > 0, jax.lax.rsqrt(sums), 0.0), sums)


def _weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    total = jnp.sum(weights)
    return jnp.where(total > 0, jnp.sum(values * weights), jnp.sum(values)) / jnp.where(total > 0, total, values.size)


def _sgdol(granularity: Literal["global", "coordinate"]) -> Callable[..., optax.GradientTransformationExtraArgs]:
    def build(smoothness: Any, alpha: Any) -> optax.GradientTransformationExtraArgs:
        return sgdol(smoothness=smoothness, granularity=granularity, record=False, **{**PAPER, "alpha": alpha})

    return build


_SGDOL: dict[str, Any] = {
    "tuned": (),
    "gradients": 2,
    "known": ("smoothness", "alpha"),
    "step_size_of": _sgdol_step_size,
}


def methods(adagrad_form: AdaGradForm = "current") -> dict[str, Method]:
    """The methods by the paper's names, in the order of its figures; always the same objects.

    >>> [name for name, method in methods().items() if not method.tuned]
    ['SGDOL Global', 'SGDOL Coordinate', 'SGD GL']
    """
    if adagrad_form not in ADAGRAD_FORMS:
        raise ValueError(f"adagrad_form must be 'current' or 'delayed', got {adagrad_form!r}")
    return {method.name: method for method in _table(adagrad_form)}


@functools.cache  # compiled programs are kept by method
def _table(adagrad_form: AdaGradForm) -> tuple[Method, ...]:
    return (
        Method("SGDOL Global", _sgdol("global"), **_SGDOL),
        Method("SGDOL Coordinate", _sgdol("coordinate"), **_SGDOL),
        Method("SGD", optax.sgd, step_size_of=_rate),
        Method(
            "SGD GL",
            optax.sgd,
            tuned=(),
            known=("smoothness", "gap", "total_variance", "horizon"),
            from_known=lambda **known: {"learning_rate": ghadimi_lan_step_size(**known)},
            step_size_of=_rate,
        ),
        Method(
            "AdaGrad Global",
            lambda learning_rate: adagrad_global(learning_rate, form=adagrad_form),
            step_size_of=_state_step_size,
        ),
        # eps is inside the root here and outside it in PyTorch: 1e-20 is PyTorch's 1e-10 there.
        Method(
            "AdaGrad Coordinate",
            lambda learning_rate: optax.adagrad(learning_rate, initial_accumulator_value=0.0, eps=1e-20),
            step_size_of=_adagrad_step_size,
        ),
        Method("Adam", lambda learning_rate: optax.adam(learning_rate, b1=0.9, b2=0.999, eps=1e-8)),
        # PyTorch's decay and its eps outside the root; optax's default decay is 0.9.
        Method("RMSProp", lambda learning_rate: optax.rmsprop(learning_rate, decay=0.99, eps=1e-8, eps_in_sqrt=False)),
        Method("AdaDelta", lambda learning_rate: optax.adadelta(learning_rate, rho=0.9, eps=1e-6)),
        # The largest of the bias-corrected second moments; PyTorch corrects after taking the largest.
        Method("AMSGrad", lambda learning_rate: optax.amsgrad(learning_rate, b1=0.9, b2=0.999, eps=1e-8)),
        Method("Hypergradient", hypergradient, tuned=("learning_rate", "beta"), step_size_of=_state_step_size),
    )


METHODS: tuple[str, ...] = tuple(methods())
"""The names of the methods."""
