"""One batch in several backward passes, each of them an independent gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["backward", "split"]


def backward(
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    parts: int = 2,
    run: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    r"""Run ``backward()`` on each part of a batch, and return the loss of the batch.

    With parts of :math:`b_i` of the b samples, :math:`\frac{b_i}{b} \ell_i` is what each pass differentiates, so that
    the gradients add up to that of the whole batch, also where the parts are not of one size. It costs what one pass
    costs: every sample goes through the model once. Gradients are added to what is there, as ``backward()`` does.

    A batch with fewer samples than ``parts`` is run in as many passes as it has samples. A single sample is one
    gradient, which :class:`sgdol.SGDOL` holds until the next ``step()``. Parts of different sizes count as equal in u,
    which is lower by at most :math:`1/b^2` of the signal for two parts: nothing, but for a last batch of three.

    Args:
        loss_fn: a function of the batch's arguments that returns the *mean* loss over the samples that it is given.
        batch: tensors, or dicts, tuples, lists and dataclasses of them, whose first axis is the samples. What is not a
            tensor with a first axis of that length, or a list of it, goes to every part as it is.
        parts: how many passes, at least 1.
        run: what is called with each loss in place of ``loss.backward()``: ``accelerator.backward``, or
            ``lambda loss: scaler.scale(loss).backward()`` with a GradScaler.

    Returns:
        The mean loss over the batch, detached.

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
    total: Tensor | None = None
    with torch.enable_grad():
        for share, part in split(batch, parts):
            loss = loss_fn(*part)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise TypeError(f"loss_fn must return the mean loss of its samples, one number, got {_shown(loss)}")
            loss = loss * share
            run(loss)
            total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def split(batch: Sequence[Any], parts: int) -> Iterator[tuple[float, tuple[Any, ...]]]:
    """The parts of a batch along its first axis, each with its share of the samples.

    >>> [(share, x.tolist()) for share, (x,) in split((torch.arange(4),), 2)]
    [(0.5, [0, 1]), (0.5, [2, 3])]
    """
    sizes = [(path, size) for path, size in _sizes(tuple(batch), "batch") if size is not None]
    if not sizes:
        raise ValueError("batch has no tensor with a first axis to split: give backward() the tensors themselves")
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
        end = begin + (samples - begin) // (count - i)
        yield (end - begin) / samples, tuple(_cut(value, begin, end, samples) for value in batch)
        begin = end


def _sizes(value: Any, path: str) -> Iterator[tuple[str, int | None]]:
    """The length of the first axis of every tensor inside, with the way to it."""
    if isinstance(value, Tensor):
        yield path, len(value) if value.dim() else None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _sizes(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _sizes(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _sizes(getattr(value, field.name), f"{path}.{field.name}")


def _cut(value: Any, begin: int, end: int, samples: int) -> Any:
    if isinstance(value, Tensor):
        return value[begin:end] if value.dim() else value
    if isinstance(value, Mapping):
        items = {key: _cut(item, begin, end, samples) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        if not any(size is not None for _, size in _sizes(value, "")) and len(value) == samples:
            return value[begin:end]  # a list of samples that are no tensors: texts, say
        items_ = [_cut(item, begin, end, samples) for item in value]
        return type(value)(*items_) if hasattr(value, "_fields") else type(value)(items_)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _cut(getattr(value, name), begin, end, samples) for name in fields})
    return value


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
