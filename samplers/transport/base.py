"""The interface of a transport: how a published version gets from the learner to the samplers' processes.

A transport takes a whole snapshot or a delta and gives a ticket; a sampler opens the ticket, on any node that the
transport reaches. Nothing is opened that is not complete.
"""

import socket
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from rlq.publish import PackedSnapshot, Snapshot, unpack
from rlq.publish.delta import Delta, open_delta


class Ticket(Protocol):
    """What a sampler needs to fetch a version."""

    lasting: ClassVar[bool]
    """It can be opened later and again, by any sampler; otherwise once, by those that the version was sent to."""

    def open(self, endpoint: Any = None) -> Snapshot | Delta:
        """Fetch it; SnapshotError if it is gone or damaged.

        Args:
            endpoint: what the actor that opens it hosts for the transport, see `SamplerActor.transfer`.
        """
        ...


class TransportSettings(Protocol):
    """What transports read of `samplers.options.SamplerConfig`."""

    sampler_transport: str
    sampler_num_gpus: float
    sampler_transport_dir: str | None
    sampler_transport_keep: int


class Transport(Protocol):
    """Carries versions; one per publisher."""

    keeps_device: ClassVar[bool]
    """Payloads travel from the learner's device; otherwise from host memory."""

    @classmethod
    def check(cls, settings: TransportSettings) -> None:
        """Raise ConfigError if it cannot work with these settings."""
        ...

    @classmethod
    def from_config(cls, settings: TransportSettings, model_config: dict) -> "Transport":
        """Build it from checked settings and the model's `config.json`."""
        ...

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


def opened(header: dict | None, data: np.ndarray) -> Snapshot | Delta:
    """A packed snapshot, or without a header a delta, from its bytes; nothing is copied."""
    return open_delta(data.data) if header is None else unpack(PackedSnapshot(header, data))


def elsewhere(hosts: Iterable[str]) -> list[str]:
    """Hosts other than this one."""
    return sorted(set(hosts) - {socket.gethostname()})
