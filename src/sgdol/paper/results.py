"""The results folder: what it is keyed by, how it is written so that no moment is a bad one to die, how it is read.

::

    configuration.json              what the folder holds, with the version that made it
    tuning/<experiment>/<method>.nc         the search curve of one method
    curves/<experiment>/<noise>/<method>.nc the curves of one run
    summary.csv                     one row per run
    timings.json                    seconds per part; the only file that two equal runs do not share byte by byte

Every file is written under another name, synchronised and renamed, so a file that exists is whole. Every NetCDF file
carries the key of all that determines its numbers, and holds no date: the same run gives the same bytes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import h5netcdf
import numpy as np
import xarray as xr

import sgdol
from sgdol.paper.methods import METHODS, methods
from sgdol.paper.problems import NOISE_MODELS, NoiseModel

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "EXPERIMENTS",
    "FIGURES",
    "NOISES",
    "SUMMARY_COLUMNS",
    "Configuration",
    "Horizons",
    "Results",
    "ResultsError",
]

EXPERIMENTS = ("rosenbrock", "adult")
NOISES: Mapping[str, tuple[str, ...]] = {
    "rosenbrock": ("sigma=0", "sigma=0.2", "sigma=5"),
    "adult": ("batch=all", "batch=50", "batch=1"),
}
_MAIN = ("SGDOL Global", "SGD", "AdaGrad Global", "Adam")
_OTHER = ("SGDOL Global", "AdaGrad Coordinate", "RMSProp", "AdaDelta", "AMSGrad", "Hypergradient")
FIGURES: Mapping[int, tuple[str, tuple[str, ...]]] = {
    1: ("adult", _MAIN),
    2: ("rosenbrock", ("SGDOL Global", "SGD", "SGD GL", "AdaGrad Global", "Adam")),
    3: ("rosenbrock", _OTHER),
    4: ("adult", _OTHER),
}
"""The experiment and the methods of each of the paper's figures."""

CHOICES = ("figures", "only", "quick", "data")
"""What chooses which numbers are made, and does not change them (of the data, their hash counts)."""

SUMMARY_COLUMNS = (
    "experiment",
    "noise",
    "method",
    "learning_rate",
    "smoothness",
    "alpha",
    "horizon",
    "repeats",
    "diverged",
    "mean_squared_gradient",
    "mean_squared_gradient_std",
    "objective",
    "objective_std",
    "step_size",
)

DEFAULT_HORIZON = 100_000
QUICK_HORIZON = 2_000
DEFAULT_REPEATS = {"rosenbrock": 40, "adult": 5}


class ResultsError(Exception):
    """A results folder that cannot be used; the message is one sentence that says why and what to do."""


class Horizons(NamedTuple):
    """How many iterations the parts of an experiment take."""

    noisy: int
    noiseless: int
    tuning: int


@dataclass(frozen=True)
class Configuration:
    """What to reproduce, and how.

    Args:
        figures: which of the paper's figures, from 1 to 4.
        horizon: T, at least 10.
        repeats: how many times each noisy run is repeated; None for the paper's 40 on Rosenbrock and 5 on adult.
        noise_model: how sigma is read on Rosenbrock: of each coordinate, or of the total.
        seed: of everything that is drawn.
        alpha: SGDOL's alpha.
        data: a LIBSVM file to use instead of the shipped adult data.
        quick: a short horizon (2,000 unless ``horizon`` says otherwise).
        adagrad_form: whether AdaGrad Global's step size includes the current gradient.
        noiseless_horizon: T of the full-batch runs on adult, where one iteration costs as much as a hundred noisy ones;
            None for a tenth of the horizon, and no less than 1,000 if the horizon allows it.
        tuning_horizon: T of the search of the rates; None for that of the noiseless runs, and at most 100,000.
        only: the methods to run with noise, by the paper's names; none for all that the figures need.

    >>> Configuration(figures=(5,))
    Traceback (most recent call last):
        ...
    ValueError: figures must be among 1, 2, 3 and 4, got 5
    """

    figures: tuple[int, ...] = (1, 2, 3, 4)
    horizon: int = DEFAULT_HORIZON
    repeats: int | None = None
    noise_model: NoiseModel = "coordinate"
    seed: int = 0
    alpha: float = 10.0
    data: str | None = None
    quick: bool = False
    adagrad_form: str = "current"
    noiseless_horizon: int | None = None
    tuning_horizon: int | None = None
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.quick and self.horizon == DEFAULT_HORIZON:
            object.__setattr__(self, "horizon", QUICK_HORIZON)
        object.__setattr__(self, "figures", tuple(sorted(set(self.figures))))
        if self.data is not None:
            object.__setattr__(self, "data", os.fspath(self.data))
        if not self.figures:
            raise ValueError("figures must name at least one of 1, 2, 3 and 4, got none")
        for figure in self.figures:
            if figure not in FIGURES:
                raise ValueError(f"figures must be among 1, 2, 3 and 4, got {figure!r}")
        for method in self.only:
            if method not in METHODS:
                raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        _integer("horizon", self.horizon, 10, 10**9)
        _integer("seed", self.seed, 0, 2**63 - 1)
        for name in ("repeats", "noiseless_horizon", "tuning_horizon"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 1 if name == "repeats" else 10, 10**9)
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float):
            raise ValueError(f"alpha must be a positive number, got {self.alpha!r}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha must be positive and finite, got {self.alpha!r}")
        if self.noise_model not in NOISE_MODELS:
            raise ValueError(f"noise_model must be one of {NOISE_MODELS}, got {self.noise_model!r}")
        if self.adagrad_form not in ("current", "delayed"):
            raise ValueError(f"adagrad_form must be one of ('current', 'delayed'), got {self.adagrad_form!r}")

    def experiments(self) -> tuple[str, ...]:
        """The experiments that the figures need, Rosenbrock first."""
        return tuple(e for e in EXPERIMENTS if any(FIGURES[f][0] == e for f in self.figures))

    def methods(self, experiment: str) -> tuple[str, ...]:
        """The methods to run with noise: those of the figures, SGDOL Coordinate and SGD GL, unless only some are."""
        wanted = {m for f in self.figures if FIGURES[f][0] == experiment for m in FIGURES[f][1]}
        wanted |= {"SGDOL Coordinate", "SGD GL"}
        return tuple(m for m in METHODS if m in wanted and (not self.only or m in self.only))

    def repeats_of(self, experiment: str) -> int:
        """How many repeats the experiment has."""
        return DEFAULT_REPEATS[experiment] if self.repeats is None else self.repeats

    def horizons(self, experiment: str) -> Horizons:
        """How many iterations the experiment's parts take.

        >>> Configuration().horizons("adult")
        Horizons(noisy=100000, noiseless=10000, tuning=10000)
        """
        noiseless = self.horizon
        if experiment == "adult":
            noiseless = self.noiseless_horizon or min(self.horizon, max(self.horizon // 10, 1000))
        return Horizons(self.horizon, noiseless, self.tuning_horizon or min(noiseless, DEFAULT_HORIZON))

    def identity(self) -> dict[str, Any]:
        """Everything that the numbers depend on."""
        entries = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in CHOICES}
        return {**entries, "data": self.data_sha256(), "version": sgdol.__version__}

    def data_sha256(self) -> str:
        """The SHA-256 of the user's data file, or ``"shipped"``."""
        if self.data is None:
            return "shipped"
        try:
            return hashlib.sha256(Path(self.data).read_bytes()).hexdigest()
        except OSError as error:
            raise ResultsError(f"cannot read the data file {self.data}: {error.strerror}") from error


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def key_of(entries: Mapping[str, Any]) -> str:
    """The SHA-256 of the canonical JSON of what determines a result."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


class Results:
    """A results folder, to read from it and to write to it.

    Args:
        folder: the folder; to read, it must hold a ``configuration.json``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._cache: dict[tuple[Path, int], xr.Dataset] = {}

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def configuration(self) -> Configuration:
        """The configuration of the folder's last run."""
        stored = self._stored()
        if stored is None:
            raise ResultsError(f"{self.folder} holds no results: run sgdol reproduce --out {self.folder} first")
        known = {f.name for f in fields(Configuration)}
        entries = {name: value for name, value in stored["configuration"].items() if name in known}
        return Configuration(**{**entries, "figures": tuple(entries["figures"]), "only": tuple(entries["only"])})

    @property
    def version(self) -> str:
        """The version of sgdol that made the folder."""
        stored = self._stored()
        return "" if stored is None else stored["identity"]["version"]

    def _stored(self) -> dict[str, Any] | None:
        path = self.folder / "configuration.json"
        try:
            stored = json.loads(path.read_text())
            if not {"configuration", "identity"} <= stored.keys():
                raise ValueError("it lacks its entries")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, AttributeError) as error:
            raise ResultsError(f"cannot read {path}: {error}; nothing was changed") from error
        return stored

    def available(self) -> list[tuple[str, str, str]]:
        """The runs (experiment, noise, method) that are there, in the paper's order."""
        return [
            (experiment, noise, method)
            for experiment in EXPERIMENTS
            for noise in NOISES[experiment]
            for method in METHODS
            if self.curves_path(experiment, noise, method).exists()
        ]

    def tuned(self) -> list[tuple[str, str]]:
        """The searches (experiment, method) that are there."""
        return [(e, m) for e in EXPERIMENTS for m in METHODS if self.tuning_path(e, m).exists()]

    def curves(self, experiment: str, noise: str, method: str) -> xr.Dataset:
        """The curves of one run: dims repeat and iteration."""
        return self._read(self.curves_path(experiment, noise, method))

    def tuning(self, experiment: str, method: str) -> xr.Dataset:
        """The search curve of one method: dim rate."""
        return self._read(self.tuning_path(experiment, method))

    def summary(self) -> list[dict[str, Any]]:
        """One row per run, with means over the repeats at the horizon (see :data:`SUMMARY_COLUMNS`)."""
        rows = []
        for experiment, noise, method in self.available():
            curves = self.curves(experiment, noise, method)
            last = curves.isel(iteration=-1)
            row = {
                "experiment": experiment,
                "noise": noise,
                "method": method,
                **{name: curves.attrs[name] for name in ("learning_rate", "smoothness", "alpha")},
                "horizon": int(curves.attrs["horizon"]),
                "repeats": int(curves.attrs["repeats"]),
                "diverged": int(curves["diverged"].sum()),
            }
            for name in ("mean_squared_gradient", "objective"):
                values = last[name].values
                with np.errstate(invalid="ignore", over="ignore"):
                    row[name] = float(values.mean())
                    row[f"{name}_std"] = float(values.std(ddof=1)) if len(values) > 1 else 0.0
            row["step_size"] = float(last["step_size"].values.mean())
            rows.append({name: row[name] for name in SUMMARY_COLUMNS})
        return rows

    def timings(self) -> dict[str, float]:
        """The seconds of each part that was run, in the order in which the parts ended."""
        try:
            return json.loads((self.folder / "timings.json").read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ResultsError(f"cannot read {self.folder / 'timings.json'}: {error}") from error

    def curves_path(self, experiment: str, noise: str, method: str) -> Path:
        """Where the curves of one run are."""
        _known("experiment", experiment, EXPERIMENTS)
        _known("noise", noise, NOISES[experiment])
        return self.folder / "curves" / experiment / noise / f"{_slug(method)}.nc"

    def tuning_path(self, experiment: str, method: str) -> Path:
        """Where the search curve of one method is."""
        _known("experiment", experiment, EXPERIMENTS)
        return self.folder / "tuning" / experiment / f"{_slug(method)}.nc"

    def _read(self, path: Path) -> xr.Dataset:
        if not path.exists():
            raise ResultsError(f"there is no {path}: sgdol reproduce --out {self.folder} makes it")
        stamp = (path, path.stat().st_mtime_ns)
        if stamp not in self._cache:
            try:
                with self._lock:
                    self._cache[stamp] = xr.load_dataset(path, engine="h5netcdf")
            except Exception as error:  # h5py raises whatever the damage makes it raise
                raise self._unreadable(path, error) from error
        return self._cache[stamp].copy()

    @staticmethod
    def _unreadable(path: Path, error: Exception) -> ResultsError:
        return ResultsError(f"cannot read {path} ({error}): move it away and run sgdol reproduce again")

    # ------------------------------------------------------------------------------------------------ writing

    def prepare(self, configuration: Configuration) -> None:
        """Make the folder ready for a run of this configuration, or refuse and change nothing."""
        stored = self._stored()
        identity = json.loads(json.dumps(configuration.identity()))
        if stored is None:
            if self.folder.exists() and not self.folder.is_dir():
                raise ResultsError(f"{self.folder} is a file: give a folder")
            if self.folder.is_dir() and any(self.folder.glob("*/*/*.nc")):
                raise ResultsError(f"{self.folder} holds results without their configuration.json: give another folder")
        elif stored["identity"] != identity:
            before = stored["identity"]
            if before.get("version") != identity["version"]:
                raise ResultsError(
                    f"{self.folder} holds results of sgdol {before.get('version')} and this is sgdol "
                    f"{identity['version']}: give another folder; nothing was changed"
                )
            changed = ", ".join(
                f"{name}={before.get(name)!r} (now {identity.get(name)!r})"
                for name in sorted(before.keys() | identity.keys())
                if before.get(name) != identity.get(name)
            )
            raise ResultsError(
                f"{self.folder} holds results of another configuration, {changed}: give another folder; "
                "nothing was changed"
            )
        entries = {"configuration": asdict(configuration), "identity": identity}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            write_atomically(self.folder / "configuration.json", (json.dumps(entries, indent=2) + "\n").encode())
        except OSError as error:
            raise ResultsError(f"cannot write to {self.folder}: {error.strerror}") from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep a second run out of the folder; a run that is killed lets go of it."""
        if fcntl is None or not self.folder.is_dir():
            yield
            return
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ResultsError(f"another sgdol reproduce is at work in {self.folder}: wait for it") from error
            yield
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove what a killed run left half written."""
        for path in list(self.folder.rglob(f"{_TEMPORARY}*")):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def has(self, path: Path, key: str) -> bool:
        """Whether the file is there; an error if it is not the one of this key."""
        if not path.exists():
            return False
        try:
            with self._lock, h5netcdf.File(path, "r") as file:
                found = file.attrs.get("key")
        except Exception as error:  # h5py raises whatever the damage makes it raise
            raise self._unreadable(path, error) from error
        if found != key:
            raise ResultsError(f"{path} is not a result of this configuration: move it away; nothing was changed")
        return True

    def write(self, path: Path, dataset: xr.Dataset, key: str) -> None:
        """Write one dataset atomically, in the same bytes whenever its content is the same."""
        path.parent.mkdir(parents=True, exist_ok=True)
        stamped = dataset.assign_attrs(key=key)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=self.folder) as scratch, self._lock:
            # h5py is not safe for threads, and a name of its own does not enter the file.
            raw = Path(scratch) / "dataset.nc"
            stamped.to_netcdf(raw, engine="h5netcdf")
            content = raw.read_bytes()
        write_atomically(path, content)

    def write_summary(self) -> None:
        """Write ``summary.csv``."""
        text = io.StringIO()
        writer = csv.DictWriter(text, SUMMARY_COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in self.summary():
            writer.writerow(
                {n: "" if isinstance(v, float) and math.isnan(v) and n in _BLANK else v for n, v in row.items()}
            )
        write_atomically(self.folder / "summary.csv", text.getvalue().encode())

    def record_time(self, part: str, seconds: float) -> None:
        """Add to ``timings.json``."""
        with self._lock:
            timings = self.timings()
            timings[part] = round(seconds, 3)
            write_atomically(self.folder / "timings.json", (json.dumps(timings, indent=2) + "\n").encode())


_TEMPORARY = ".unfinished-"
_BLANK = ("learning_rate", "smoothness", "alpha", "step_size")


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file by the content: at every moment it is the old one or the new one, whole."""
    handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _slug(method: str) -> str:
    _known("method", method, METHODS)
    return methods()[method].slug


def _known(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ResultsError(f"unknown {name} {value!r}: known are {', '.join(allowed)}")
