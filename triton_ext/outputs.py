"""Where a command will write: looked at before it does anything that takes long."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import TritonExtError


def check_file(path: Path, what: str = "it") -> None:
    """Raises TritonExtError unless `path` can be written as a file; `what` is written there."""
    if path.is_dir():
        raise _error(path, what, "it is a folder")
    if not path.parent.is_dir():
        raise _error(path, what, f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _error(path, what, "permission denied")


def check_folder(path: Path, what: str = "it") -> None:
    """Raises TritonExtError unless files can be written to the folder `path`, which may have to be made."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise _error(path, what, f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _error(path, what, "permission denied")


def write(path: Path, text: str, what: str = "it") -> None:
    """Write a text file. Raises TritonExtError where that fails."""
    check_file(path, what)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _error(path, what, str(error)) from None


def _error(path: Path, what: str, reason: str) -> TritonExtError:
    return TritonExtError(f"{path}: {what} cannot be written: {reason}")
