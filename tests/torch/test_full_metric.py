"""A metric whose D is a full matrix: nobody but the metric may know what D looks like.

Of SGDOL against the reference, see ``test_exact_vectors.py``.
"""

import numpy as np
import pytest
from dense_metric import Dense, dense
from free_problems import PROBLEMS, train
from free_problems import reference as reference_free
from loops import one_step
from test_exact_vectors import flat, linear_loss, parameters, vectors

from sgdol import SGDOL


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        *((problem, {}) for problem in PROBLEMS),
        ("quadratic", {"momentum": 0.0}),
        ("quadratic", {"momentum": 0.5, "averaging": 2.0, "weight_decay": 0.1}),
    ],
    ids=str,
)
def test_sgdol_free_equals_the_reference(problem, options):
    found, truth = train(problem, metric=Dense(), **options), reference_free(problem, metric=dense, **options)
    found.agrees_with(truth)
    assert found.calls == truth.evaluations


def test_a_step_size_for_each_coordinate_needs_a_diagonal_metric():
    with pytest.raises(ValueError, match=r'granularity="coordinate" needs a metric whose D is diagonal.*Dense\('):
        SGDOL(parameters(), lr=0.25, metric=Dense(), granularity="coordinate")


@pytest.mark.parametrize("exponent", [-400, 400])
def test_gradients_of_any_size_give_the_same_run(exponent):
    found = []
    for scale in (1.0, 2.0**exponent):
        params = parameters()
        opt = SGDOL(params, lr=0.25 / scale, metric=Dense())
        for step in vectors(2):
            one_step(opt, [linear_loss(params, g * scale) / 2 for g in step])
        found.append(flat(params))
    np.testing.assert_array_equal(*found)
