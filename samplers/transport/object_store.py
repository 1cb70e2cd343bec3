"""Versions through Ray's object store, to every node of the cluster."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import ray

from rlq.errors import SamplerError
from rlq.publish import PackedSnapshot, Snapshot, pack, unpack
from rlq.publish.delta import Delta, open_delta

from .base import Ticket, TransportSettings


@dataclass(frozen=True)
class StoreTicket:
    """A version in Ray's object store."""

    refs: tuple[ray.ObjectRef, ...]
    """The only element refers to it; in a tuple, so that Ray hands over the reference and not the object."""
    lasting: ClassVar[bool] = True
    """See `Ticket`."""

    def open(self, endpoint: Any = None) -> Snapshot | Delta:
        """Map it, without a copy; a node that lacks it fetches it once for all of its samplers."""
        found = ray.get(self.refs[0])
        return unpack(found) if isinstance(found, PackedSnapshot) else open_delta(found.data)


class ObjectStore:
    """Ray's object store: one put, many readers, one copy per node."""

    keeps_device: ClassVar[bool] = False

    @classmethod
    def check(cls, settings: TransportSettings) -> None:
        """See `Transport`; it works with any."""

    @classmethod
    def from_config(cls, settings: TransportSettings, model_config: dict) -> "ObjectStore":
        """See `Transport`."""
        return cls()

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
