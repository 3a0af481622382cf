"""Files that are whole or not there, and say so if they were damaged since.

A file is written under another name, synchronised and renamed: at every moment it is the old one or the new one. One
that holds numbers is *sealed*: the SHA-256 of its content stands at its end, behind everything that a reader of the
format looks at, so that a flipped bit is found before a damaged number, or a damaged structure, is used.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

__all__ = ["TEMPORARY", "DamageError", "checksum", "read_file", "seal", "shown", "unseal", "write_atomically"]

TEMPORARY = ".unfinished-"
"""How the names of files begin that are being written."""

_MARK = b"\nsgdol-sha256:"


class DamageError(ValueError):
    """A file whose content is not what was written."""


def checksum(content: bytes) -> str:
    """The SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_file(path: Path) -> bytes:
    """The content of an ordinary file. Reading from a pipe would wait for ever for somebody who writes to it."""
    if path.exists() and not path.is_file():
        raise DamageError("it is not an ordinary file")
    return path.read_bytes()


def seal(content: bytes) -> bytes:
    """The content with its checksum behind it.

    >>> unseal(seal(b"numbers"))
    b'numbers'
    """
    return content + _MARK + checksum(content).encode()


def unseal(sealed: bytes) -> bytes:
    """The content that was sealed.

    Raises:
        DamageError: there is no checksum, or the content has another one.

    >>> unseal(seal(b"numbers").replace(b"m", b"n"))
    Traceback (most recent call last):
        ...
    sgdol.paper.files.DamageError: its content does not match its checksum, so it was damaged
    """
    content, mark, found = sealed[: -len(_MARK) - 64], sealed[-len(_MARK) - 64 : -64], sealed[-64:]
    if mark != _MARK:
        raise DamageError("it has no checksum, so it is damaged, cut short or of an older sgdol")
    if checksum(content).encode() != found:
        raise DamageError("its content does not match its checksum, so it was damaged")
    return content


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file by the content: at every moment it is the old one or the new one, whole."""
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk does not say what was written
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shown(word: object, most: int = 40) -> str:
    """A word for an error message, quoted, and cut if it is long: a damaged file may hold one of a megabyte.

    >>> shown("3:x"), shown("9" * 1000, most=8)
    ("'3:x'", "'99999999'... (1,000 characters)")
    """
    text = str(word)
    return repr(text) if len(text) <= most else f"{text[:most]!r}... ({len(text):,} characters)"
