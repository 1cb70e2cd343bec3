"""Which actor serves which version: staging, committing, proving, and catching up.

A version is shipped while the one before is served; once every actor holds it, all commit between two requests. An
actor that is not there yet (fresh, slow, installed again) catches up in its own time; the others go on without it.
"""

import logging
import time
from dataclasses import replace

import ray
from ray.exceptions import RayActorError

from rlq.emulate.probe import ScoreCheck
from rlq.errors import SamplerError, SnapshotError
from rlq.publish import Snapshot
from rlq.types import InstallReport

from .actor import Answer
from .calls import answered, result, silence
from .fleet import Fleet, Member
from .outbox import Outbox, Shipment

logger = logging.getLogger(__name__)


class Shipping:
    """See the module's docstring.

    Args:
        fleet: the actors.
        outbox: what travels.
    """

    def __init__(self, fleet: Fleet, outbox: Outbox):
        self.fleet = fleet
        self.outbox = outbox
        self.version: int | None = None
        """Version that the pool serves; None while nothing is installed or actors are committing."""
        self.ahead: Shipment | None = None
        """A version that is being shipped and not committed."""
        self.probe: ScoreCheck | None = None
        self.proof: dict[str, float] = {}
        """See `rlq.types.Sampler`."""

    def ship(self, snap: Snapshot) -> None:
        """Begin to send a version while the one before is served; `install` waits for it and commits."""
        if self.version is not None:
            self.ahead = self._send(snap)

    def _send(self, snap: Snapshot) -> Shipment:
        ready = [m for m in self.fleet.members if m.joining is None and m.busy is None]
        serving = self.version is not None
        return self.outbox.send(snap, ready, base=serving, whole_every=self.fleet.options.whole_every)

    def install(self, snap: Snapshot, probe: ScoreCheck | None) -> InstallReport:
        """See `SamplerPool.install`."""
        if self.version is None:
            self.fleet.await_start()
            self.outbox.transport.check_hosts(m.where.host for m in self.fleet.members if m.where)
        start = time.perf_counter()
        self.look_after()
        ahead = self.ahead
        self.ahead = None
        shipment = ahead if ahead is not None and ahead.snap is snap else self._send(snap)
        previous = self.outbox.snapshot
        self.outbox.adopt(shipment)
        try:
            staged = self._staged(shipment)
        except SnapshotError:
            self.outbox.revert(previous)
            raise
        commit = time.perf_counter()
        self.probe = probe
        self.proof = {}
        reports = self._committed(staged, snap)
        self.outbox.committed(shipment)
        if all(member.joining is None for member in self.fleet.members):  # else one may be reading
            self.outbox.release_old()
        now = time.perf_counter()
        pause = max(report.pause_s for report in reports)
        return replace(
            reports[0], ship_s=commit - start, install_s=now - commit, pause_s=pause, shipped_bytes=shipment.nbytes
        )

    def _staged(self, shipment: Shipment) -> list[Member]:
        """The actors that hold the version, checked and ready; SnapshotError if they refuse it whole."""
        snap = shipment.snap
        staged: list[Member] = []
        waiting = {ref: m for ref, (m, actor) in shipment.staging.items() if m.actor is actor}
        whole = set(waiting) if shipment.whole and shipment.ticket.lasting else set()
        for ref, member in answered(waiting, shipment.sent_s, self._patience_s):
            try:
                result(ref)
                staged.append(member)
            except SnapshotError as error:
                if ref in whole:  # the samplers go on with what they have, and so does the pool
                    raise
                logger.warning("%s needs version %d whole: %s", member, snap.version, error)
                again = member.actor.stage.remote(self.outbox.whole())
                waiting[again] = member
                whole.add(again)
            except (RayActorError, SamplerError) as error:
                self.replace(member, f"receiving version {snap.version}", error)
        return staged

    def _committed(self, staged: list[Member], snap: Snapshot) -> list[InstallReport]:
        """Have the staged actors commit, or wait for the first that gets there some other way."""
        reports = []
        self.version = None
        for member in self.fleet.members:
            member.serves = None
        start = time.perf_counter()
        waiting = {m.actor.commit.remote(): m for m in staged}
        for ref, member in answered(waiting, start, self._patience_s):
            try:
                reports.append(result(ref))
                member.serves = snap.version
            except SnapshotError as error:
                logger.warning("%s needs version %d whole: %s", member, snap.version, error)
            except (RayActorError, SamplerError) as error:
                self.replace(member, f"installing version {snap.version}", error)
        self.version = snap.version
        self.fleet.returning()
        for member in self.fleet.members:
            if member.joining is None and member.serves is None:
                self.catch_up(member)
        while not reports:
            reports += self.look_after(block=True)
        return reports

    def catch_up(self, member: Member) -> None:
        """Install the current version on one actor; its calls run in order, so this one runs before others."""
        member.serves = None
        member.busy = None
        member.joining = member.actor.install.remote(self.outbox.whole())
        member.since = time.perf_counter()

    def look_after(self, *, block: bool = False) -> list[InstallReport]:
        """Look at actors that catch up and at calls that nobody waits for; with `block`, wait for one of them.

        Returns:
            Reports of the actors that have caught up with the current version.
        """
        for member in list(self.fleet.members):
            if member.joining is not None and member.where is not None and self._stuck(member):
                self.replace(member, "catching up", TimeoutError(f"no answer for {self._patience_s:.0f} s"))
        joining = {m.joining: m for m in self.fleet.members if m.joining is not None}
        unneeded = {m.busy: m for m in self.fleet.members if m.busy is not None}
        refs = [*joining, *unneeded]
        if not refs:
            if block:
                raise SamplerError("no sampler is left; look at the warnings above")
            return []
        done, _ = ray.wait(refs, num_returns=1 if block else len(refs), timeout=self._patience_s if block else 0)
        if block and not done:
            raise silence(self._patience_s)
        reports = []
        for ref in done:
            member = joining.get(ref) or unneeded[ref]
            try:
                report = result(ref)
                member.busy = None
                if ref in joining:
                    reports += self._caught_up(member, report)
            except (RayActorError, SamplerError, SnapshotError) as error:
                self.replace(member, "catching up", error)
        return reports

    def _caught_up(self, member: Member, report: InstallReport) -> list[InstallReport]:
        member.joining = None
        member.where = result(member.actor.where.remote())
        if report.version != self.version:
            self.catch_up(member)
            return []
        member.serves = report.version
        return [report]

    def prove(self, member: Member, answer: Answer) -> None:
        """Raise SamplerError unless the engine holds what was published and computes with it."""
        if answer.digest is None:
            return
        assert self.outbox.snapshot is not None
        if answer.digest != self.outbox.snapshot.digest:
            found, wanted = answer.digest[:12], self.outbox.snapshot.digest[:12]
            raise SamplerError(f"version {self.version} reads back as {found}, not {wanted}")
        proof = {"sync/proven_samplers": self.proof.get("sync/proven_samplers", 0.0) + 1}
        if self.probe is not None:
            nats = self.probe.check(answer.scores)
            proof["sync/canary_nats"] = max(nats, self.proof.get("sync/canary_nats", 0.0))
        self.proof = proof
        member.suspect = False
        member.failures = 0

    def install_again(self, member: Member, error: SamplerError) -> None:
        """An engine that cannot prove what it serves gets it whole; the second time it is replaced."""
        if member.suspect:
            self.replace(member, f"serving version {self.version}", error)
            return
        logger.warning("%s is installed again: %s", member, error)
        member.suspect = True
        self.catch_up(member)

    def replace(self, member: Member, phase: str, error: Exception) -> None:
        """Start a fresh actor, which catches up when it runs; or go on without."""
        if self.fleet.replace(member, phase, error) and self.outbox.snapshot is not None and self.version is not None:
            self.catch_up(member)

    def forget(self) -> None:
        """Nothing is served any more: another scheme follows."""
        self.version = None
        self.ahead = None
        self.outbox.revert(None)

    def _stuck(self, member: Member) -> bool:
        """It ran before and has not caught up; one that still waits for its place in the cluster may take for ever."""
        return time.perf_counter() - member.since > self._patience_s

    @property
    def _patience_s(self) -> float:
        return self.fleet.options.call_timeout_s
