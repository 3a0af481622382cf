"""Parameters as vectors: whatever lies where, every operation is what plain torch makes of the tensors themselves."""

import numpy as np
import pytest
import torch

from sgdol import SGDOL, reference
from sgdol.learners import FTRL
from sgdol.torch._operators import Diagonal
from sgdol.torch._vectors import SMALL, Layout, wide_dtype

SPECIMENS = [
    ((3,), torch.float32),
    ((2, 4), torch.float32),
    ((), torch.float32),
    ((SMALL + 5,), torch.float32),
    ((0, 3), torch.float32),
    ((2, 3), torch.complex64),
    ((5,), torch.float64),
    ((2, 2), torch.complex128),
    ((3, 2), torch.bfloat16),
    ((130, 127), torch.float64),
]
"""Shapes and types: small, zero-dimensional, large, empty, complex, wide and narrow."""


def draw(params, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in params]


def real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return real(tensor).to(torch.float64)


def parts_of(layout: Layout, vector) -> list[torch.Tensor]:
    return [part for e, x in enumerate(vector) for part in layout.parts(e, x)]


class Case:
    """Specimens in two groups, the second of which has a step size per coordinate where that is asked for."""

    def __init__(self, granularity: str = "global", merges: bool = True):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape, dtype in SPECIMENS * 2]
        self.groups = [{"granularity": "global"}, {"granularity": granularity}]
        self.members = [params[: len(SPECIMENS)], params[len(SPECIMENS) :]]
        self.state = {p: {} for p in params}
        self.layout = self.of(self.members, merges)

    def of(self, members, merges: bool = True) -> Layout:
        return Layout(self.groups, members, lambda group, p: merges, self.state)

    def scattered(self, numbers) -> list[torch.Tensor]:
        """What is known of each tensor: its number, or the array of its coordinates, in the layout's order."""
        first, *arrays = numbers
        found = dict(zip(self.layout.numbered, first, strict=True))
        for e, values in zip(self.layout.coordinates, arrays, strict=True):
            found.update(zip(range(*self.layout.rows(e).indices(1000)), self.layout.parts(e, values), strict=True))
        return [found[i] for i in range(len(self.layout.params))]


cases = pytest.mark.parametrize(
    "case", [Case(), Case("coordinate"), Case(merges=False)], ids=["global", "coordinate", "one by one"]
)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """To a few roundings of sums of products of this type."""
    tolerance = 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@cases
def test_small_tensors_of_one_type_are_one_entry_and_all_others_one_each(case):
    layout = case.layout
    assert sorted(map(id, layout.params)) == sorted(id(p) for some in case.members for p in some)
    merged = [entry for entry in layout.entries if entry.merged]
    assert len(merged) == (0 if len(layout.entries) == 2 * len(SPECIMENS) else 4)  # float32 and float64 in each group
    for e, entry in enumerate(layout.entries):
        inside = layout.params[layout.rows(e)]
        assert {wide_dtype(p.dtype) for p in inside} == {entry.dtype}
        assert entry.sizes == [real(p).numel() for p in inside]
        if not entry.merged:
            assert len(inside) == 1
        else:
            assert all(0 < p.numel() <= SMALL and p.dtype != torch.bfloat16 for p in inside)
    assert layout.size == sum(real(p).numel() for p in layout.params)


@cases
def test_what_is_gathered_comes_back_in_parts(case):
    layout = case.layout
    tensors = draw(layout.params, 1)
    vector = layout.gather(tensors)
    assert [x.dtype for x in vector] == [entry.dtype for entry in layout.entries]
    assert [x.shape for x in vector] == [entry.shape for entry in layout.entries]
    for tensor, part in zip(tensors, parts_of(layout, vector), strict=True):
        assert torch.equal(part.double(), wide(tensor))


@cases
def test_what_is_not_there_is_gathered_as_zero(case):
    layout = case.layout
    for part, p in zip(parts_of(layout, layout.gather([None] * len(layout.params))), layout.params, strict=True):
        assert part.shape == real(p).shape
        assert not part.any()


@cases
def test_a_copy_has_memory_of_its_own(case):
    layout = case.layout
    tensors = draw(layout.params, 1)
    vector = layout.copy(layout.gather(tensors))
    for x in vector:
        x.zero_()
    for tensor, drawn in zip(tensors, draw(layout.params, 1), strict=True):
        assert torch.equal(tensor, drawn)


@cases
@torch.no_grad()
def test_parameters_are_put_where_a_vector_says_and_are_there(case):
    layout = case.layout
    start, there = layout.point(), layout.gather(draw(layout.params, 2))
    layout.put(there)
    for found, expected in zip(layout.point(), there, strict=True):
        assert torch.equal(found, expected)
    layout.put(start)


@cases
def test_sums_are_those_of_each_tensor(case):
    layout = case.layout
    tensors = draw(layout.params, 1)
    for e, x in enumerate(layout.gather(tensors)):
        inside = tensors[layout.rows(e)]
        found = layout.sums(e, x)
        assert found.dtype == torch.float64
        close(found, torch.stack([wide(t).sum() for t in inside]), inside[0].dtype)


@cases
@pytest.mark.parametrize("metric", [False, True])
def test_products_are_inner_products_of_each_tensor_or_products_of_each_coordinate(case, metric):
    layout = case.layout
    first, second, third = (draw(layout.params, seed) for seed in (1, 2, 3))
    inverses = [real(t).abs() + 0.5 for t in third]
    a, b = layout.gather(first), layout.gather(second)
    D = None
    if metric:
        D = [Diagonal(layout.entry(inverses[layout.rows(e)], e)) for e in range(len(layout.entries))]
    products = layout.products(a, b, D)
    given = zip(case.scattered(products), first, second, inverses, layout.group_of, strict=True)
    for found, x, y, inverse, group in given:
        each = wide(x) * wide(y) * (inverse.double() if metric else 1)
        close(found, each if case.groups[group]["granularity"] == "coordinate" else each.sum(), x.dtype)
    for total, x, y, inverse in zip(layout.totals(products), first, second, inverses, strict=True):
        close(total, (wide(x) * wide(y) * (inverse.double() if metric else 1)).sum(), x.dtype)


def test_squares_that_float32_cannot_hold_are_in_the_range():
    params = [torch.nn.Parameter(torch.full((n,), 1e30)) for n in (3, 2, SMALL + 1)]
    layout = Layout([{"granularity": "global"}], [params], lambda group, p: True, {})
    x = layout.gather([p.detach() for p in params])
    expected = [n * float(torch.tensor(1e30)) ** 2 for n in (3, 2, SMALL + 1)]
    # So many equal numbers, summed in float32.
    assert layout.products(x, x)[0].tolist() == pytest.approx(expected, rel=1e-4)


@cases
def test_numbers_of_some_tensors_are_remapped_to_a_layout_of_all(case):
    layout = case.layout
    part = case.of([case.members[0][:4], case.members[1][3:]])
    ones = layout.gather([torch.full_like(p, 1 + 1j if p.is_complex() else 1) for p in layout.params])
    tensors = dict(zip(part.params, draw(part.params, 1), strict=True))
    vector = part.gather(list(tensors.values()))
    found = case.scattered(layout.remapped(part, part.products(vector, vector), layout.products(ones, ones)))
    for p, number, group in zip(layout.params, found, layout.group_of, strict=True):
        expected = wide(tensors[p]).square() if p in tensors else torch.ones_like(real(p), dtype=torch.float64)
        close(number, expected if case.groups[group]["granularity"] == "coordinate" else expected.sum(), p.dtype)


@cases
def test_values_of_groups_go_with_the_numbers_of_their_tensors(case):
    layout = case.layout
    x = layout.gather(draw(layout.params, 1))
    products = layout.products(x, x)
    scaled = [value * number for value, number in zip(layout.by_group([2.0, 3.0]), products, strict=True)]
    for before, after, group in zip(case.scattered(products), case.scattered(scaled), layout.group_of, strict=True):
        torch.testing.assert_close(after, before * [2.0, 3.0][group], rtol=1e-6, atol=0)
    assert layout.by_group([2.0, 2.0])[0] == 2.0  # one number where all groups agree


@cases
def test_numbers_are_spread_over_the_coordinates_of_their_tensors(case):
    layout = case.layout
    numbers = torch.arange(len(layout.params), dtype=torch.float64)
    for e, entry in enumerate(layout.entries):
        spread = layout.spread(e, numbers[layout.rows(e)]).expand(entry.shape)
        for part, number in zip(layout.parts(e, spread), numbers[layout.rows(e)], strict=True):
            assert torch.equal(part, number.expand(part.shape))


def test_a_vector_in_the_state_is_made_of_what_is_there_and_shares_its_memory():
    case = Case()
    layout = case.layout
    known = layout.params[0]
    case.state[known]["momentum"] = torch.ones_like(known.detach())
    for e in range(len(layout.entries)):
        layout.vector("momentum", e).add_(1)
    for p in layout.params:
        held = case.state[p]["momentum"]
        assert torch.equal(held.double(), torch.full(real(p).shape, 2.0 if p is known else 1.0).double())
    other = case.of([case.members[0][:3], []])  # another layout of some of them
    for e in range(len(other.entries)):
        other.vector("momentum", e).add_(1)
    assert (case.state[known]["momentum"] == 3).all()


# The optimizer on many small tensors and a large one ------------------------------------------------------------------

SIZES = [3, 1, 7, 2, SMALL + 5, 4, 1, 6, 5, 2, 3, 8, 1, 9, 2, 4]
SHAPES = [(size,) if size % 2 else (2, size // 2) for size in SIZES]
TENSORS = np.repeat(np.arange(len(SIZES)), SIZES)
T, SMOOTHNESS = 6, 4.0


def gradients(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(size=len(SIZES)))[TENSORS]
    mean = rng.normal(size=len(TENSORS))
    return scales * (mean * (-1.5) ** np.arange(T)[:, None, None] + rng.normal(size=(T, 2, len(TENSORS))))


def trained(recorded: np.ndarray, dtype=torch.float64, **options) -> np.ndarray:
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    opt = SGDOL(params, smoothness=SMOOTHNESS, **options)
    for step in torch.tensor(recorded, dtype=dtype):
        for g in step:
            parts = zip(params, g.split(SIZES), strict=True)
            sum((p * v.view(p.shape)).sum() for p, v in parts).div(2).backward()
        opt.step()
        opt.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in params]).numpy()


@pytest.mark.parametrize("metric", ["euclidean", "rms"])
@pytest.mark.parametrize("learner", ["measured", "ftrl"])
def test_many_small_tensors_and_a_large_one_move_as_the_reference_says(metric, learner):
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
    found = trained(recorded, metric=metric, **options)
    np.testing.assert_allclose(found, expected.iterates[-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("metric", ["euclidean", "rms"])
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_of_small_tensors_do_not_leave_the_range_of_float32(metric, scale):
    recorded = gradients()
    moved = trained(recorded * scale, dtype=torch.float32, metric=metric)
    expected = trained(recorded, metric=metric) * scale
    # float32 has 1.2e-7; a dozen steps, some of which nearly cancel, lose two digits of it in the smallest entries
    np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
