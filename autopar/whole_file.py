"""Files that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from autopar.errors import SpecError

__all__ = ["is_special", "write_whole"]


def write_whole(text: str, path: str | Path, what: str) -> None:
    """Write `text` in UTF-8; a file that was there stays until the new one is whole. `what` names it in messages.

    A link stays one, and a device or pipe is written to (as root a rename would put a file where /dev/null was).
    Raises SpecError with the system's reason.
    """
    path = Path(path)
    if is_special(path):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpecError(f"cannot write {what}: {error.strerror}", where=str(path)) from error
        return
    path = Path(os.path.realpath(path))
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


def is_special(path: Path) -> bool:
    """Whether it is there and is neither a file nor a folder, or names a stream of this process."""
    streams = str(path.absolute()).startswith(("/dev/", "/proc/"))
    return path.exists() and not path.is_dir() and (streams or not path.is_file())


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
