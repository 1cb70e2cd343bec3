"""A transport as a user would add one: a file per version, and an end in each actor that remembers what it has read."""

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ray

from rlq.errors import ConfigError
from rlq.publish import Snapshot, pack, unpack
from rlq.publish.delta import Delta, open_delta


class Reader:
    """An actor's end: reads a version when it is told to."""

    def __init__(self) -> None:
        self.read: dict[str, Any] = {}

    def fetch(self, path: str) -> None:
        self.read[path] = pickle.loads(Path(path).read_bytes())


@dataclass(frozen=True)
class FetchedTicket:
    path: str
    lasting: ClassVar[bool] = False

    def open(self, endpoint: Any = None) -> Snapshot | Delta:
        payload = endpoint.read.pop(self.path)
        return open_delta(payload) if isinstance(payload, bytes) else unpack(payload)


class FilePerVersion:
    keeps_device: ClassVar[bool] = False

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def check(cls, settings: Any) -> None:
        if settings.sampler_transport_dir is None:
            raise ConfigError("toy needs sampler_transport_dir")

    @classmethod
    def from_config(cls, settings: Any, model_config: dict) -> "FilePerVersion":
        return cls(Path(settings.sampler_transport_dir))

    def send(self, version: int, payload: Snapshot | bytes, to: Sequence[Any] = ()) -> FetchedTicket:
        path = self.folder / str(version)
        path.write_bytes(pickle.dumps(payload if isinstance(payload, bytes) else pack(payload)))
        ray.get([actor.transfer.remote(Reader, "fetch", str(path)) for actor in to])
        return FetchedTicket(str(path))

    def release(self, ticket: Any) -> None:
        """Files stay."""

    def check_hosts(self, hosts: Iterable[str]) -> None:
        """One host."""

    def close(self) -> None:
        """Nothing to close."""
