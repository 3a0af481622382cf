"""What the terminal shows: characters that every stream has, and how much is left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sgdol.paper import terminal
from sgdol.paper.terminal import Bars, Whole
from sgdol.paper.verdict import Claim, Part


@pytest.mark.parametrize(
    ("encoding", "text", "printed"),
    [
        ("ascii", "“a” ≤ 1.2 × 10⁻⁴ ± 3", '"a" <= 1.2 x 10^-4 +- 3'),
        ("ascii", "Mη² ‖∇f‖ – Łojasiewicz é ☃", "M eta^2 ||grad f|| - Lojasiewicz e ?"),
        ("cp1252", "“a” ≤ 1 ± 3", "“a” <= 1 ± 3"),
        ("utf-8", "“a” ≤ ☃", "“a” ≤ ☃"),
    ],
)
def test_a_stream_spells_out_what_its_encoding_lacks(encoding, text, printed):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    terminal.make_printable(stream)
    stream.write(text)
    stream.flush()
    assert raw.getvalue().decode(encoding) == printed


def test_codes_of_emoji_and_markup_stay_as_they_are(capsys):
    terminal.console().print("results/:car:/[bold]x")
    assert capsys.readouterr().out == "results/:car:/[bold]x\n"


def cost(part):
    return 10.0 if part.startswith("adult") else 1.0


PARTS = {"rosenbrock: sigma=5: SGD": 100, "adult: batch=1: SGD": 100, "adult: tuning": 90}


def test_the_share_of_everything_counts_what_an_iteration_costs():
    bars = Bars(Console(file=io.StringIO()), cost, str)
    bars.plan(PARTS)
    assert bars.whole.total == 2000
    bars.advance("adult: batch=1: SGD", 50)
    assert bars.whole.share == 0.25


def test_what_was_done_before_neither_counts_nor_speeds_up_the_estimate():
    bars = Bars(Console(file=io.StringIO()), cost, str)
    bars.plan(PARTS)
    bars.finish("adult: tuning", 0.0)
    assert (bars.whole.total, bars.whole.done) == (1100, 0)
    bars.finish("adult: batch=1: SGD", 3.0)
    assert bars.whole.share == 1000 / 1100
    assert bars.times() == {"adult: tuning": 0.0, "adult: batch=1": 3.0}


def test_the_time_left_follows_from_the_pace():
    whole = Whole({"a": 100.0}, clock=iter([0.0, 5.0, 30.0]).__next__)
    assert whole.left() is None
    whole.advance("a", 25.0)
    assert whole.left() == 5.0 * 3
    whole.advance("a", 25.0)
    assert whole.left() == 30.0


def test_a_terminal_has_a_bar_for_everything_with_the_time_left():
    shown = io.StringIO()
    with Bars(Console(file=shown, force_terminal=True, width=120), cost, lambda seconds: "2 min") as bars:
        bars.plan(PARTS)
        bars.advance("adult: batch=1: SGD", 50)
    text = shown.getvalue()
    assert "everything" in text
    assert "25%" in text
    assert "about 2 min left" in text


def test_without_a_terminal_every_part_done_is_a_line_with_the_share():
    shown = io.StringIO()
    bars = Bars(Console(file=shown, width=120), cost, lambda seconds: f"{seconds:.0f} s")
    bars.plan(PARTS)
    bars.finish("adult: batch=1: SGD", 3.0)
    bars.finish("adult: tuning", 0.0)
    first, second = shown.getvalue().splitlines()
    assert first.startswith("adult: batch=1: SGD")
    assert "3 s" in first
    assert "50%" in first
    assert "done before" in second
    assert "91%" in second


def test_claims_are_shown_by_kind_with_the_part_that_decides(capsys):
    main, other = Part("at noise 5", 1.0, "<=", 2.0, main=True), Part("at noise 1", 3.0, "<=", 2.0)
    claims = [
        Claim("a-fact", "s", "w", "c", "r", (Part("rows", 7.0, ">=", 5.0),), kind="set-up"),
        Claim("found", "s", "w", "c", "r", (main, other), kind="finding"),
        Claim("proved", "s", "w", "c", "r", (main,), kind="theorem"),
    ]
    terminal.print_claims(terminal.console(), claims)
    out = capsys.readouterr().out
    places = [
        out.index(words) for words in ("Theorems", "proved", "Findings", "found", "Facts of the set-up", "a-fact")
    ]
    assert places == sorted(places)
    assert "main part: at noise 5: 1 (≤ 2)" in out
    assert "but: at noise 1: 3 (≤ 2)" in out
    assert out.splitlines()[-1] == "theorems: 1 holds; findings: 1 holds in part; facts of the set-up: 1 holds"
