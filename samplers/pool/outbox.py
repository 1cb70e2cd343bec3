"""What travels to the actors: a version whole or as a delta, and which tickets somebody may still open."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rlq.publish import Snapshot, delta

from ..transport.base import Ticket, Transport
from .fleet import Member


@dataclass(frozen=True)
class Shipment:
    """A version on its way."""

    snap: Snapshot
    """The version."""
    ticket: Ticket
    """How to fetch it."""
    nbytes: int
    """Bytes that were sent."""
    whole: bool
    """Not a delta."""
    staging: dict[ray.ObjectRef, tuple[Member, Any]]
    """Calls of `stage` under way, with the actor that each was made to."""
    sent_s: float
    """When it was sent, in `time.perf_counter` seconds."""


class Outbox:
    """Sends versions through a transport, and releases tickets that nobody will open again.

    Args:
        transport: how versions reach the actors.
    """

    def __init__(self, transport: Transport):
        self.transport = transport
        self.snapshot: Snapshot | None = None
        """The version that samplers serve or are about to: base of the next delta, and what fresh actors receive."""
        self.whole_ticket: Ticket | None = None
        """The same where samplers can fetch it whole, if one of them needed that."""
        self._old_tickets: list[Ticket] = []
        self._since_whole = 0

    def send(self, snap: Snapshot, members: Sequence[Member], *, base: bool, whole_every: int) -> Shipment:
        """Send a version, as a delta if that is possible and smaller, and have the actors stage it.

        Args:
            snap: the version.
            members: actors that are ready for it.
            base: the actors serve `snapshot`.
            whole_every: versions per whole one.
        """
        start = time.perf_counter()
        blob = None
        if base and self.snapshot is not None and self._since_whole < whole_every:
            blob = delta.encode(self.snapshot, snap)
            blob = blob if len(blob) < snap.nbytes else None
        payload = snap if blob is None else blob
        ticket = self.transport.send(snap.version, payload, [member.actor for member in members])
        staging = {member.actor.stage.remote(ticket): (member, member.actor) for member in members}
        return Shipment(snap, ticket, snap.nbytes if blob is None else len(blob), blob is None, staging, start)

    def whole(self) -> Ticket:
        """The current version, where samplers can fetch it whole."""
        assert self.snapshot is not None
        if self.whole_ticket is None:
            self.whole_ticket = self.transport.send(self.snapshot.version, self.snapshot)
        return self.whole_ticket

    def adopt(self, shipment: Shipment) -> None:
        """A shipment's version becomes the current one."""
        self._retire_whole()
        if shipment.whole and shipment.ticket.lasting:
            self.whole_ticket = shipment.ticket
        else:
            self._old_tickets.append(shipment.ticket)
        self.snapshot = shipment.snap

    def revert(self, previous: Snapshot | None) -> None:
        """The samplers refused the current version and go on with the one before."""
        self._retire_whole()
        self.snapshot = previous

    def committed(self, shipment: Shipment) -> None:
        """The samplers serve the version now."""
        self._since_whole = 1 if shipment.whole else self._since_whole + 1

    def release_old(self) -> None:
        """Forget tickets of versions that are not current; nobody may be reading one."""
        for ticket in self._old_tickets:
            self.transport.release(ticket)
        self._old_tickets = []

    def _retire_whole(self) -> None:
        if self.whole_ticket is not None:
            self._old_tickets.append(self.whole_ticket)
        self.whole_ticket = None
