"""The figures are drawn as the paper describes them, the same each time, and hide nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sgdol.paper import figures
from sgdol.paper.experiments import FIGURES
from sgdol.paper.measures import Reader

PAPER = {  # number: (rows, whether each row's vertical axis is logarithmic)
    1: [("mean_squared_gradient", "log"), ("step_size", "linear")],
    2: [("mean_squared_gradient", "log"), ("objective", "log"), ("step_size", "linear")],
    3: [("mean_squared_gradient", "log"), ("objective", "log")],
    4: [("mean_squared_gradient", "log")],
}


def texts(figure):
    return " | ".join(text.get_text() for text in [*figure.texts, *figure.legends[0].get_texts()])


@pytest.mark.parametrize("number", PAPER)
def test_panels_and_axes_are_those_of_the_paper(number, written_results):
    figure = figures.draw(number, Reader(written_results()))
    axes = np.array(figure.axes).reshape(-1, 3)
    assert len(axes) == len(PAPER[number])
    for row, (_, scale) in zip(axes, PAPER[number], strict=True):
        assert {axis.get_xscale() for axis in row} == {"log"}
        assert {axis.get_yscale() for axis in row} == {scale}
    assert FIGURES[number][1].rows == tuple(name for name, _ in PAPER[number])


def test_the_methods_are_those_of_the_captions():
    assert FIGURES[1][1].methods == ("SGDOL Global", "SGD", "AdaGrad Global", "Adam")
    assert set(FIGURES[2][1].methods) == {"SGDOL Global", "SGD", "SGD GL", "AdaGrad Global", "Adam"}
    others = {"SGDOL Global", "AdaGrad Coordinate", "RMSProp", "AdaDelta", "AMSGrad", "Hypergradient"}
    assert set(FIGURES[3][1].methods) == set(FIGURES[4][1].methods) == others


def test_the_legend_shows_the_rates(written_results):
    legend = texts(figures.draw(1, Reader(written_results())))
    assert "SGD (0.001)" in legend
    assert "SGDOL Global (M = 1000, α = 10)" in legend


def test_a_diverged_run_is_drawn_and_named(written_results):
    axis = figures.draw(4, Reader(written_results())).axes[2]
    assert [text.get_text() for text in axis.texts] == ["1 of 3 diverged"]
    assert any(line.get_marker() == "x" for line in axis.lines)


def test_adam_has_no_line_among_the_step_sizes(written_results):
    figure = figures.draw(1, Reader(written_results()))
    adam = figures.LOOKS["Adam"].colour
    assert adam in {line.get_color() for line in figure.axes[0].lines}
    assert adam not in {line.get_color() for line in figure.axes[3].lines}


def test_no_two_methods_of_a_figure_share_a_colour_or_a_marker():
    for _, layout in FIGURES.values():
        for one, other in itertools.combinations(layout.methods, 2):
            assert figures.LOOKS[one].colour != figures.LOOKS[other].colour
            assert figures.LOOKS[one].marker != figures.LOOKS[other].marker
            assert figures.LOOKS[one].dashes != figures.LOOKS[other].dashes


def test_bands_reach_from_the_smallest_repeat_to_the_largest(written_results):
    results = written_results()
    axis = figures.draw(1, Reader(results)).axes[1]
    values = results.curves("adult", "batch=50", "SGDOL Global")["mean_squared_gradient"].values
    edges = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert edges.max() == pytest.approx(values.max())
    assert edges.min() == pytest.approx(values[:, -1].min())


def test_files_are_the_same_bytes_each_time_and_carry_no_date(written_results, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        figures.save(figures.draw(4, Reader(written_results())), tmp_path / name, "figure4")
    for suffix in ("png", "svg"):
        one, two = ((tmp_path / name / f"figure4.{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two
    assert b"<dc:date>" not in (tmp_path / "one" / "figure4.svg").read_bytes()


def test_only_the_figures_with_runs_are_written(written_results, tmp_path):
    told = []
    figures.write_figures(Reader(written_results(missing=("adult",))), tmp_path, (1, 3), progress=told.append)
    assert told == ["figure3", "tuning", "evaluations", "coordinate"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}.{suffix}" for name in told for suffix in ("png", "svg")
    )


def test_a_figure_that_the_paper_does_not_have_is_refused(written_results):
    with pytest.raises(ValueError, match="figure must be one of 1, 2, 3, 4, got 5"):
        figures.draw(5, Reader(written_results()))


@pytest.mark.parametrize(
    ("left", "diverged", "text", "points"),
    [(-1, False, "$f(x_T)$ = 0.99", [100]), (50, True, "3 of 3 diverged", [50, 1])],
    ids=["fled", "lost"],
)
def test_a_run_that_left_for_the_flat_region_is_named_and_one_that_diverged_ends_there(
    written_results, left, diverged, text, points
):
    class Left(written_results):
        def curves(self, experiment, noise, method):
            curves = super().curves(experiment, noise, method)
            if (noise, method) == ("batch=50", "AMSGrad"):
                curves["objective"][:, left:] = 0.99
                curves["diverged"][:] = diverged
            return curves

    axis = figures.draw(4, Reader(Left())).axes[1]
    assert [each.get_text() for each in axis.texts] == [text]
    lines = [line for line in axis.lines if line.get_color() == figures.LOOKS["AMSGrad"].colour]
    assert [len(line.get_xdata()) for line in lines] == points
