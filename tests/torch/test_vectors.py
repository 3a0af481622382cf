"""Many small tensors and a large one, of any type, move as the reference says of one vector."""

import numpy as np
import torch
from pairs import pairwise

from sgdol import SGDOL, reference
from sgdol.learners import FTRL

LARGE = (1 << 14) + 5
"""So many numbers are a vector of their own; those of smaller tensors lie end to end."""

SIZES = [3, 1, 7, 2, LARGE, 4, 1, 6, 5, 2, 3, 8, 1, 9, 2, 4]
SHAPES = [(size,) if size % 2 else (2, size // 2) for size in SIZES]
TENSORS = np.repeat(np.arange(len(SIZES)), SIZES)
T, SMOOTHNESS = 4, 4.0
CUT = 9
"""The first tensor of the second group."""


def gradients(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(size=len(SIZES)))[TENSORS]
    mean = rng.normal(size=len(TENSORS))
    return scales * (mean * (-1.5) ** np.arange(T)[:, None, None] + rng.normal(size=(T, 2, len(TENSORS))))


def trained(recorded: np.ndarray, dtype=torch.float64, **options) -> np.ndarray:
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    opt = SGDOL([{"params": params[:CUT]}, {"params": params[CUT:]}], smoothness=SMOOTHNESS, **options)
    for step in torch.tensor(recorded, dtype=dtype):
        for g in step:
            parts = zip(params, g.split(SIZES), strict=True)
            sum((p * v.view(p.shape)).sum() for p, v in parts).div(2).backward()
        opt.step()
        opt.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in params]).numpy()


BLOCKS = {"global": None, "group": (np.arange(len(TENSORS)) >= sum(SIZES[:CUT])).astype(int), "tensor": TENSORS}


@pairwise(metric=["euclidean", "rms"], learner=["measured", "ftrl"], granularity=list(BLOCKS))
def test_many_small_tensors_and_a_large_one_move_as_the_reference_says(metric, learner, granularity):
    recorded = gradients()
    options = {"learner": FTRL()} if learner == "ftrl" else {}
    usual = {"smoothness": SMOOTHNESS, "alpha": None, "estimator": "symmetric", "momentum": 0.9, "tensors": TENSORS}
    of_learner = {"kappa": 1.0 if options else 10.0, "bias_correction": bool(options), "learner": learner}
    blocks = {"metric": metric, "blocks": BLOCKS[granularity]}
    expected = reference.replay(recorded, np.zeros(len(TENSORS)), **usual, **of_learner, **blocks)
    found = trained(recorded, metric=metric, granularity=granularity, **options)
    np.testing.assert_allclose(found, expected.iterates[-1], rtol=1e-12, atol=1e-12)
