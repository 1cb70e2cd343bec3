"""Versions through files in shared memory, on one host."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlq.errors import ConfigError, SamplerError, SnapshotError
from rlq.files import write_renamed
from rlq.publish import Snapshot, pack
from rlq.publish.delta import Delta

from .base import Ticket, TransportSettings, elsewhere, opened

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class FileTicket:
    """A version in a file of shared memory."""

    path: str
    """The file."""
    header: dict | None
    """Header of a packed snapshot; None for a delta."""
    lasting: ClassVar[bool] = True
    """See `Ticket`."""

    def open(self, endpoint: Any = None) -> Snapshot | Delta:
        """Map it, without a copy."""
        try:
            data = np.memmap(self.path, np.uint8, mode="r")
        except (FileNotFoundError, ValueError) as error:
            raise SnapshotError(f"{self.path} is gone or empty ({error}); send the version again") from None
        return opened(self.header, data)


class SharedMemory:
    """Files in shared memory, for samplers on the publisher's host; no Ray object store is involved."""

    keeps_device: ClassVar[bool] = False

    @classmethod
    def check(cls, settings: TransportSettings) -> None:
        """See `Transport`; it works with any."""

    @classmethod
    def from_config(cls, settings: TransportSettings, model_config: dict) -> "SharedMemory":
        """See `Transport`."""
        return cls()

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


def sweep(folder: Path) -> None:
    """Remove what publishers that no longer live left in shared memory."""
    for path in folder.glob("rlq-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
