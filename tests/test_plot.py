"""The figure shows the history's numbers, and errors say what a history is."""

import base64
import math
import sys

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from processes import LIMIT, output

import sgdol

PANELS = ("step_size", "signal_to_noise", "noise_scale", "skipped")


def row(t, **values):
    usual = {"step": 10 * t, "step_size": 0.5 / t, "signal_to_noise": 1 / t, "noise_scale": 3.0 * t, "skipped": 0}
    return {**usual, **values}


HISTORY = [row(t, skipped=t // 4) for t in range(1, 9)]


def curves(panel) -> dict:
    """Each line by its label; what is drawn for orientation has none."""
    lines = [line for line in panel.lines if isinstance(line, Line2D) and len(line.get_xdata()) > 2]
    return {line.get_label(): line for line in lines}


def drawn(figure) -> list:
    return [list(next(iter(curves(panel).values())).get_ydata()) for panel in figure.axes]


def test_each_panel_shows_its_quantity_against_the_step():
    figure = sgdol.plot(HISTORY)
    assert isinstance(figure, Figure)
    assert drawn(figure) == [[r[name] for r in HISTORY] for name in PANELS]
    for panel in figure.axes:
        assert list(next(iter(curves(panel).values())).get_xdata()) == [r["step"] for r in HISTORY]
    assert [panel.get_yscale() for panel in figure.axes] == ["log", "log", "log", "linear"]
    assert all(panel.get_title(loc="left") and panel.get_ylabel() for panel in figure.axes)
    assert [panel.get_xlabel() for panel in figure.axes] == ["", "", "step", "step"]


@pytest.mark.parametrize(
    "form",
    [
        lambda rows: type("Log", (), {"history": rows})(),
        lambda rows: {name: [r[name] for r in rows] for name in rows[0]},
        lambda rows: [{f"sgdol/{name}" if name != "step" else name: v for name, v in r.items()} for r in rows],
        lambda rows: [r for pair in zip(rows, [{"eval_loss": 1.0, "step": 5}] * len(rows), strict=True) for r in pair],
        lambda rows: [{**r, "loss": 1.0, "note": "any text"} for r in rows],
        lambda rows: [r for one in rows for r in (one, {**dict.fromkeys(one, math.nan), "loss": 1.0})],
        lambda rows: [{name: str(value) for name, value in r.items()} for r in rows] + [dict.fromkeys(rows[0], "")],
    ],
    ids=["log", "columns", "tracker", "evaluations-between", "more-names", "table-with-holes", "csv"],
)
def test_every_form_of_a_history_gives_the_same_curves(form):
    assert drawn(sgdol.plot(form(HISTORY))) == drawn(sgdol.plot(HISTORY))


def test_a_history_without_steps_is_numbered_from_one():
    rows = [{name: value for name, value in r.items() if name != "step"} for r in HISTORY]
    (line,) = curves(sgdol.plot(rows).axes[0]).values()
    assert list(line.get_xdata()) == list(range(1, 9))


def with_groups(count, same=()):
    return [
        {"step": t, **{f"step_size/g{i}": (1.0 if i in same else i + 1) / t for i in range(count)}} for t in range(1, 6)
    ]


def test_each_group_has_its_own_colour_and_dashes():
    panel = sgdol.plot(with_groups(6)).axes[0]
    lines = curves(panel)
    assert list(lines) == [f"g{i}" for i in range(6)]
    assert len({line.get_color() for line in lines.values()}) == 6
    assert len({str(line._unscaled_dash_pattern) for line in lines.values()}) == 6
    assert [text.get_text() for text in panel.get_legend().get_texts()] == list(lines)


def test_groups_with_the_same_step_sizes_are_drawn_once():
    assert list(curves(sgdol.plot(with_groups(3, same=(0, 2))).axes[0])) == ["g0, g2", "g1"]


def test_many_groups_are_drawn_as_their_range():
    panel = sgdol.plot(with_groups(40)).axes[0]
    (line,) = curves(panel).values()
    assert line.get_label() == "median and range of 40"
    assert line.get_ydata()[0] == 21.0
    (band,) = panel.collections
    assert band.get_datalim(panel.transData).y0 == 1 / 5
    assert band.get_datalim(panel.transData).y1 == 40.0


def test_what_a_logarithm_cannot_show_is_a_gap_and_said_so():
    rows = [row(1), row(2, noise_scale=-5.0), row(3, noise_scale=math.inf), row(4, step_size=0.0), row(5)]
    figure = sgdol.plot(rows)
    eta, _, scale, _ = drawn(figure)
    assert [math.isnan(y) for y in eta] == [False, False, False, True, False]
    assert [math.isnan(y) for y in scale] == [False, True, True, False, False]
    assert [text.get_text() for text in figure.axes[2].get_legend().get_texts()] == ["no signal measured"]
    (shade,) = figure.axes[2].patches
    assert (shade.get_x(), shade.get_width()) == (10, 30)


def test_where_no_noise_is_seen_the_rest_of_the_curve_keeps_its_scale():
    rows = [row(t, signal_to_noise=2.0**52 if t < 4 else 3.0 / t, noise_scale=0.0 if t < 4 else t) for t in range(1, 9)]
    figure = sgdol.plot(rows)
    for panel in figure.axes[1:3]:
        (line,) = curves(panel).values()
        assert [math.isnan(y) for y in line.get_ydata()] == [True] * 3 + [False] * 5
        assert [text.get_text() for text in panel.get_legend().get_texts()] == ["no noise measured"]
        assert panel.get_ylim()[1] < 100


def test_a_single_record_and_one_without_any_value_can_be_drawn(tmp_path):
    figure = sgdol.plot([row(1, signal_to_noise=math.nan, noise_scale=math.nan)])
    assert [text.get_text() for text in figure.axes[2].texts] == ["no value yet"]
    figure.savefig(tmp_path / "one.png")


def test_a_point_between_two_gaps_is_a_dot():
    scales = [-1.0, 7.0, -1.0, 3.0, 4.0]
    (line,) = curves(sgdol.plot([row(t, noise_scale=y) for t, y in enumerate(scales, start=1)]).axes[2]).values()
    assert line.get_markevery() == [1]
    assert line.get_marker() == "o"


def test_a_step_size_that_stays_at_zero_is_said_to():
    figure = sgdol.plot([row(t, step_size=0.0) for t in range(1, 4)])
    assert [text.get_text() for text in figure.axes[0].texts] == ["nothing above zero"]


def test_it_draws_into_a_figure_or_axes_that_it_is_given():
    figure = Figure()
    assert sgdol.plot(HISTORY, figure=figure) is figure
    other = Figure()
    assert sgdol.plot(HISTORY, axes=other.subplots(4, 1)) is other
    assert [panel.get_xlabel() for panel in other.axes] == ["step"] * 4
    grid = Figure()
    assert sgdol.plot(HISTORY, axes=grid.subplots(2, 2)) is grid
    assert drawn(figure) == drawn(other) == drawn(grid)
    part = Figure().subfigures(1, 2)[0]
    assert len(sgdol.plot(HISTORY, figure=part).axes) == 4


def test_matplotlibs_global_state_is_left_alone():
    before = dict(mpl.rcParams)
    figure = sgdol.plot(HISTORY)
    assert dict(mpl.rcParams) == before
    program = (
        "import sys, sgdol; sgdol.plot([{'step_size': 0.5}]); assert callable(sgdol.plot); "
        "print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    assert output([sys.executable, "-c", program]).split() == ["False", "False"]
    assert figure.canvas.manager is None


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"sgdol\.plot needs .*pip install 'sgdol\[plot\]'"):
        sgdol.plot(HISTORY)


@pytest.mark.parametrize(
    ("history", "error", "message"),
    [
        ([], ValueError, "history is empty"),
        ({}, ValueError, "history is empty"),
        ({"step": [], "step_size": []}, ValueError, "history is empty"),
        ([{"loss": 1.0, "step": 1}], ValueError, "history has no step_size: its names are loss, step"),
        ({"step": [1, 2], "step_size": [0.5]}, ValueError, "columns of equal length"),
        ({"step": 1, "step_size": 0.5}, ValueError, "columns of equal length"),
        (None, TypeError, "history must be a Log, a list of dicts or a dict of columns, got NoneType"),
        ("runs/", TypeError, "history must be a Log, a list of dicts or a dict of columns, got str"),
        ([0.5, 0.4], TypeError, "history must be a list of dicts, got one of float"),
        ([{"step_size": "small"}], TypeError, "history must hold numbers, got step_size='small'"),
    ],
    ids=["list", "dict", "columns", "names", "unequal", "scalars", "none", "text", "numbers", "words"],
)
def test_a_wrong_history_is_refused_with_a_reason(history, error, message):
    with pytest.raises(error, match=message):
        sgdol.plot(history)


def test_wrong_axes_are_refused():
    with pytest.raises(ValueError, match=r"axes must be 4, for step_size, .*; got 2"):
        sgdol.plot(HISTORY, axes=Figure().subplots(1, 2))
    with pytest.raises(ValueError, match="give axes or figure, not both"):
        sgdol.plot(HISTORY, axes=Figure().subplots(2, 2), figure=Figure())


def test_a_notebook_shows_the_figure_as_it_is():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cell = nbformat.v4.new_code_cell(
        "import sgdol\nsgdol.plot([{'step': t, 'step_size': 1 / t, 'skipped': 0} for t in range(1, 9)])"
    )
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=LIMIT / 2, startup_timeout=LIMIT / 2).execute()
    pictures = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1
    assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")


COUNTS = {"updates": 10, "evaluations": 13, "rejections": 1 / 4, "rollbacks": 1 / 6}
FREE = [
    {**row(t, loss=2.0 / t, step_size=0.1 * t, smoothness=4.0 / t), **{name: int(x * t) for name, x in COUNTS.items()}}
    for t in range(1, 9)
]


def test_a_history_with_m_shows_loss_m_look_backs_rejections_and_rollbacks():
    figure = sgdol.plot(FREE)
    titles = ("loss", "step size", "smoothness", "signal-to-noise", "noise scale", "events")
    assert all(word in panel.get_title(loc="left") for word, panel in zip(titles, figure.axes, strict=True))
    assert drawn(figure)[:3] == [[r[name] for r in FREE] for name in ("loss", "step_size", "smoothness")]
    counts = {label: list(line.get_ydata()) for label, line in curves(figure.axes[5]).items()}
    assert counts["look-backs"] == [3 * t for t in range(1, 9)]
    assert counts["rejections"] == [r["rejections"] for r in FREE]
    assert counts["rollbacks"] == [r["rollbacks"] for r in FREE]


def test_a_positive_loss_that_falls_by_more_than_ten_has_a_logarithmic_axis():
    def scale(losses):
        rows = [{**row, "loss": loss} for row, loss in zip(FREE, losses, strict=False)]
        return sgdol.plot(rows).axes[0].get_yscale()

    assert scale([5.0, 1.0, 0.4]) == "log"
    assert scale([5.0, 1.0, 0.6]) == "linear"
    assert scale([5.0, 1.0, -0.1]) == "linear"


def test_the_legend_of_events_has_their_final_counts():
    texts = [text.get_text() for text in sgdol.plot(FREE).axes[5].get_legend().get_texts()]
    assert texts == ["look-backs: 24", "rejections: 2", "rollbacks: 1", "skipped batches: 0"]


def test_rejections_and_rollbacks_are_marked_where_the_loss_is_drawn():
    marks = {line.get_label(): list(line.get_xdata()) for line in sgdol.plot(FREE).axes[0].lines}
    assert marks["rejections"] == [40, 80]
    assert marks["rollbacks"] == [60]


def test_a_log_of_sgdol_free_has_what_the_figure_shows():
    torch = pytest.importorskip("torch")
    from sgdol.torch import Log, SGDOLFree, backward

    torch.manual_seed(0)
    model, log = torch.nn.Linear(3, 1), Log(every=5)
    opt = SGDOLFree(model.parameters())
    for _ in range(10):
        backward(lambda part: (model(part) - part.sum(1, keepdim=True)).square().mean(), torch.randn(8, 3))
        opt.step()
        opt.zero_grad()
        log(opt)
    assert len(sgdol.plot(log).axes) == 6


def test_axes_for_sgdol_free_are_six():
    with pytest.raises(ValueError, match=r"axes must be 6, for loss, .*; got 4"):
        sgdol.plot(FREE, axes=Figure().subplots(2, 2))
