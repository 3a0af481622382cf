"""Programs and threads that tests start: each comes to its end, or is ended and named."""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

LIMIT = 500
"""Seconds after which nothing is waited for any more: far more than anything takes on a loaded machine, and less than
``faulthandler_timeout``, which does not know what was waited for."""


class NotEndedError(AssertionError):
    """Something that was to come to its end did not."""


def run(command: list[Any], limit: float = LIMIT, **options: Any) -> subprocess.CompletedProcess[Any]:
    """As subprocess.run, with its text captured; after the limit it is killed, with all that it started."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), start_new_session=True, **{**streams, **options}) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise NotEndedError(f"{process.args} had not ended after {limit} s and printed\n{out}\n{err}") from None
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def output(command: list[Any], **options: Any) -> str:
    """What a program prints that ends without an error."""
    done = run(command, **options)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


IMPORTED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "sklearn.datasets"]
IMPORTED += ["sgdol.torch", "pytest"]


def forks() -> ForkServerContext:
    """Processes that are forked from one without threads that has imported torch, which takes seconds each else."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def script(path: Path, *arguments: Any) -> str:
    """What ``python path arguments`` prints, of a program that uses torch, in such a process."""
    with tempfile.TemporaryDirectory() as folder:
        process = forks().Process(target=run_here, args=(path, arguments, f"{folder}/said"))
        process.start()
        process.join(LIMIT)
        process.kill()
        process.join()
        said = Path(f"{folder}/said").read_text()
    assert process.exitcode == 0, f"{path} ended with {process.exitcode} and printed\n{said[-6000:]}"
    return said


def run_here(path: Path, arguments: tuple[Any, ...], said: str) -> None:
    """Run a program in this process, which is there for nothing else, and write what it prints to a file."""
    gc.freeze()  # what has been imported is neither garbage nor a model that an optimizer would look for
    with open(said, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [str(path), *map(str, arguments)]
    runpy.run_path(str(path), run_name="__main__")


def in_threads(*work: Callable[[], Any]) -> None:
    """Call each in a thread of its own, all at the same time, and wait for them."""
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        if thread.is_alive():
            raise NotEndedError(f"{thread} had not ended after {LIMIT} s")
