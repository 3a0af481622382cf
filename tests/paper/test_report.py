"""The report: one page that needs nothing else, and says what the results say."""

from __future__ import annotations

import base64
import html.parser
import json
import re

import pytest

from sgdol.paper import claims, figures, report
from sgdol.paper.configuration import Configuration
from sgdol.paper.measures import Reader
from sgdol.paper.verdict import Claim, Part


@pytest.fixture(scope="module")
def page(written_page):
    return written_page.read_text(encoding="utf-8"), claims.read_claims(written_page.parent / "claims.json")


def test_nothing_is_loaded_from_elsewhere(page):
    text, _ = page
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert "url(" not in text
    assert "@import" not in text


def test_every_tag_is_closed_and_every_id_is_one(page):
    text, _ = page
    stack, ids = [], []

    class Checker(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            ids.extend(value for name, value in attrs if name == "id")
            if tag not in ("meta", "img", "br"):
                stack.append(tag)

        def handle_endtag(self, tag):
            assert stack.pop() == tag

    Checker().feed(text)
    assert stack == []
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in re.findall(r'href="(#[^"]+)"', text)} <= set(ids)


def test_the_summary_and_the_first_figure_come_first(page):
    text, found = page
    body = text[text.index("<body>") :]
    said = "Of 17 findings 15 hold and 2 hold in part. All 16 facts of the set-up hold."
    assert report.words.sentence(found) == said
    assert body.index(said) < body.index('id="figure1"') < body.index('id="claims"') < body.index('id="figure4"')


def test_a_short_run_says_that_it_is_one(page):
    assert "A short run: T = 10,000." in page[0]


def test_every_claim_is_there_with_its_verdict_and_numbers(page):
    text, found = page
    for claim in found:
        assert f'id="{claim.id}"' in text
        assert report.number(claim.headline.measured) in text
    assert "Sentences without a check" in text


def test_claims_are_grouped_and_linked_with_their_figures(page):
    text, found = page
    places = [text.index(f'id="{kind}s"') for kind in ("finding", "set-up")]
    assert places == sorted(places)
    for claim in found:
        item = text[text.index(f'id="{claim.id}"') :].partition("</li>")[0]
        assert [f'href="#figure{n}"' in item for n in (1, 4)] == [n in claim.figures for n in (1, 4)]
        assert ('<span class="mark">main</span>' in item) == any(part.main for part in claim.parts)
    figure = text[text.index('id="figure4"') :].partition("</figure>")[0]
    assert 'href="#others-similar"' in figure


def test_it_has_rates_summary_readings_versions_and_the_command(page):
    text, _ = page
    for words in ("AdaGrad Coordinate", "0.002", "Baydin", "sgdol reproduce", "jax", "1 of 40", "numpy"):
        assert words in text
    assert "<dt>seed</dt><dd>0</dd>" in text


def test_times_are_summed(page):
    text, _ = page
    times = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", text[text.index("<h3>What took the time</h3>") :])
    shares = [("adult: tuning", "1 min 23 s, 66 %"), ("adult: batch=1", "42.5 s, 34 %")]
    assert times == [*shares, ("altogether", "2 min 06 s")]


def test_the_best_of_each_noise_is_marked_once(page):
    text, _ = page
    section = text[text.index('id="summary"') :].partition("</section>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)
    best = [re.findall(r">([^<>]+)</td>", row.replace("\n", ""))[:3] for row in rows if "best</span>" in row]
    assert len(best) == 6
    assert ["adult", "batch=1"] in [row[:2] for row in best]
    assert not any("1 of 40" in row for row in rows if "best</span>" in row)


def test_downloads_are_the_files_themselves(page, written_page):
    text, _ = page
    for name in ("summary.csv", "claims.json"):
        address = re.search(rf'href="data:[^;]*;base64,([^"]*)" download="{re.escape(name)}"', text).group(1)
        assert base64.b64decode(address) == (written_page.parent / name).read_bytes()


def test_the_curves_are_in_the_page_in_the_order_of_the_paper(page):
    text, _ = page
    data = json.loads(re.search(r'id="curves-data">(.*?)</script>', text, re.DOTALL).group(1))
    assert [experiment["name"] for experiment in data["experiments"]] == ["adult", "rosenbrock"]
    assert list(data["looks"])[:3] == ["SGDOL Global", "SGDOL Coordinate", "SGD"]
    curve = data["experiments"][0]["panels"][1]["curves"]["SGDOL Global"]
    values = curve["mean_squared_gradient"]
    assert curve["t"][0] == 1
    assert curve["t"][-1] == 10_000
    assert all(
        low <= mean <= high for low, mean, high in zip(values["low"], values["mean"], values["high"], strict=True)
    )
    assert "step_size" not in data["experiments"][0]["panels"][1]["curves"]["Adam"]


def test_text_is_escaped(written_results, tmp_path):
    claim = Claim("x", "a < b & c", "w", "c", "r", (Part("<b>bold</b>", 1.0, "<=", 2.0),))
    text = report.render(Reader(written_results(missing=("adult", "rosenbrock"))), [], [claim], tmp_path)
    assert "a &lt; b &amp; c" in text
    assert "<b>bold</b>" not in text


def test_a_section_with_prose_a_table_and_a_picture_can_be_added(written_results, tmp_path):
    (tmp_path / "bowl.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    section = report.Section(
        "bowl",
        "Is it a bowl?",
        ("Along x_t it is < 1.",),
        pictures=(report.Picture("bowl", "The bowl", "From above."), report.Picture("absent", "Not there")),
        tables=(report.Table(("where", "share"), [("here", report.Cell("50 %", 0.5, "best"))], numeric=(1,)),),
    )
    read = Reader(written_results(missing=("adult", "rosenbrock")))
    text = report.render(read, [], [], tmp_path, sections=[section])
    for words in ('href="#bowl"', "Along x<sub>t</sub> it is &lt; 1.", "<b>The bowl.</b>", 'data-order="0.5"', "50 %"):
        assert words in text
    assert "Not there" not in text


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (Configuration(), "sgdol reproduce --horizon 100000 --seed 0 --out results"),
        (
            Configuration(figures=(2,), horizon=50, repeats=3, seed=4, noise_model="total", data="my data"),
            "sgdol reproduce --figure 2 --horizon 50 --repeats 3 --noise total --seed 4 --data 'my data' --out results",
        ),
        (
            Configuration(only=("SGD GL",), adagrad_form="delayed"),
            "sgdol reproduce --method 'SGD GL' --horizon 100000 --adagrad delayed --seed 0 --out results",
        ),
    ],
)
def test_the_command_makes_the_same_configuration(configuration, words):
    assert report.command(configuration) == words


def test_the_template_and_its_style_ship_with_the_package():
    from importlib import resources

    folder = resources.files("sgdol.paper.report") / "templates"
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.css", "report.js"}
    assert figures.LOOKS.keys() >= {"SGDOL Global", "SGD GL"}
