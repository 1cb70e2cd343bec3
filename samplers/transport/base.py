"""How a published version gets from the learner to the samplers' processes: ways behind one interface.

A transport takes a whole snapshot or a delta and gives a ticket; whoever has the ticket opens it, on any node that the
transport reaches, as often as it likes. Nothing is opened that is not complete.
"""

import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import ray

from rlq.errors import ConfigError, SamplerError, SnapshotError
from rlq.files import write_renamed
from rlq.publish import MANIFEST, PackedSnapshot, Snapshot, pack, read_directory, unpack, write_directory
from rlq.publish.delta import Delta, open_delta

SHARED_MEMORY = Path("/dev/shm")


class Ticket(Protocol):
    """What a sampler needs to fetch a version."""

    lasting: ClassVar[bool]
    """It can be opened later and again, by anyone; otherwise once, by the samplers that the version was sent to."""

    def open(self) -> Snapshot | Delta:
        """Fetch it; SnapshotError if it is gone or damaged."""
        ...


class Transport(Protocol):
    """Carries versions; one per publisher."""

    def send(self, version: int, payload: Snapshot | bytes, to: Sequence[Any] = ()) -> Ticket:
        """Make a version, whole or as a delta, available to the samplers.

        Args:
            version: its number.
            payload: the snapshot, or a delta's bytes.
            to: handles of the actors that will open it at once; others may open it later if the ticket lasts.

        Raises:
            SamplerError: there is no room for it.
        """
        ...

    def release(self, ticket: Ticket) -> None:
        """Forget a version that no sampler will open any more."""
        ...

    def check_hosts(self, hosts: Iterable[str]) -> None:
        """Raise ConfigError if samplers on these hosts are out of reach."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@dataclass(frozen=True)
class StoreTicket:
    """A version in Ray's object store."""

    refs: tuple[ray.ObjectRef, ...]
    """The only element refers to it; in a tuple, so that Ray hands over the reference and not the object."""
    lasting: ClassVar[bool] = True
    """See `Ticket`."""

    def open(self) -> Snapshot | Delta:
        """Map it, without a copy; a node that lacks it fetches it once for all of its samplers."""
        found = ray.get(self.refs[0])
        return unpack(found) if isinstance(found, PackedSnapshot) else open_delta(found.data)


class ObjectStore:
    """Ray's object store: one put, many readers, one copy per node."""

    def send(self, version: int, payload: Snapshot | bytes, to: Sequence[Any] = ()) -> StoreTicket:
        """See `Transport`. Ray would spill to disk without a word; two snapshots, the old and the new, must fit."""
        if isinstance(payload, bytes):
            return StoreTicket((ray.put(np.frombuffer(payload, np.uint8)),))
        size = ray.cluster_resources().get("object_store_memory", 0)
        if 2 * payload.nbytes > size:
            raise SamplerError(
                f"two snapshots of {payload.nbytes / 2**20:.0f} MiB do not fit the object store "
                f"({size / 2**20:.0f} MiB); start Ray with a larger --object-store-memory"
            )
        return StoreTicket((ray.put(pack(payload)),))

    def release(self, ticket: Ticket) -> None:
        """The store frees what nobody refers to."""

    def check_hosts(self, hosts: Iterable[str]) -> None:
        """Every node of the cluster is reached."""

    def close(self) -> None:
        """See `release`."""


@dataclass(frozen=True)
class FileTicket:
    """A version in a file of shared memory."""

    path: str
    """The file."""
    header: dict | None
    """Header of a packed snapshot; None for a delta."""
    lasting: ClassVar[bool] = True
    """See `Ticket`."""

    def open(self) -> Snapshot | Delta:
        """Map it, without a copy."""
        try:
            data = np.memmap(self.path, np.uint8, mode="r")
        except (FileNotFoundError, ValueError) as error:
            raise SnapshotError(f"{self.path} is gone or empty ({error}); send the version again") from None
        return opened(self.header, data)


class SharedMemory:
    """Files in shared memory, for samplers on the publisher's host; no Ray object store is involved."""

    def __init__(self) -> None:
        sweep(SHARED_MEMORY)
        self._folder = Path(tempfile.mkdtemp(prefix=f"rlq-{os.getpid()}-", dir=SHARED_MEMORY))

    def send(self, version: int, payload: Snapshot | bytes, to: Sequence[Any] = ()) -> FileTicket:
        """See `Transport`."""
        if isinstance(payload, bytes):
            kind, data, header = "delta", memoryview(payload), None
        else:
            packed = pack(payload)
            kind, data, header = "whole", packed.buffer.data, packed.header
        path = self._folder / f"{version}-{kind}"
        free = shutil.disk_usage(self._folder).free
        if len(data) > free:
            raise SamplerError(
                f"version {version} has {len(data) >> 20} MiB, {SHARED_MEMORY} has {free >> 20} MiB left; enlarge it "
                "or set sampler_transport: object_store"
            )
        write_renamed(path, data)
        return FileTicket(str(path), header)

    def release(self, ticket: Ticket) -> None:
        """Unlink the file; who has it mapped keeps it."""
        assert isinstance(ticket, FileTicket)
        Path(ticket.path).unlink(missing_ok=True)

    def check_hosts(self, hosts: Iterable[str]) -> None:
        """See `Transport`."""
        away = elsewhere(hosts)
        if away:
            raise ConfigError(
                f"samplers run on {', '.join(away)}, out of reach of this host's shared memory; "
                "set sampler_transport: object_store or directory"
            )

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class DirectoryTicket:
    """A version in a folder that all samplers see."""

    path: str
    """Folder of a whole version, or file of a delta."""
    lasting: ClassVar[bool] = True
    """See `Ticket`."""

    def open(self) -> Snapshot | Delta:
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


def opened(header: dict | None, data: np.ndarray) -> Snapshot | Delta:
    """A packed snapshot, or without a header a delta, from its bytes; nothing is copied."""
    return open_delta(data.data) if header is None else unpack(PackedSnapshot(header, data))


def elsewhere(hosts: Iterable[str]) -> list[str]:
    """Those that are not this one."""
    return sorted(set(hosts) - {socket.gethostname()})


def name_of(version: int) -> str:
    """Sorts like the number."""
    return f"v{version:09d}"


def read_version(folder: Path, version: int) -> Snapshot:
    """Read a version that a `Directory` published: the whole one before it, and the deltas since.

    Raises:
        SnapshotError: it was never published there, is not kept any more, or is damaged.
    """
    from rlq.publish.delta import apply

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


def sweep(folder: Path) -> None:
    """Remove what publishers that no longer live left in shared memory."""
    for path in folder.glob("rlq-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
