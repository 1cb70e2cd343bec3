"""Files that are there in full or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ConfigError, SnapshotError


def write_renamed(path: Path, data: bytes | memoryview) -> None:
    """Write beside `path`, then rename into place: a reader sees the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
    os.replace(partial, path)


@contextmanager
def directory_renamed(out: Path) -> Iterator[Path]:
    """A directory that becomes `out` when the block succeeds and vanishes when it does not."""
    partial = out.absolute().with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
    except OSError as error:
        raise ConfigError(
            f"{out.absolute().parent} cannot be written ({error.strerror}); name another directory"
        ) from None
    try:
        yield partial
        os.replace(partial, out)
    except OSError as error:
        raise SnapshotError(f"writing {out} failed ({error.strerror}); nothing was left there") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
