"""What the optimizer has learned, from its state."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgdol import summary
from sgdol.jax._core import ScaleBySGDOLState
from sgdol.jax._free import SGDOLFreeState
from sgdol.jax._search import find

__all__ = ["diagnostics"]


def diagnostics(state: Any) -> dict[str, Any]:
    r"""What the optimizer has learned, as plain numbers. Reads them from the device, so not for every step.

    The words are those of the PyTorch optimizer's ``diagnostics()``:

    * ``step_size``: lr s of the last update, to be compared with lr, as a list: for ``"group"`` one per label, in the
      order in which the labels first occur; else one (for ``"tensor"`` and ``"coordinate"``, s is the length of the
      move over that of a move with s = 1). In the state of :func:`scale_by_sgdol` alone, it is the multiplier s.
    * ``signal_to_noise``: :math:`\sum u / \sum (n - u)` over about the last hundred updates: signal and noise of the
      direction, from 0 to :math:`2^{52}` (no noise).
    * ``noise_scale``: how many of the k gradients have to be averaged until signal and noise are equal, from 0 (no
      noise) to infinity (no signal was seen). Times the microbatch size it is the "simple" gradient noise scale of
      McCandlish et al. (2018). Both ratios are nan before the first update.
    * ``updates``, ``skipped`` (non-finite gradients), ``gradients`` (k of the last update).
    * ``pending``: whether a gradient is held.
    * ``identical``: how many updates were given the same gradient twice. Unless the objective has no noise, that is a
      mistake: draw a fresh batch for every gradient, split a batch with :func:`sgdol.jax.microbatch_grads`, and give
      each device its own data.
    * ``cumulative_surrogate``: :math:`\sum_t \ell_t(\eta_t)`, which bounds the change of f in expectation.
    * ``regret``: ``cumulative_surrogate`` minus its value had the best fixed s been used in all blocks.

    :func:`sgdol_free` has, in place of the last four, ``smoothness`` (M as measured so far), ``loss`` (a running mean
    of the batch losses, over about ten steps), ``evaluations`` (of a batch), ``rejections`` (steps taken back after a
    look-back), ``rollbacks`` (returns to the average) and ``moved``: how many calls of ``update`` were given other
    parameters than the call before led to. Unless that is on purpose (a projection), it is a mistake: ``sgdol_free``
    has to be the last of an ``optax.chain``.

    Args:
        state: the state of an optimizer that has one SGDOL in it, however deep; with ``optax.partition``, the part of
            the state that belongs to one of several. Of a state that ``vmap`` made, all values are arrays.

    Raises:
        ValueError: if there is none or more than one, or if it keeps no record.

    >>> import jax.numpy as jnp
    >>> from sgdol.jax import sgdol
    >>> optimizer = sgdol(learning_rate=0.1)
    >>> _, state = optimizer.update(jnp.array([[1.0, 2.0], [3.0, -1.0]]), optimizer.init(jnp.zeros(2)))
    >>> now = diagnostics(state)
    >>> now["updates"], now["gradients"], round(now["step_size"][0], 6)
    (1, 2, 0.1)
    """
    found = find(state, ScaleBySGDOLState) + find(state, SGDOLFreeState)
    if len(found) != 1:
        paths = ", ".join(f"state{path}" for path, _ in found) or f"none in {type(state).__name__}"
        raise ValueError(
            f"diagnostics needs a state with exactly one SGDOL in it; of several, give it one at a time. Found: {paths}"
        )
    inner: Any = found[0][1]
    if isinstance(inner, SGDOLFreeState):
        return _of_free(inner)
    if np.shape(inner.numbers)[-1] == 2:
        raise ValueError("this optimizer keeps no record: it was constructed with record=False")
    return _of_sgdol(inner)


def _of_sgdol(state: ScaleBySGDOLState) -> dict[str, Any]:
    """The record of a state as plain numbers, or as arrays of them if the state is one of many."""
    numbers = np.asarray(state.numbers, np.float64)
    updates, pending, skipped, identical, k = (np.asarray(state.counts)[..., i] for i in range(5))
    unit, sums, steps = numbers[..., 1], numbers[..., 2:7], numbers[..., 7:]
    square = np.where(unit > 0, unit, 1.0) ** 2
    losses, signal, length = (square * sums[..., i] for i in range(3))
    recent = sums[..., 3], sums[..., 4]
    return {
        "step_size": steps.tolist() if steps.ndim == 1 else steps[..., 0] if steps.shape[-1] == 1 else steps,
        "pending": _plain(pending > 0),
        "signal_to_noise": _plain(summary.signal_to_noise(*recent)),
        "noise_scale": _plain(summary.noise_scale(*recent, k)),
        "updates": _plain(updates),
        "skipped": _plain(skipped),
        "identical": _plain(identical),
        "gradients": _plain(k),
        "cumulative_surrogate": _plain(losses),
        "regret": _plain(summary.regret(losses, signal, length)),
    }


def _of_free(state: SGDOLFreeState) -> dict[str, Any]:
    rule = state.rule
    signal, noise, steps = (np.asarray(v, np.float64) for v in (rule.recent_signal, rule.recent_noise, rule.step_size))
    return {
        "step_size": steps if steps.ndim else [steps.item()],
        "smoothness": _plain(rule.smoothness),
        "loss": _plain(rule.mean_loss),
        "signal_to_noise": _plain(summary.signal_to_noise(signal, signal + noise)),
        "noise_scale": _plain(summary.noise_scale(signal, signal + noise, np.asarray(state.gradients))),
        **{name: _plain(getattr(rule, name)) for name in ("updates", "skipped")},
        "gradients": _plain(state.gradients),
        **{name: _plain(getattr(rule, name)) for name in ("evaluations", "rejections", "rollbacks")},
        "moved": _plain(state.moved),
    }


def _plain(value: Any) -> Any:
    """A number of Python's, or a numpy array."""
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
