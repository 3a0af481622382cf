"""The report: one page that needs nothing else, and says what the results say."""

from __future__ import annotations

import html.parser
import re

import pytest

from sgdol.paper import claims, figures, report
from sgdol.paper.measures import Reader
from sgdol.paper.results import Configuration
from sgdol.paper.verdict import Claim, Part


@pytest.fixture(scope="module")
def page(written_results, tmp_path_factory):
    results = written_results(repeats=3)
    folder, read = tmp_path_factory.mktemp("report"), Reader(results)
    figures.save(figures.draw(4, read), folder, "figure4")
    found = claims.check_claims(read, theorems=False)
    path = report.write_report(read, results.summary(), found, folder, {"tuning": 83.0})
    return path.read_text(encoding="utf-8"), found


def test_nothing_is_loaded_from_elsewhere(page):
    text, _ = page
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert "url(" not in text
    assert "@import" not in text


def test_every_tag_is_closed(page):
    text, _ = page
    stack = []

    class Checker(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "img", "br", "line", "circle"):
                stack.append(tag)

        def handle_endtag(self, tag):
            assert stack.pop() == tag

    Checker().feed(text)
    assert stack == []


def test_every_claim_is_there_with_its_verdict_and_numbers(page):
    text, found = page
    for claim in found:
        assert f'id="{claim.id}"' in text
        assert report.number(claim.headline.measured) in text
    assert "Sentences without a check" in text


def test_it_has_rates_summary_readings_versions_times_and_the_command(page):
    text, _ = page
    for words in ("AdaGrad Coordinate", "0.002", "Baydin", "sgdol reproduce", "jax", "1 min 23 s", "1 of 3", "numpy"):
        assert words in text


def test_text_is_escaped(written_results, tmp_path):
    claim = Claim("x", "a < b & c", "w", "c", "r", (Part("<b>bold</b>", 1.0, "<=", 2.0),))
    text = report.render(Reader(written_results()), [], [claim], tmp_path)
    assert "a &lt; b &amp; c" in text
    assert "<b>bold</b>" not in text


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (Configuration(), "sgdol reproduce --horizon 100000 --seed 0 --out results"),
        (
            Configuration(figures=(2,), horizon=50, repeats=3, seed=4, noise_model="total", data="my data"),
            "sgdol reproduce --figure 2 --horizon 50 --repeats 3 --noise total --seed 4 --data 'my data' --out results",
        ),
    ],
)
def test_the_command_makes_the_same_configuration(configuration, words):
    assert report.command(configuration) == words
