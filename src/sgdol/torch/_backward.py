"""One batch in several backward passes, each of them an independent gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.loss import _Loss

from sgdol.torch._rerun import INTERESTED, RUNNING, Replay, interested

__all__ = ["backward", "repeatable", "split", "watched"]

USAGE = "write backward(lambda x, y: criterion(model(x), y), inputs, targets)"


def backward(
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    parts: int = 2,
    reduction: Literal["mean", "sum"] = "mean",
    run: Callable[[Tensor], Any] | None = None,
) -> Tensor:
    r"""Split a batch, run ``backward()`` on each part, and return the loss of the batch.

    Use it with both optimizers in place of ``loss = criterion(model(x), y)`` and ``loss.backward()``::

        loss = backward(lambda x, y: criterion(model(x), y), inputs, targets)
        opt.step()
        opt.zero_grad()

    It costs what one pass costs: every sample goes through the model once. A part with :math:`b_i` of the b samples and
    the mean loss :math:`\ell_i` contributes the gradient of :math:`\frac{b_i}{b} \ell_i`, so the gradients add up to
    that of the whole batch. Gradients are added to ``.grad``, as by ``backward()``; several calls before one ``step()``
    are gradient accumulation.

    :class:`sgdol.SGDOLFree` evaluates some batches a second time, at another point. ``step()`` then calls ``loss_fn``
    again, with the same random numbers of torch, the same autocast and the same buffers; the batch is kept until that
    step has ended. So ``loss_fn`` must return the same loss whenever it is called at the same weights. Draw other
    random numbers (augmentation by numpy, a ``torch.Generator``) before the call.

    A batch with fewer samples than ``parts`` is run in as many passes as it has samples. A single sample is one
    gradient: :class:`sgdol.SGDOL` holds it until the next ``step()``, :class:`sgdol.SGDOLFree` skips that step. In u
    all parts count alike; for two parts of unequal size u is lower by at most :math:`1/b^2` of the signal.

    Args:
        loss_fn: a function of the batch that calls the model and returns the loss of the samples that it is given.
        batch: the arguments of ``loss_fn``: tensors, numpy arrays, or dicts, tuples, lists and dataclasses of them,
            whose first axis is the samples; or a list or array of indices of samples. Anything without a first axis of
            that length is given to every part as it is.
        parts: how many passes, at least 1. On data-parallel ranks 1 is enough: the ranks are the parts.
        reduction: ``"mean"`` if ``loss_fn`` returns the mean over its samples, ``"sum"`` if it returns their sum.
        run: a function to call with each loss in place of ``loss.backward()``: ``accelerator.backward``, or
            ``lambda loss: scaler.scale(loss).backward()`` with a GradScaler.

    Returns:
        The loss of the batch, detached: a mean or a sum, by ``reduction``.

    >>> import torch
    >>> from sgdol import SGDOL
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = SGDOL(model.parameters(), lr=0.1)
    >>> def loss_fn(x, y):
    ...     return torch.nn.functional.mse_loss(model(x), y)
    >>> x, y = torch.randn(5, 3), torch.randn(5, 1)
    >>> loss = backward(loss_fn, x, y)  # in place of loss_fn(x, y).backward()
    >>> bool(torch.isclose(loss, loss_fn(x, y)))
    True
    >>> opt.step(); opt.zero_grad()
    >>> opt.diagnostics()["gradients"]
    2
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(f"parts must be a whole number of passes, at least 1, got {parts!r}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", as loss_fn reduces its samples, got {reduction!r}')
    _refuse_what_cannot_run_again(loss_fn, batch)
    pieces = [(share if reduction == "mean" else 1.0, part) for share, part in split(batch, parts)]
    call = partial(_run_passes, loss_fn, pieces, run)
    return repeatable(call, len(pieces), whole=len(pieces) == parts)


def repeatable(call: Callable[[], Tensor], passes: int, *, whole: bool = True) -> Tensor:
    """Make a call that runs this many backward passes, and record it so that SGDOLFree can repeat it.

    Each loss has to go through :func:`watched` before its backward. See :class:`sgdol.torch._rerun.Replay`.
    """
    # Without an SGDOLFree nothing is recorded; inside step(closure) the closure is what is repeated.
    if not INTERESTED or RUNNING.get(get_ident()) is not None:
        return call()
    loss: Tensor = Replay(call, interested(), passes, whole=whole).first()
    return loss


def watched(loss: Tensor) -> Tensor:
    """Mark a loss, so that its backward is counted as one of the running call. Returns the loss."""
    replay = RUNNING.get(get_ident())
    if replay is not None and loss.requires_grad:
        loss.register_hook(replay.on_backward)
    return loss


def _run_passes(
    loss_fn: Callable[..., Tensor], pieces: list[tuple[float, tuple[Any, ...]]], run: Callable[[Tensor], Any] | None
) -> Tensor:
    total, replay = None, RUNNING.get(get_ident())
    # A hook, which run() reaches through whatever it multiplies the loss by, and in whatever thread.
    watches = replay is not None and (run is not None or replay.accelerators)
    try:
        with torch.enable_grad():
            for share, part in pieces:
                loss = _checked(loss_fn(*part), loss_fn) * share
                (Tensor.backward if run is None else run)(watched(loss) if watches else loss)
                total = loss.detach() if total is None else total + loss.detach()
    except Exception as error:
        if total is not None and (replay is None or replay.loss is None):  # a step() that fails clears its look-back
            error.add_note(
                "backward() has left the gradients of its earlier parts in .grad: call zero_grad() before you run the "
                "batch again"
            )
        raise
    assert total is not None
    return total


def _checked(loss: Any, loss_fn: Callable[..., Tensor]) -> Tensor:
    """The loss of a part, if it is one number that depends on a parameter."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(f"loss_fn must return the loss of its samples, one number, got {_shown(loss)}")
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on no parameter: loss_fn must be a function of the batch that calls the model, "
            f"as lambda x, y: criterion(model(x), y) is, got {_shown(loss_fn)}"
        )
    return loss


def _refuse_what_cannot_run_again(loss_fn: Any, batch: tuple[Any, ...]) -> None:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the batch, got {_shown(loss_fn)}: {USAGE}")
    if isinstance(loss_fn, _Loss):
        raise TypeError(f"loss_fn must be a function of the batch that calls the model, got {loss_fn!r}: {USAGE}")
    for path, value in _leaves(batch, "batch"):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            raise ValueError(
                f"{path} comes out of a model: it has a grad_fn, whose graph can be differentiated only once. Call the "
                f"model inside of loss_fn, on the batch itself: {USAGE}"
            )


def split(batch: Sequence[Any], parts: int) -> Iterator[tuple[float, tuple[Any, ...]]]:
    """Yield the parts of a batch along its first axis, each as (share of the samples, part).

    >>> [(share, x.tolist()) for share, (x,) in split((torch.arange(4),), 2)]
    [(0.5, [0, 1]), (0.5, [2, 3])]
    >>> [part for _, part in split(([7, 3, 5],), 2)]  # indices
    [([7],), ([3, 5],)]
    """
    sizes = [(path, len(value)) for path, value in _leaves(tuple(batch), "batch") if _has_samples(value)]
    if not sizes:  # no tensors: lists of what loss_fn takes its samples by
        sizes = [(f"batch[{i}]", len(value)) for i, value in enumerate(batch) if isinstance(value, list | range)]
    if not sizes:
        raise ValueError(
            "batch has no tensor with a first axis to split, and no list: give backward() the tensors themselves, or "
            f"indices: {USAGE}"
        )
    samples = sizes[0][1]
    other = next(((path, size) for path, size in sizes if size != samples), None)
    if other is not None:
        raise ValueError(
            f"all tensors of a batch must have the same first axis: {sizes[0][0]} has {samples} samples, "
            f"{other[0]} {other[1]}"
        )
    if samples == 0:
        raise ValueError(f"batch must have at least one sample, {sizes[0][0]} has none")
    count = min(parts, samples)
    begin = 0
    for i in range(count):
        end = begin + (samples - begin) // (count - i)  # sizes differ by at most 1, and the last are the largest
        yield (end - begin) / samples, tuple(_cut(value, begin, end, samples) for value in batch)
        begin = end


def _has_samples(value: Any) -> bool:
    # Tensors, and arrays of numpy and its like.
    return getattr(value, "ndim", 0) > 0 and hasattr(value, "shape")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    # (path as an error shows it, value) of everything in nested containers.
    if isinstance(value, Tensor):  # first, because the other questions take longer
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def _cut(value: Any, begin: int, end: int, samples: int) -> Any:
    if isinstance(value, Tensor):
        return value[begin:end] if value.dim() else value
    if isinstance(value, Mapping):
        items = {key: _cut(item, begin, end, samples) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, range):
        return value[begin:end] if len(value) == samples else value
    if isinstance(value, tuple | list):
        if len(value) == samples and not any(_has_samples(item) for _, item in _leaves(value, "")):
            return value[begin:end]  # a list of samples that are no tensors: texts, or indices
        items_ = [_cut(item, begin, end, samples) for item in value]  # a named tuple takes them one by one
        return type(value)(*items_) if hasattr(value, "_fields") else type(value)(items_)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _cut(getattr(value, name), begin, end, samples) for name in fields})
    return value[begin:end] if _has_samples(value) else value


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
