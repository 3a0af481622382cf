"""The lowest versions that pyproject.toml allows, as a constraints file: `python scripts/lowest.py > lowest.txt`.

Dependencies, extras and the group `test`, each `name>=version` as `name==version`. torch is the one that
constraints.txt has, because its older builds cannot be had without several GB of CUDA.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lowest(requirements: list[str]) -> list[str]:
    """`name==version` for each `name>=version`; references of an extra to another have no version.

    >>> lowest(["jax>=0.7", "opacus>=1.6,<1.7", "sgdol[torch]"])
    ['jax==0.7', 'opacus==1.6']
    """
    pattern = re.compile(r"([\w.-]+)(?:\[[^]]*\])?>=([\w.]+)")
    found = (pattern.match(requirement) for requirement in requirements)
    return [f"{match[1]}=={match[2]}" for match in found if match]


def main() -> None:
    """Print them, sorted."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, groups = declared["project"], declared["dependency-groups"]
    pins = {*lowest(project["dependencies"]), *lowest(groups["test"])}
    pins = pins.union(*map(lowest, project["optional-dependencies"].values()))
    torch = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    print(*sorted({pin for pin in pins if not pin.startswith("torch==")}.union(torch)), sep="\n")


if __name__ == "__main__":
    main()
