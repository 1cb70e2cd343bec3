"""Files that are there in full or not at all."""

import os
from pathlib import Path


def write_renamed(path: Path, data: bytes | memoryview) -> None:
    """Write beside `path`, then rename into place: whoever opens it reads the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
    os.replace(partial, path)
