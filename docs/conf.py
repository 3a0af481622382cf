"""The documentation site: `make docs` builds it into docs/_build/html, without a network and without a warning."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy.typing
import optax
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

import sgdol

project = "sgdol"
author = "The sgdol developers"
project_copyright = "2026, The sgdol developers"
version = release = sgdol.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx-mathjax-offline",
]

# The gallery is executed: its pictures are what the code on the page makes. A page that fails, fails the build.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_show_tb = True
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
nb_render_image_options = {"width": "100%"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MATPLOTLIBRC", str(Path(__file__).parent / "matplotlibrc"))

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist", "attrs_inline"]
myst_heading_anchors = 3
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_templates", "README.md"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
add_module_names = False
python_maximum_signature_line_length = 88
nitpicky = False

html_theme = "furo"
html_title = f"sgdol {release}"
templates_path = ["_templates"]
html_context = {
    "paper": "https://proceedings.mlr.press/v97/zhuang19a.html",
    "repository": os.environ.get("SGDOL_URL", "").rstrip("/"),  # known where the site is published: see hatch_build.py
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
pygments_dark_style = "github-dark"
html_theme_options = {
    "sidebar_hide_name": False,
    "top_of_page_buttons": [],
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db4ef", "color-brand-content": "#7db4ef"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def let_pictures_be_enlarged(app: Sphinx, doctree: nodes.document) -> None:
    """Sphinx links a picture that is given a width to its file: on a phone, a tap shows it whole."""
    for image in doctree.findall(nodes.image):
        image.setdefault("width", "100%")


def keep_sentences_of_attributes(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon on the first line for the type; here it is half of a sentence."""
    if what in ("attribute", "data", "property") and lines:
        lines.insert(0, "\N{ZERO WIDTH SPACE}")


NAMED = {
    stringify_annotation(alias, "smart"): name
    for alias, name in {
        numpy.typing.ArrayLike: "ArrayLike",
        numpy.typing.NDArray[numpy.float64]: "NDArray",
        numpy.typing.NDArray[numpy.intp]: "NDArray",
        optax.ScalarOrSchedule: "ScalarOrSchedule",
    }.items()
}
"""Types that a reader knows by their name, and not by the long unions that they stand for."""


def write_signatures_for_readers(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Types by their names; arguments of type Never, which exist to be refused in a sentence, are left out."""
    for union, known in NAMED.items():
        signature, returns = (text and text.replace(union, known) for text in (signature, returns))
    if signature is not None:
        signature = re.sub(r", \*\*\w+: ~?(typing\.)?Never", "", signature)
        signature = re.sub(r"\*\w+: ~?(typing\.)?Never", "*", signature)
    return signature, returns


MOVED = {
    name: f"explanation/{name}"
    for name in (
        "theory",
        "without_smoothness",
        "unknown_smoothness",
        "convexity",
        "private",
        "scale",
        "claims",
        "benchmarks",
    )
} | {"engines": "guide/engines"}
"""Where pages are that had another address in version 0.1."""


def redirect_moved_pages(app: Sphinx, error: Exception | None) -> None:
    """Old addresses lead to the new ones."""
    if error is None and app.builder.name == "html":
        for old, new in MOVED.items():
            head = f'<meta charset="utf-8"><title>moved</title><meta http-equiv="refresh" content="0; url={new}.html">'
            page = f'<!doctype html>{head}<a href="{new}.html">{new}</a>\n'
            Path(app.outdir, f"{old}.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """What no option of Sphinx does."""
    app.connect("autodoc-process-signature", write_signatures_for_readers)
    app.connect("build-finished", redirect_moved_pages)
    app.connect("autodoc-process-docstring", keep_sentences_of_attributes, priority=400)
    app.connect("doctree-read", let_pictures_be_enlarged)
