"""Files that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from autopar.errors import SpecError

__all__ = ["write_whole"]


def write_whole(text: str, path: str | Path, what: str) -> None:
    """Write `text` in UTF-8; a file that was there stays until the new one is whole. `what` names it in messages.

    Raises SpecError with the system's reason.
    """
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise SpecError(f"cannot write {what}: {error.strerror}", where=str(path)) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise SpecError(f"cannot write {what}: {error.strerror}", where=str(path)) from error
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
