"""The report in a real browser: what a reader can do with it, on a desk, on a phone, in the dark and on paper."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

from sgdol.paper import claims

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (Debian: apt-get install chromium)"),
]

AXE = Path(
    os.environ.get("AXE_CORE", Path(__file__).parents[2] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js")
)
SIZES = pytest.mark.parametrize("width", [1400, 400])
LIGHT = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


@pytest.fixture
def shown(browser, written_page):
    browser.open(written_page)
    yield browser
    assert browser.problems == []


@SIZES
@LIGHT
def test_it_opens_without_a_complaint_and_fits_the_window(browser, written_page, width, dark):
    browser.open(written_page, width=width, dark=dark)
    assert browser.problems == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelector('#figure1 img').naturalWidth") > 0


@SIZES
@LIGHT
@pytest.mark.skipif(not AXE.exists(), reason=f"there is no axe-core at {AXE} (make test-browser fetches it)")
def test_axe_finds_nothing(browser, written_page, width, dark):
    browser.open(written_page, width=width, dark=dark)
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.run(AXE.read_text(encoding="utf-8") + "; 0")
    found = "r.violations.map((v) => `${v.id}: ${v.nodes.length}, ${v.nodes[0].html}`)"
    assert browser.run(f"axe.run().then((r) => {found})") == []


@LIGHT
def test_text_stands_out_from_the_page(browser, written_page, dark):
    browser.open(written_page, dark=dark)
    ink, paper = browser.run("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    light = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
    assert (light[0] > light[1]) == dark


WRITTEN = sorted(check.id for check in claims.CHECKS if check.kind != "theorem")
"""What the written page claims: theorems are computed, not written."""
IN_PART = "document.querySelector('[data-show=part]')"


def test_the_filter_shows_one_verdict_and_a_link_brings_the_rest_back(shown):
    visible = "[...document.querySelectorAll('.claim')].filter((c) => c.checkVisibility()).map((c) => c.id)"
    everything = shown.run(visible)
    assert sorted(everything) == WRITTEN
    in_part = shown.run("[...document.querySelectorAll('.claim[data-verdict=part]')].map((c) => c.id)")
    shown.run(f"{IN_PART}.click()")
    assert shown.run(visible) == in_part
    assert 0 < len(in_part) < len(everything)
    empty = "[...document.querySelectorAll('.group')].filter((g) => !g.querySelector('[data-verdict=part]'))"
    assert not any(shown.run(f"{empty}.map((g) => g.checkVisibility())"))
    assert shown.run(f"{IN_PART}.getAttribute('aria-pressed')") == "true"
    shown.run("location.hash = '#phi'; new Promise((done) => setTimeout(done, 300))")
    assert shown.run(visible) == everything


def test_a_column_sorts_up_and_down_with_what_is_missing_last(shown):
    column = (
        "(() => [...document.querySelectorAll('#summary tbody tr')].map((r) => r.cells[{}].dataset.order ??"
        " r.cells[{}].textContent.trim()))()"
    )
    click = "document.querySelectorAll('#summary th button')[{}].click()"
    shown.run(click.format(4))
    values = [float(value) for value in shown.run(column.format(4, 4)) if value != "nan"]
    assert values == sorted(values)
    shown.run(click.format(4))
    values = [float(value) for value in shown.run(column.format(4, 4)) if value != "nan"]
    assert values == sorted(values, reverse=True)
    assert shown.run("document.querySelectorAll('#summary th')[4].getAttribute('aria-sort')") == "descending"
    shown.run(click.format(6))
    steps = shown.run(column.format(6, 6))
    first_missing = steps.index("nan")
    assert set(steps[first_missing:]) == {"nan"}


LINES = (
    "[...document.querySelectorAll('#curves-panels .panel:first-child path[data-method]')].map((p) => p.dataset.method)"
)


def test_a_method_can_be_taken_out_of_the_curves_and_put_back(shown):
    assert shown.run(LINES) == ["SGDOL Global", "SGD", "AdaGrad Global", "Adam"]
    button = "[...document.querySelectorAll('#curves-methods button')].find((b) => b.textContent === 'SGD')"
    shown.run(f"{button}.click()")
    assert shown.run(LINES) == ["SGDOL Global", "AdaGrad Global", "Adam"]
    assert shown.run(f"{button}.getAttribute('aria-pressed')") == "false"
    shown.run(f"{button}.click()")
    assert "SGD" in shown.run(LINES)


CHOOSE = (
    "(() => {{ const s = document.getElementById('{}'); s.value = '{}'; s.dispatchEvent(new Event('change')); }})()"
)


def test_another_experiment_and_quantity_can_be_chosen(shown):
    shown.run(CHOOSE.format("curves-experiment", 1))
    assert "SGD GL" in shown.run(LINES)
    shown.run(CHOOSE.format("curves-quantity", "step_size"))
    assert "Adam" not in shown.run(LINES)


READOUT = "document.getElementById('curves-readout').textContent"


def test_pointing_at_a_panel_reads_its_curves(shown):
    shown.run("document.getElementById('curves-panels').scrollIntoView()")
    x, y = shown.run(
        "(() => { const r = document.querySelector('#curves-panels svg').getBoundingClientRect();"
        " return [r.right - 3, r.top + r.height / 2]; })()"
    )
    shown.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    text = shown.run(READOUT)
    assert "iteration 10,000" in text
    assert all(method in text for method in ("SGDOL Global", "SGD", "AdaGrad Global", "Adam"))


def test_the_keyboard_reads_the_curves_too(shown):
    shown.run("document.querySelector('#curves-panels svg').focus()")
    for key in ("Home", "ArrowRight"):
        shown.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
    assert "iteration 1:" in shown.run(READOUT) or "iteration 2:" in shown.run(READOUT)


def test_the_read_out_follows_a_change_of_quantity_and_of_methods(shown):
    shown.run("document.querySelector('#curves-panels svg').dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}))")
    gradients = shown.run(READOUT)
    shown.run(CHOOSE.format("curves-quantity", "step_size"))
    steps = shown.run(READOUT)
    assert steps.split(":")[0] == gradients.split(":")[0]  # the same panel and iteration...
    assert steps != gradients  # ...with other numbers
    assert "Adam" not in steps.replace("AdaGrad", "")  # Adam has no step size
    shown.run("[...document.querySelectorAll('#curves-methods button')].find((b) => b.textContent === 'SGD').click()")
    assert "SGD " not in shown.run(READOUT).replace("SGDOL", "")
    shown.run("document.querySelectorAll('#curves-methods button[aria-pressed=true]').forEach((b) => b.click())")
    assert "none of the chosen methods" in shown.run(READOUT)


def test_ticks_are_round(shown):
    shown.run(CHOOSE.format("curves-quantity", "step_size"))
    labels = "document.querySelector('#curves-panels svg').querySelectorAll('text[text-anchor=end]')"
    ticks = [float(text) for text in shown.run(f"[...{labels}].map((label) => label.textContent)")]
    assert len(ticks) >= 3
    steps = {f"{b - a:.6g}" for a, b in pairwise(ticks)}
    assert len(steps) == 1
    assert f"{float(steps.pop()):.0e}"[0] in "125"


def test_a_figure_can_be_enlarged_on_a_phone_and_closed_again(browser, written_page):
    browser.open(written_page, width=400, height=800)
    browser.run("document.querySelector('#figure1 .enlarge').click(); new Promise((done) => setTimeout(done, 300))")
    assert browser.run("document.getElementById('large').open")
    assert browser.run("document.querySelector('.large-view img').getBoundingClientRect().width") > 1000
    assert browser.run("document.querySelector('.large-view').getBoundingClientRect().width") <= 400
    browser.run("document.getElementById('large-close').click()")
    assert not browser.run("document.getElementById('large').open")


def test_on_paper_the_evidence_is_there_whatever_was_hidden(browser, written_page):
    browser.open(written_page)
    browser.run(f"{IN_PART}.click()")
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    hidden = "[...document.querySelectorAll('.claim, .claim details table')].filter((e) => !e.checkVisibility()).length"
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(hidden) == 0
    assert browser.run("document.getElementById('curves').checkVisibility()") is False
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run("document.querySelectorAll('.claim details[open]').length") == 0
    assert browser.pdf().startswith(b"%PDF")


def test_without_scripts_the_page_is_still_a_report(browser, written_page, tmp_path):
    text = written_page.read_text(encoding="utf-8")
    plain = tmp_path / "plain.html"
    plain.write_text(text.replace('classList.add("js")', "classList.length"), encoding="utf-8")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(plain)
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.run("document.querySelectorAll('.claim').length") == len(WRITTEN)
    assert browser.run("[...document.querySelectorAll('.js-only')].some((e) => e.checkVisibility())") is False
