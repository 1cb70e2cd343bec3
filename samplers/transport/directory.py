"""Versions through a shared file system, kept for restarts and for audit."""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlq.errors import ConfigError, SnapshotError
from rlq.files import write_renamed
from rlq.publish import MANIFEST, Snapshot, read_directory, write_directory
from rlq.publish.delta import Delta, apply, open_delta

from .base import Ticket, TransportSettings


@dataclass(frozen=True)
class DirectoryTicket:
    """A version in a folder that all samplers see."""

    path: str
    """Folder of a whole version, or file of a delta."""
    lasting: ClassVar[bool] = True
    """See `Ticket`."""

    def open(self, endpoint: Any = None) -> Snapshot | Delta:
        """Read it."""
        path = Path(self.path)
        if path.is_dir():
            return read_directory(path)
        try:
            return open_delta(path.read_bytes())
        except FileNotFoundError:
            raise SnapshotError(f"{path} is gone; send the version again") from None


class Directory:
    """A shared file system: a checkpoint per whole version, a file per delta, kept for restarts and for audit.

    One publisher at a time. What an earlier publisher left beyond the first version of this one belongs to a run that
    was resumed before that point, and is removed.

    Args:
        folder: seen by the learner and all samplers under this path.
        model_config: `config.json` of the model, written beside the weights; whole versions load in vLLM.
        keep: whole versions that stay, with their deltas; 0 keeps everything.

    Raises:
        ConfigError: another publisher is at work there.
    """

    keeps_device: ClassVar[bool] = False

    @classmethod
    def check(cls, settings: TransportSettings) -> None:
        """See `Transport`."""
        if not Path(settings.sampler_transport_dir or "").is_absolute():
            raise ConfigError("sampler_transport directory needs sampler_transport_dir, an absolute path")

    @classmethod
    def from_config(cls, settings: TransportSettings, model_config: dict) -> "Directory":
        """See `Transport`."""
        assert settings.sampler_transport_dir is not None  # checked
        return cls(Path(settings.sampler_transport_dir), model_config, settings.sampler_transport_keep)

    def __init__(self, folder: Path, model_config: dict, keep: int = 0):
        self.folder, self.model_config, self.keep = folder, model_config, keep
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "publisher.lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            raise ConfigError(
                f"{folder} is in use by another publisher ({self._lock.read().strip() or 'unknown'}); "
                "give each run its own sampler_transport_dir"
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()
        self._started = False

    def send(self, version: int, payload: Snapshot | bytes, to: Sequence[Any] = ()) -> DirectoryTicket:
        """See `Transport`.

        Raises:
            SnapshotError: the folder holds other bytes under this version.
        """
        if not self._started:
            self._remove(lambda name: name >= name_of(version))
            self._started = True
        path = self.folder / name_of(version)
        if isinstance(payload, bytes):
            path = path.with_suffix(".delta")
            write_renamed(path, payload)
        elif (path / MANIFEST).is_file():
            if json.loads((path / MANIFEST).read_text())["digest"] != payload.digest:
                raise SnapshotError(f"{path} holds other weights as version {version}; a version is published once")
        else:
            write_directory(payload, path, self.model_config)
            whole = sorted(path.parent.name for path in self.folder.glob(f"v*/{MANIFEST}"))
            oldest = whole[-self.keep :][0]
            self._remove(lambda name: name < oldest)
        return DirectoryTicket(str(path))

    def _remove(self, unwanted: Callable[[str], bool]) -> None:
        for path in self.folder.glob("v*"):
            if not unwanted(path.stem):
                continue
            if path.is_dir():
                (path / MANIFEST).unlink(missing_ok=True)  # first, so that a reader never takes it for complete
                shutil.rmtree(path)
            else:
                path.unlink()

    def release(self, ticket: Ticket) -> None:
        """Versions stay for restarts and for audit; `keep` bounds them."""

    def check_hosts(self, hosts: Iterable[str]) -> None:
        """Whether every host mounts the folder shows when it is opened there."""

    def close(self) -> None:
        """Let another publisher in."""
        self._lock.close()


def name_of(version: int) -> str:
    """Zero-padded, so that names sort by version."""
    return f"v{version:09d}"


def read_version(folder: Path, version: int) -> Snapshot:
    """Read a version that a `Directory` published: the whole one before it, and the deltas since.

    Raises:
        SnapshotError: it was never published there, is not kept any more, or is damaged.
    """
    whole = [path.parent for path in folder.glob(f"v*/{MANIFEST}") if path.parent.name <= name_of(version)]
    if not whole:
        raise SnapshotError(f"{folder} holds no whole version up to {version}; it was not kept or never published")
    snap = read_directory(max(whole))
    for path in sorted(folder.glob("v*.delta")):
        if max(whole).name < path.stem <= name_of(version):
            snap = apply(snap, path.read_bytes())
    if snap.version != version:
        raise SnapshotError(f"{folder} goes up to version {snap.version}, not {version}; publish it first")
    return snap
