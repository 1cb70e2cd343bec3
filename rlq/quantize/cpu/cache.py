"""Where compiled kernels are kept: by the content of their source, per user, so that every copy of rlq shares them.

numba's own choice goes by path and time stamp. A Ray job runs in a fresh copy of the working directory, so there each
job, and each of its actors, would compile again for half a minute. Importing this module needs numba.
"""

# numba fills its `config` module at run time.
# pyright: reportAttributeAccessIssue=false
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from numba import config
from numba.core.caching import UserProvidedCacheLocator

# All that a kernel may be compiled from: numba itself looks at a function's own code and not at what it calls.
FOLDERS = (Path(__file__).parents[1], Path(__file__).parents[2] / "formats")


def source_digest(folders: tuple[Path, ...] = FOLDERS) -> str:
    """SHA-256 over names and contents of all Python files below some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


class ContentLocator(UserProvidedCacheLocator):
    """Keeps compiled functions under a digest of the kernels' sources."""

    def __init__(self, py_func, py_file):
        super().__init__(py_func, py_file)
        self._stamp = source_digest()
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._cache_path = str(root / "rlq" / "kernels" / self._stamp[:16])

    def get_source_stamp(self) -> str:
        """The digest stands for the sources; nothing else makes an entry stale."""
        return self._stamp

    @classmethod
    def from_function(cls, py_func, py_file):
        """None, and numba goes on to its next locator, if the cache cannot be written."""
        self = cls(py_func, py_file)
        try:
            self.ensure_cache_path()
        except OSError:
            return None
        return self


@contextmanager
def cached_by_content() -> Iterator[None]:
    """Functions decorated inside are cached by content; beside a read-only home, next to their source."""
    before = config.CACHE_LOCATOR_CLASSES
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{ContentLocator.__name__},InTreeCacheLocator"
    try:
        yield
    finally:
        config.CACHE_LOCATOR_CLASSES = before
