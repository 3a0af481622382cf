"""`make release-check` takes minutes and a network; what it looks for is looked at here."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "scripts/release_check.py")
    module = sys.modules["release_check"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path):
    """An unpacked sdist whose README promises a target, a file and a script, and which has them."""
    (tmp_path / "README.md").write_text(
        "`make test`, [a page](docs/a.md#part), `python scripts/draw.py`, [web](https://a.b/c.md)"
    )
    (tmp_path / "Makefile").write_text("test: setup\n\ttrue\n")
    for name in ("docs/a.md", "scripts/draw.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    return tmp_path


def test_every_extra_that_is_declared_is_tried_with_something_that_exists(script):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {extra.name for extra in script.EXTRAS} == {"", *declared}
    assert all(extra.runs for extra in script.EXTRAS)
    named = [Path(part) for extra in script.EXTRAS for command in extra.runs.values() for part in command[1:2]]
    assert all(path.is_file() for path in named if path.suffix == ".py")
    assert all((ROOT / name).is_file() for name in script.TESTS)


def test_the_readme_of_this_repository_keeps_its_promises_and_has_a_whole_program_with_torch(script):
    compile(script.readme_program(), "README.md", "exec")
    script.promises_are_kept(ROOT)


def test_a_readme_whose_promises_are_kept_passes(script, source):
    script.promises_are_kept(source)


@pytest.mark.parametrize("name", ["docs/a.md", "scripts/draw.py", "make test"])
def test_what_is_not_there_is_named(script, source, name):
    if name == "make test":
        (source / "Makefile").write_text("lint:\n\ttrue\n")
    else:
        (source / name).unlink()
    with pytest.raises(AssertionError, match=name):
        script.promises_are_kept(source)


def test_a_tag_of_another_version_is_refused(script):
    with pytest.raises(AssertionError, match=r"the tag is v1\.0, and the version 0\.2\.0"):
        script.tag_is_of(Path("sgdol-0.2.0-py3-none-any.whl"), "v1.0")


def test_a_failed_check_is_remembered_and_what_it_printed_is_shown(script, capsys):
    check = script.Checks()
    assert not check("it runs", lambda: script.run(sys.executable, "-c", "print('why'); raise SystemExit(3)"))
    assert check.failed == ["it runs"]
    assert "FAILED  it runs\nwhy" in capsys.readouterr().out
