"""Can a stranger use this release? `make release-check` builds it, installs it as they would, and runs something real.

One line for each check; what a failed one printed stands under it. The sdist and the wheel are built into an empty
folder (or taken from --dist), checked by twine and check-wheel-contents; the wheel is installed with each extra into
a new virtual environment, where a program is run far from the sources. The sdist is unpacked, has to contain what its
README says to run, is installed, and runs a part of its tests.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
CONSTRAINTS = ROOT / "constraints.txt"
TORCH = re.findall(r"^torch==.*$", CONSTRAINTS.read_text(encoding="utf-8"), flags=re.M)[0]
"""Installed first, by itself: any other request may pull several GB of CUDA packages."""

REFERENCE = """
import doctest, sgdol, sgdol.reference
done = doctest.testmod(sgdol.reference)
assert done.attempted > 0 and not done.failed, done
for missing in ("sgdol.torch", "sgdol.jax"):
    try:
        __import__(missing)
    except ModuleNotFoundError as sentence:
        print(sentence)
        assert "pip install 'sgdol[" in str(sentence)
    else:
        raise AssertionError(f"{missing} came along")
"""
TENSORBOARD = """
import pathlib, torch
from sgdol import SGDOL
from sgdol.torch import Log
from torch.utils.tensorboard import SummaryWriter
x = torch.nn.Parameter(torch.zeros(3))
opt = SGDOL([x], lr=0.1)
with SummaryWriter("events") as writer:
    log = Log(writer, every=1)
    for _ in range(20):
        for _ in range(2):
            ((x - torch.randn(3)).square().sum() / 4).backward()
        opt.step()
        opt.zero_grad()
        log(opt)
assert len(log.history) == 20 and any(pathlib.Path("events").iterdir())
"""
PLOT = """
import sgdol
history = [{"update": t, "step_size": 0.5 / t, "signal_to_noise": 1.0, "noise_scale": t, "skipped": 0} for t in (1, 2)]
sgdol.plot(history).savefig("learned.png")
assert open("learned.png", "rb").read().startswith(b"\\x89PNG")
"""
TESTS = (
    "tests/test_surrogate.py",
    "tests/test_reference.py",
    "tests/torch/test_old_states.py",
    "tests/torch/test_exact_vectors.py",
)
"""From the sdist: arithmetic, the truth, and the data files that tests need."""


def readme_program() -> str:
    """The first of the README's examples that imports all it uses: a whole program."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    return next(block for block in blocks if re.search("^import torch", block, flags=re.M))


@dataclass(frozen=True)
class Extra:
    """What is installed with the wheel, and what then has to run: commands of that environment."""

    name: str
    torch: bool = False
    besides: tuple[str, ...] = ()
    runs: dict[str, tuple[str, ...]] = field(default_factory=dict)


def example(name: str) -> tuple[str, ...]:
    """The command that runs one of the examples."""
    return ("python", str(EXAMPLES / f"{name}.py"))


LEARN = ("scikit-learn",)
EXTRAS = (
    Extra("", runs={"the numpy reference; a sentence about each front end": ("python", "-c", REFERENCE)}),
    Extra("torch", True, LEARN, {"the README's program runs": ("python", "-c", readme_program())}),
    Extra("jax", False, LEARN, {"the optax example runs": example("optax_loop")}),
    Extra(
        "paper",
        runs={
            "sgdol --help": ("sgdol", "--help"),
            "sgdol env": ("sgdol", "env"),
            "sgdol reproduce --quick": ("sgdol", "reproduce", "--quick", "--out", "results"),
            "its report": ("python", "-c", "assert 'SGDOL' in open('results/report.html', encoding='utf-8').read()"),
        },
    ),
    Extra(
        "trainers",
        True,
        LEARN,
        {f"the {name} example runs": example(f"{name}_digits") for name in ("lightning", "huggingface", "accelerate")},
    ),
    Extra("tensorboard", True, runs={"events are written": ("python", "-c", TENSORBOARD)}),
    Extra("private", True, LEARN, {"the Opacus example runs": example("private_opacus")}),
    Extra("plot", runs={"a figure of a history": ("python", "-c", PLOT)}),
)


class Failed(Exception):
    """A check that did not hold; the message is what it printed."""


def run(*command: str | Path, where: Path | None = None) -> str:
    """Run a command without this repository on its path; its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=where,
        env=environment | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise Failed(done.stdout)
    return done.stdout


class Checks:
    """Runs checks one after another, prints a line for each and remembers which did not hold."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def __call__(self, what: str, check: Callable[[], object]) -> bool:
        """Whether it held."""
        start = time.monotonic()
        try:
            check()
        except (Failed, AssertionError) as error:
            self.failed.append(what)
            print(f"FAILED  {what}\n{error}", flush=True)
            return False
        print(f"ok      {what} ({time.monotonic() - start:.0f} s)", flush=True)
        return True


class Environment:
    """A new virtual environment, and an empty folder to run things in."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", folder)
        self.bin = folder / "bin"
        self.empty = folder / "empty"
        self.empty.mkdir()

    def install(self, *requirements: str) -> None:
        """By pip, within the constraints that CI has."""
        run(self.bin / "python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, *requirements)

    def run(self, command: str, *arguments: str, where: Path | None = None) -> str:
        """One of its commands."""
        return run(self.bin / command, *arguments, where=where or self.empty)


def built(folder: Path) -> tuple[Path, Path]:
    """The one sdist and the one wheel of a folder."""
    sdists, wheels = list(folder.glob("*.tar.gz")), list(folder.glob("*.whl"))
    if (len(sdists), len(wheels)) != (1, 1):
        raise SystemExit(f"{folder} has {len(sdists)} sdists and {len(wheels)} wheels, where one of each is wanted")
    return sdists[0], wheels[0]


def check_extra(check: Checks, extra: Extra, archive: Path) -> None:
    """Install it with this extra where nothing else is, and run what it is for."""
    name = f"[{extra.name}]" if extra.name else "no extra"
    with tempfile.TemporaryDirectory(prefix="sgdol-") as folder:
        environment = Environment(Path(folder) / "venv")

        def install() -> None:
            if extra.torch:
                environment.install(TORCH)
            environment.install(f"{archive}[{extra.name}]" if extra.name else str(archive), *extra.besides)

        if check(f"{name}: installs", install):
            for what, command in extra.runs.items():
                check(f"{name}: {what}", functools.partial(environment.run, *command))


def promises_are_kept(source: Path) -> None:
    """Every file, target and script that the README names is there."""
    readme = (source / "README.md").read_text(encoding="utf-8")
    files = {target.split("#")[0] for target in re.findall(r"\]\((?!\w+:|#)([^)]+)\)", readme)}
    files |= {*re.findall(r"python ((?:scripts|examples|benchmarks)/\S+\.py)", readme)}
    targets = {*re.findall(r"^([\w-]+):", (source / "Makefile").read_text(encoding="utf-8"), flags=re.M)}
    missing = sorted(name for name in files if not (source / name).exists())
    missing += sorted(f"make {name}" for name in {*re.findall(r"\bmake ([a-z][a-z-]+)", readme)} - targets)
    assert not missing, f"the README names what the sdist does not have: {', '.join(missing)}"


def check_sdist(check: Checks, sdist: Path) -> None:
    """Unpack it; what its README says to run is in it, it installs, and a part of its tests passes."""
    with tempfile.TemporaryDirectory(prefix="sgdol-") as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        source = next(Path(folder).iterdir())
        check("sdist: has what its README says to run", lambda: promises_are_kept(source))
        environment = Environment(Path(folder) / "venv")

        def install() -> None:
            environment.install(TORCH)
            environment.install(f"{sdist}[torch]", "pytest", "hypothesis")

        if check("sdist: installs", install):
            check("sdist: its tests", lambda: environment.run("python", "-m", "pytest", "-q", *TESTS, where=source))


def tag_is_of(wheel: Path, tag: str) -> None:
    """The tag is this version's, and the changelog says when it was released."""
    version = wheel.name.split("-")[1]
    assert tag == f"v{version}", f"the tag is {tag}, and the version {version}"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(version)}, \d{{4}}-\d\d-\d\d$", changelog, flags=re.M), (
        f"CHANGELOG.md has no line '## {version}, year-month-day'"
    )


def main() -> None:
    """Build, check, install, run; exit 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, help="a folder with an sdist and a wheel; without it they are built")
    parser.add_argument("--tag", help="of the release: v and the version")
    parser.add_argument("--only", nargs="*", help="extras to try (base for none, sdist for it), instead of all")
    options = parser.parse_args()
    check = Checks()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sgdol-dist-") as empty:
        if options.dist is None and not check(
            "sdist and wheel are built", lambda: run(sys.executable, "-m", "build", "--outdir", empty, ROOT)
        ):
            raise SystemExit(1)
        sdist, wheel = built(options.dist.resolve() if options.dist else Path(empty))
        if options.tag:
            check(f"{options.tag} is the version", lambda: tag_is_of(wheel, options.tag))
        check("twine check", lambda: run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel))
        check("check-wheel-contents", lambda: run(sys.executable, "-m", "check_wheel_contents", wheel, where=ROOT))
        for extra in EXTRAS:
            if options.only is None or (extra.name or "base") in options.only:
                check_extra(check, extra, wheel)
        if options.only is None or "sdist" in options.only:
            check_sdist(check, sdist)
    print(f"{time.monotonic() - start:.0f} s; failed: {', '.join(check.failed) or 'none'}")
    raise SystemExit(bool(check.failed))


if __name__ == "__main__":
    main()
