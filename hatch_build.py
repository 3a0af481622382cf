"""What is known only when a release is built: where the project is, and so where the README's links lead.

A package index shows the README without the repository around it, where a relative link or image is broken. The release
workflow says where they are, in SGDOL_URL (the repository's address), SGDOL_REF (the tag) and SGDOL_DOCS (the site's
address); then links and images are made absolute and the project's addresses are declared. A build on somebody's desk
knows no address and invents none: links become their text, and images what they show.

The names are our own, and not the ones that a workflow has anyway, because other people's workflows build this too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!\w+:)(?P<target>[^)]+)\)")
"""A link or an image whose target has no scheme: a file of this repository, or a heading."""


def standalone(readme: str, url: str | None, ref: str) -> str:
    """The README as it reads away from the repository; code is left as it is.

    >>> standalone("see [the table](docs/a.md) ![A curve.](docs/a.png)", "https://host/us/sgdol", "v1")
    'see [the table](https://host/us/sgdol/blob/v1/docs/a.md) ![A curve.](https://host/us/sgdol/raw/v1/docs/a.png)'
    >>> standalone("see [the table](docs/a.md) ![A curve.](docs/a.png)", None, "v1")
    'see the table *A curve.*'
    """

    def replacement(link: re.Match[str]) -> str:
        image, text, target = link["image"], link["text"], link["target"]
        if url is None:
            return f"*{text}*" if image else text
        path = f"README.md{target}" if target.startswith("#") else target
        return f"{image}[{text}]({url}/{'raw' if image else 'blob'}/{ref}/{path})"

    pieces = re.split(r"(^```.*?^```$)", readme, flags=re.M | re.S)  # text, code, text, ...
    return "".join(piece if index % 2 else LINK.sub(replacement, piece) for index, piece in enumerate(pieces))


def addresses(url: str | None, ref: str, docs: str | None) -> dict[str, str]:
    """The project's addresses that follow from what is known; none if nothing is.

    >>> addresses(None, "v1", None)
    {}
    >>> addresses("https://host/us/sgdol", "v1", None)["Changelog"]
    'https://host/us/sgdol/blob/v1/CHANGELOG.md'
    """
    known = {"Documentation": docs} if docs else {}
    if url:
        known |= {"Source": url, "Issues": f"{url}/issues", "Changelog": f"{url}/blob/{ref}/CHANGELOG.md"}
    return known


class CustomMetadataHook(MetadataHookInterface):
    """Fills in `readme` and `urls`, which pyproject.toml declares dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them to the metadata of the project."""
        url = os.environ.get("SGDOL_URL", "").rstrip("/") or None
        ref = os.environ.get("SGDOL_REF") or "main"
        text = standalone((Path(self.root) / "README.md").read_text(encoding="utf-8"), url, ref)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {**addresses(url, ref, os.environ.get("SGDOL_DOCS")), **self.config["urls"]}
