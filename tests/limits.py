"""Programs and threads that tests start: each comes to its end, or is ended and named."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
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


def in_threads(*work: Callable[[], Any]) -> None:
    """Call each in a thread of its own, all at the same time, and wait for them."""
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        if thread.is_alive():
            raise NotEndedError(f"{thread} had not ended after {LIMIT} s")
