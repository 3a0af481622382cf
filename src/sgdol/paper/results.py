"""The results folder: what it is keyed by, how it is written so that no moment is a bad one to die, how it is read.

::

    configuration.json              what the folder holds, with the version that made it
    tuning/<experiment>/<method>.nc         the search curve of one method
    curves/<experiment>/<noise>/<method>.nc the curves of one run
    summary.csv                     one row per run
    timings.json                    seconds per part; the only file that two equal runs do not share byte by byte

Every file is written under another name, synchronised and renamed, so a file that exists is whole. Every NetCDF file
carries the key of all that determines its numbers, holds no date, so that the same run gives the same bytes, and ends
with a checksum, which readers of NetCDF do not see: a file that was damaged since is refused, not used.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

import sgdol
from sgdol.paper.configuration import Configuration, MissingError, ResultsError
from sgdol.paper.experiments import EXPERIMENTS
from sgdol.paper.files import TEMPORARY, checksum, read_file, seal, unseal, write_atomically
from sgdol.paper.methods import METHODS, methods

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["SUMMARY_COLUMNS", "Configuration", "Results", "ResultsError", "key_of"]

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
_BLANK = ("learning_rate", "smoothness", "alpha", "step_size")


def key_of(entries: Mapping[str, Any]) -> str:
    """The SHA-256 of the canonical JSON of what determines a result."""
    return checksum(json.dumps(entries, sort_keys=True).encode())


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
        try:
            entries = {name: value for name, value in stored["configuration"].items() if name in known}
            return Configuration(**{**entries, "figures": tuple(entries["figures"]), "only": tuple(entries["only"])})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(self._configuration_path, error) from error

    @property
    def version(self) -> str:
        """The version of sgdol that made the folder."""
        stored = self._stored()
        return "" if stored is None else str(stored["identity"].get("version", ""))

    def _stored(self) -> dict[str, Any] | None:
        try:
            stored = json.loads(read_file(self._configuration_path))
            if not {"configuration", "identity"} <= stored.keys() <= {"configuration", "identity", "sha256"}:
                raise ValueError("it lacks its entries, or has others")
            found = stored.pop("sha256", None)
            if found is not None and found != key_of(stored):
                raise ValueError("its content does not match its checksum, so it was damaged")
            if not all(isinstance(entry, dict) for entry in stored.values()):
                raise ValueError("its entries are not objects")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ResultsError(f"cannot read {self._configuration_path}: {error}; nothing was changed") from error
        return stored

    @property
    def _configuration_path(self) -> Path:
        return self.folder / "configuration.json"

    def available(self) -> list[tuple[str, str, str]]:
        """The runs (experiment, noise, method) that are there, in the paper's order."""
        return [
            (experiment, noise, method)
            for experiment, described in EXPERIMENTS.items()
            for noise in described.noises
            for method in METHODS
            if self.curves_path(experiment, noise, method).exists()
        ]

    def tuned(self) -> list[tuple[str, str]]:
        """The searches (experiment, method) that are there."""
        return [(e, m) for e in EXPERIMENTS for m in METHODS if self.tuning_path(e, m).exists()]

    def curves(self, experiment: str, noise: str, method: str) -> xr.Dataset:
        """The curves of one run: dims repeat and iteration."""
        path = self.curves_path(experiment, noise, method)
        return self._own(path, {"experiment": experiment, "noise": noise, "method": method}, {"repeat", "iteration"})

    def tuning(self, experiment: str, method: str) -> xr.Dataset:
        """The search curve of one method: dim rate."""
        return self._own(self.tuning_path(experiment, method), {"experiment": experiment, "method": method}, {"rate"})

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
        path = self.folder / "timings.json"
        try:
            found = json.loads(read_file(path))
            if not isinstance(found, dict) or not all(_is_time(seconds) for seconds in found.values()):
                raise ValueError("it does not hold seconds by part")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(path, error) from error
        return found

    def curves_path(self, experiment: str, noise: str, method: str) -> Path:
        """Where the curves of one run are."""
        _known("experiment", experiment, tuple(EXPERIMENTS))
        _known("noise", noise, EXPERIMENTS[experiment].noises)
        return self.folder / "curves" / experiment / noise / f"{_slug(method)}.nc"

    def tuning_path(self, experiment: str, method: str) -> Path:
        """Where the search curve of one method is."""
        _known("experiment", experiment, tuple(EXPERIMENTS))
        return self.folder / "tuning" / experiment / f"{_slug(method)}.nc"

    def _own(self, path: Path, names: Mapping[str, str], dimensions: Set[str]) -> xr.Dataset:
        """The dataset of a file, if it is of the run that its place says and of this folder's configuration."""
        dataset = self._read(path)
        if set(dataset.dims) != dimensions:
            raise ResultsError(f"{path} holds something else than its place says: move it away and run it again")
        configuration, experiment = self.configuration, EXPERIMENTS[names["experiment"]]
        horizons = configuration.horizons(experiment.name)
        expected: dict[str, Any] = {**names, "version": self.version}
        if "noise" in names:
            expected |= {
                "seed": configuration.seed,
                "repeats": configuration.repeats_of(experiment.name),
                "horizon": horizons.noiseless if names["noise"] == experiment.noiseless else horizons.noisy,
            }
        else:
            expected["horizon"] = horizons.tuning
        for name, value in expected.items():
            if name in dataset.attrs and dataset.attrs[name] != value:
                raise ResultsError(
                    f"{path} holds a run with {name} {dataset.attrs[name]!r} where {value!r} belongs: move it away and "
                    "run sgdol reproduce again"
                )
        return dataset

    def _read(self, path: Path) -> xr.Dataset:
        if not path.exists():
            raise MissingError(f"there is no {path}: sgdol reproduce --out {self.folder} makes it")
        try:
            stamp = (path, path.stat().st_mtime_ns)
            if stamp not in self._cache:
                content = unseal(read_file(path))
                with self._lock:
                    self._cache[stamp] = xr.load_dataset(io.BytesIO(content), engine="h5netcdf")
        except Exception as error:  # h5py raises whatever the damage makes it raise
            raise self._damaged(path, error) from error
        return self._cache[stamp].copy()

    @staticmethod
    def _damaged(path: Path, error: Exception) -> ResultsError:
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
                    f"{sgdol.__version__}: give another folder; nothing was changed"
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
        entries: dict[str, Any] = {"configuration": json.loads(json.dumps(asdict(configuration))), "identity": identity}
        entries["sha256"] = key_of(entries)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            write_atomically(self._configuration_path, (json.dumps(entries, indent=2) + "\n").encode())
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
        for path in list(self.folder.rglob(f"{TEMPORARY}*")):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def has(self, path: Path, key: str) -> bool:
        """Whether the file is there; an error if it is damaged or not the one of this key."""
        if not path.exists():
            return False
        if self._read(path).attrs.get("key") != key:
            raise ResultsError(f"{path} is not a result of this configuration: move it away; nothing was changed")
        return True

    def write(self, path: Path, dataset: xr.Dataset, key: str) -> None:
        """Write one dataset atomically, in the same bytes whenever its content is the same."""
        # In memory first: where a disk is full, HDF5 ends the process instead of raising an error.
        content = io.BytesIO()
        with self._lock:  # h5py is not safe for threads
            dataset.assign_attrs(key=key).to_netcdf(content, engine="h5netcdf")
        self._write(path, seal(content.getvalue()))

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        except OSError as error:
            raise ResultsError(f"cannot write {path}: {error.strerror}; what was written before is whole") from error

    def write_summary(self) -> None:
        """Write ``summary.csv``."""
        text = io.StringIO()
        writer = csv.DictWriter(text, SUMMARY_COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in self.summary():
            writer.writerow(
                {n: "" if isinstance(v, float) and math.isnan(v) and n in _BLANK else v for n, v in row.items()}
            )
        self._write(self.folder / "summary.csv", text.getvalue().encode())

    def record_time(self, part: str, seconds: float) -> None:
        """Add to ``timings.json``."""
        with self._lock:
            timings = self.timings()
            timings[part] = round(seconds, 3)
            self._write(self.folder / "timings.json", (json.dumps(timings, indent=2) + "\n").encode())


def _slug(method: str) -> str:
    _known("method", method, METHODS)
    return methods()[method].slug


def _known(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ResultsError(f"unknown {name} {value!r}: known are {', '.join(allowed)}")


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
