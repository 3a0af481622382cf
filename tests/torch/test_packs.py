"""Many small tensors are laid end to end: the same numbers as one by one, beside large and odd ones."""

import numpy as np
import pytest
import torch

from sgdol import SGDOL, reference
from sgdol.learners import FTRL
from sgdol.torch._packs import LARGEST, pack

SIZES = [3, 1, 7, 2, LARGEST + 5, 4, 1, 6, 5, 2, 3, 8, 1, 9, 2, 4]
SHAPES = [(size,) if size % 2 else (2, size // 2) for size in SIZES]
TENSORS = np.repeat(np.arange(len(SIZES)), SIZES)
T, SMOOTHNESS = 12, 4.0


def gradients(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(size=len(SIZES)))[TENSORS]
    mean = rng.normal(size=len(TENSORS))
    return scales * (mean * (-1.5) ** np.arange(T)[:, None, None] + rng.normal(size=(T, 2, len(TENSORS))))


def trained(recorded: np.ndarray, dtype=torch.float64, **options) -> np.ndarray:
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    opt = SGDOL(params, smoothness=SMOOTHNESS, **options)
    for step in recorded:
        for g in step:
            parts = np.split(g, np.cumsum(SIZES)[:-1])
            loss = sum(
                (p * torch.tensor(v, dtype=dtype).reshape(p.shape)).sum() for p, v in zip(params, parts, strict=True)
            )
            (loss / 2).backward()
        opt.step()
        opt.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in params]).numpy()


@pytest.mark.parametrize("metric", ["euclidean", "rms"])
@pytest.mark.parametrize("learner", ["measured", "ftrl"])
def test_many_small_tensors_move_as_the_reference_says(metric, learner):
    recorded = gradients()
    options = {"learner": FTRL()} if learner == "ftrl" else {}
    expected = reference.replay(
        recorded,
        np.zeros(len(TENSORS)),
        smoothness=SMOOTHNESS,
        alpha=None,
        kappa=10.0 if learner == "measured" else 1.0,
        estimator="symmetric",
        momentum=0.9,
        metric=metric,
        tensors=TENSORS,
        learner=learner,
        bias_correction=learner == "ftrl",
    )
    np.testing.assert_allclose(
        trained(recorded, metric=metric, **options), expected.iterates[-1], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("metric", ["euclidean", "rms"])
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_of_small_tensors_do_not_leave_the_range_of_float32(metric, scale):
    recorded = gradients()
    moved = trained(recorded * scale, dtype=torch.float32, metric=metric)
    expected = trained(recorded, metric=metric) * scale
    # float32 has 1.2e-7; a dozen steps, some of which nearly cancel, lose two digits of it in the smallest entries
    np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_only_small_ordinary_tensors_of_one_type_are_packed():
    like = torch.zeros((), dtype=torch.float64)
    tensors = [torch.ones(2) for _ in range(20)]
    tensors[3] = torch.ones(2, dtype=torch.float64)
    tensors[7] = torch.ones(0)
    tensors[11] = torch.ones(LARGEST + 1)
    found, others = pack(tensors, like)
    assert others == [3, 7, 11]
    assert found.rows == [i for i in range(20) if i not in others]
    assert pack(tensors[:5], like) == (None, list(range(5)))
    assert pack(tensors, like.to("meta")) == (None, list(range(20)))
