"""Ctrl-C ends the command ``sgdol`` in one line, whatever it is doing.

Python's KeyboardInterrupt is not enough: an import of a compiled module that it is raised in may swallow it or crash,
and it waits for compiled code to return. Here a thread waits for the signal and ends the process. Every file of results
is whole at every moment, so nothing has to be tidied up.
"""

from __future__ import annotations

import os
import signal
import socket
import threading

__all__ = ["INTERRUPTED", "leave", "watch"]

INTERRUPTED = 130
"""The status that shells know: it was interrupted."""

LINE = b"sgdol: interrupted; the same command continues where it stopped\n"


def watch() -> None:
    """From now on Ctrl-C ends the process, unless it is ignored, as in a background job of a script."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    arrives, told = socket.socketpair()
    told.setblocking(False)
    threading.Thread(target=_wait, args=(arrives, told), daemon=True).start()
    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)


def _wait(arrives: socket.socket, told: socket.socket) -> None:
    # The C part of a handler writes the signal's number into `told`, which lives as long as this thread does.
    while told.fileno() >= 0:
        if signal.SIGINT in arrives.recv(1):
            leave()


def leave() -> None:
    """End the process."""
    try:
        shows = b"\n\x1b[?25h" if os.isatty(2) else b""  # progress bars hide the cursor
        os.write(2, shows + LINE)
    except OSError:
        pass
    # Threads in the middle of a compiled run cannot be asked to stop.
    os._exit(INTERRUPTED)
