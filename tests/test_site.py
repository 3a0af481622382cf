"""The README and the site: links lead somewhere, examples run, and the reference has every public name."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import sgdol

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
GALLERY = sorted(page for page in (DOCS / "gallery").glob("*.md") if page.stem != "index")


def named(pages):
    return [str(page.relative_to(ROOT)) for page in pages]


def prose(page: Path) -> str:
    """The page without its code, in which brackets and parentheses mean something else."""
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """What a link may name in a page: labels and slugs of headings, those of the files that it includes too."""
    text = page.read_text()
    for included in re.findall(r"^```\{include\} (\S+)", text, flags=re.M):
        text += "\n" + (page.parent / included).read_text()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return set(re.findall(r"^\(([\w-]+)\)=$", text, flags=re.M)) | slugs | {re.sub("-+", "-", slug) for slug in slugs}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_to_a_file_and_a_place_in_it(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, place = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if place:
            assert place in anchors(file), target


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for page in PAGES:
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), flags=re.S):
            entries = [line for line in tree.splitlines() if line and not line.startswith(":")]
            names = [re.sub(r".*<(.*)>", r"\1", entry) for entry in entries]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert {page.resolve() for page in PAGES} - listed == {(DOCS / "index.md").resolve()}


def torch_script() -> dict[str, object]:
    """What somebody's own script has defined before it comes to the optimizer."""
    import torch

    torch.manual_seed(0)
    return {
        "torch": torch,
        "model": torch.nn.Linear(10, 1),
        "loader": [(torch.randn(32, 10), torch.randn(32, 1)) for _ in range(12)],
        "criterion": torch.nn.MSELoss(),
        "evaluate": lambda model: model.eval(),
    }


def jax_script() -> dict[str, object]:
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (3, 8, 4))
    return {
        "params": jnp.zeros(4),
        "loss": lambda w, x, y: jnp.mean((x @ w - y) ** 2),
        "loss_and_stats": lambda w, x, y: (jnp.mean((x @ w - y) ** 2), {"mean": x.mean(0)}),
        "batches": [(rows, rows.sum(1)) for rows in x],
    }


@pytest.mark.parametrize(
    ("page", "script"),
    [
        ("../README", torch_script),
        ("index", torch_script),
        ("guide/start", torch_script),
        ("guide/coming_from", torch_script),
        ("guide/without_learning_rate", torch_script),
        ("guide/mixed_precision", torch_script),
        ("guide/optax", jax_script),
    ],
)
def test_the_examples_of_a_page_run_one_after_the_other(page, script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # they save what they have trained
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.S):
        names |= script()
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_example_is_python(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", GALLERY, ids=lambda page: page.stem)
def test_an_entry_of_the_gallery_has_a_picture_and_a_baseline(page):
    code = "\n".join(re.findall(r"```\{code-cell\} ipython3\n(.*?)```", page.read_text(), flags=re.S))
    assert "plt.subplots" in code
    assert re.search(r"torch\.optim\.(SGD|Adam)|optax\.(sgd|adam)|def steps_of_sgd", code)


def test_the_reference_has_every_public_module_and_name():
    text = (DOCS / "reference.md").read_text()
    private = {"cli", "paper", "plotting", "__main__"}  # programs, and a module whose one name is sgdol.plot
    modules = {m.name for m in pkgutil.iter_modules(sgdol.__path__) if not m.name.startswith("_")} - private
    assert {name for name in modules if not re.search(rf"\bsgdol\.{name}\b", text)} == set()
    for module in ("sgdol.torch", "sgdol.jax"):
        for name in importlib.import_module(module).__all__:
            assert re.search(rf":: (sgdol\.\w+\.)?{name}$", text, flags=re.M), f"{module}.{name}"
    for name in set(sgdol.__all__) - {"__version__"}:
        assert re.search(rf"\b{name}\b", text), name
