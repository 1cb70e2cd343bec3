"""A pool of Ray actors behind the `Sampler` protocol: one version everywhere, least-loaded dispatch, bounded restarts.

A version is shipped while the one before is served; once every actor holds it, all switch between two requests. An
actor that is not there yet (fresh, slow, installed again) joins when it is; the others go on without it.

Requests are cut into chunks of fixed composition, and an actor runs one chunk at a time. Which actor runs which chunk
depends on timing; what a chunk yields does not, so a run is reproducible bit for bit.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlq.emulate.probe import ScoreCheck
from rlq.errors import SamplerError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, delta
from rlq.types import InstallReport, Request, Rollout, Sampling

from ..options import PoolOptions, SamplerConfig
from ..transport import ObjectStore, Ticket, Transport
from ..vllm.engine import VllmSampler
from .actor import Answer, Engine
from .fleet import Fleet, Member

logger = logging.getLogger(__name__)

SLOW_FACTOR, SLOW_S = 4.0, 5.0
"""Once others have answered, an actor gets so many times as long as they took, and so many seconds more."""


@dataclass
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
    """Calls under way, with the actor that each was made to."""
    sent_s: float
    """When it was sent."""


class SamplerPool:
    """See the module's docstring.

    Args:
        factory: builds an engine in the actor's process.
        args: its picklable arguments; it is called with these and `scheme`.
        scheme: what the samplers serve.
        options: size and patience.
        transport: how versions reach the actors; Ray's object store unless another one is given.

    Raises:
        ConfigError: the cluster can never hold the actors.
        SamplerError: the actors cannot be placed now.
    """

    def __init__(
        self,
        factory: Callable[..., Engine],
        args: tuple,
        scheme: Scheme,
        options: PoolOptions,
        transport: Transport | None = None,
    ):
        self.scheme, self.options = scheme, options
        self.transport = transport or ObjectStore()
        self.version: int | None = None
        self.busy_s = 0.0  # seconds spent generating, summed over actors
        self.size = options.num_samplers  # chunks per batch; not the number of actors that happen to live
        self._snapshot: Snapshot | None = None  # what every fresh actor receives first, and the base of the next delta
        self._whole_ticket: Ticket | None = None  # the same, where samplers can fetch it, if somebody needed it whole
        self._old_tickets: list[Ticket] = []
        self._since_whole = 0
        self._probe: ScoreCheck | None = None
        self.proof: dict[str, float] = {}
        self._ahead: Shipment | None = None
        self._fleet = Fleet(factory, args, scheme, options)

    @classmethod
    def vllm(cls, model_config: dict, config: SamplerConfig) -> "SamplerPool":
        """A pool of vLLM engines for the model that `model_config` (its `config.json`) describes."""
        args = (model_config, config.engine())
        return cls(VllmSampler, args, config.scheme(), config.pool(), config.transport(model_config))

    # Shipping and installing

    def ship(self, snap: Snapshot) -> None:
        """Begin to send a version while the one before is served; `install` waits for it and switches.

        May be called from another thread than the one that generates.
        """
        if self.version is not None:
            self._ahead = self._send(snap)

    def _send(self, snap: Snapshot) -> Shipment:
        start = time.perf_counter()
        blob = self._delta(snap)
        ready = [m for m in self._fleet.members if m.joining is None and m.busy is None]
        ticket = self.transport.send(snap.version, snap if blob is None else blob, [m.actor for m in ready])
        staging = {m.actor.stage.remote(ticket): (m, m.actor) for m in ready}
        return Shipment(snap, ticket, snap.nbytes if blob is None else len(blob), blob is None, staging, start)

    def _delta(self, snap: Snapshot) -> bytes | None:
        """What turns the served version into `snap`, or None if it has to travel whole."""
        if self.version is None or self._snapshot is None or self._since_whole >= self.options.whole_every:
            return None
        blob = delta.encode(self._snapshot, snap)
        return blob if len(blob) < snap.nbytes else None

    def install(self, snap: Snapshot, probe: ScoreCheck | None = None) -> InstallReport:
        """Serve `snap`; no actor serves it before all that can have it ready. The first call waits for the actors.

        What the engines read back, and how they score the probe, is looked at before their first rollouts are.

        Raises:
            SnapshotError: refused by the samplers, which go on serving the previous version.
            SamplerError: actors did not start, or died more often than `max_restarts` allows.
        """
        if self.version is None:
            self._fleet.await_start()
            self.transport.check_hosts(m.where.host for m in self._fleet.members if m.where)
        start = time.perf_counter()
        self._settle()
        ahead, self._ahead = self._ahead, None
        shipment = ahead if ahead is not None and ahead.snap is snap else self._send(snap)
        if shipment.whole and shipment.ticket.lasting:
            self._keep_whole(shipment.ticket)
        else:
            self._old_tickets.append(shipment.ticket)
            self._keep_whole(None)
        previous, self._snapshot = self._snapshot, snap
        try:
            staged = self._staged(shipment)
        except SnapshotError:
            self._snapshot = previous
            self._keep_whole(None)
            raise
        switch = time.perf_counter()
        self._probe, self.proof = probe, {}
        reports = self._switched(staged, snap)
        self._since_whole = 1 if shipment.whole else self._since_whole + 1
        self._release_old()
        now = time.perf_counter()
        pause = max(report.pause_s for report in reports)
        return replace(
            reports[0], ship_s=switch - start, install_s=now - switch, pause_s=pause, shipped_bytes=shipment.nbytes
        )

    def _staged(self, shipment: Shipment) -> list[Member]:
        """The actors that hold the version, checked and ready; SnapshotError if they refuse it whole."""
        snap, staged = shipment.snap, []
        waiting = {ref: m for ref, (m, actor) in shipment.staging.items() if m.actor is actor}
        whole = set(waiting) if shipment.whole and shipment.ticket.lasting else set()
        for ref, member in self._answers(waiting, shipment.sent_s):
            try:
                _get(ref)
                staged.append(member)
            except SnapshotError as error:
                if ref in whole:  # the samplers go on with what they have, and so does the pool
                    raise
                logger.warning("%s needs version %d whole: %s", member, snap.version, error)
                again = member.actor.stage.remote(self._whole())
                waiting[again] = member
                whole.add(again)
            except (RayActorError, SamplerError) as error:
                self._replace(member, f"receiving version {snap.version}", error)
        return staged

    def _switched(self, staged: list[Member], snap: Snapshot) -> list[InstallReport]:
        """Switch the staged actors, or wait for the first that gets there some other way."""
        reports = []
        self.version = None
        for member in self._fleet.members:
            member.serves = None
        start = time.perf_counter()
        waiting = {m.actor.commit.remote(): m for m in staged}
        for ref, member in self._answers(waiting, start):
            try:
                reports.append(_get(ref))
                member.serves = snap.version
            except SnapshotError as error:
                logger.warning("%s needs version %d whole: %s", member, snap.version, error)
            except (RayActorError, SamplerError) as error:
                self._replace(member, f"installing version {snap.version}", error)
        self.version = snap.version
        self._fleet.returning()
        for member in self._fleet.members:
            if member.joining is None and member.serves is None:
                self._join(member)
        while not reports:
            reports += self._settle(block=True)
        return reports

    def _prove(self, member: Member, answer: Answer) -> None:
        """Raise SamplerError unless the engine holds what was published and computes with it."""
        if answer.digest is None:
            return
        assert self._snapshot is not None
        if answer.digest != self._snapshot.digest:
            found, wanted = answer.digest[:12], self._snapshot.digest[:12]
            raise SamplerError(f"version {self.version} reads back as {found}, not {wanted}")
        proof = {"sync/proven_samplers": self.proof.get("sync/proven_samplers", 0.0) + 1}
        if self._probe is not None:
            nats = self._probe.check(answer.scores)
            proof["sync/canary_nats"] = max(nats, self.proof.get("sync/canary_nats", 0.0))
        self.proof = proof
        member.suspect, member.failures = False, 0

    def _join(self, member: Member) -> None:
        """Have an actor catch up in its own time: calls to one actor run in order, so this one runs before others."""
        member.serves, member.busy = None, None
        member.joining, member.since = member.actor.install.remote(self._whole()), time.perf_counter()

    def _settle(self, *, block: bool = False) -> list[InstallReport]:
        """Look at installs and unneeded calls that nobody waits for; with `block`, wait for one install."""
        reports = []
        for member in list(self._fleet.members):
            if member.joining is not None and member.where is not None and self._stuck(member):
                self._replace(member, "catching up", TimeoutError(f"no answer for {self._patience():.0f} s"))
        joining = {m.joining: m for m in self._fleet.members if m.joining is not None}
        unneeded = {m.busy: m for m in self._fleet.members if m.busy is not None}
        refs = [*joining, *unneeded]
        if not refs:
            if block:
                raise SamplerError("no sampler is left; look at the warnings above")
            return []
        done, _ = ray.wait(refs, num_returns=1 if block else len(refs), timeout=self._patience() if block else 0)
        if block and not done:
            raise self._silence()
        for ref in done:
            member = joining.get(ref) or unneeded[ref]
            try:
                answer = _get(ref)
                member.busy = None
                if ref in joining:
                    member.joining = None
                    member.where = _get(member.actor.where.remote())
                    if answer.version == self.version:
                        reports.append(answer)
                        member.serves = answer.version
                    else:
                        self._join(member)
            except (RayActorError, SamplerError, SnapshotError) as error:
                self._replace(member, "catching up", error)
        return reports

    def _replace(self, member: Member, phase: str, error: Exception) -> None:
        """Start a fresh actor, which joins when it runs; or go on without."""
        if self._fleet.replace(member, phase, error) and self._snapshot is not None and self.version is not None:
            self._join(member)

    def _distrust(self, member: Member, error: SamplerError) -> None:
        """An engine that cannot prove what it serves gets it whole, again; the second time it is replaced."""
        if member.suspect:
            return self._replace(member, f"serving version {self.version}", error)
        logger.warning("%s is installed again: %s", member, error)
        member.suspect = True
        return self._join(member)

    def _whole(self) -> Ticket:
        """The current snapshot, where samplers can fetch it."""
        assert self._snapshot is not None
        if self._whole_ticket is None:
            self._whole_ticket = self.transport.send(self._snapshot.version, self._snapshot)
        return self._whole_ticket

    def _keep_whole(self, ticket: Ticket | None) -> None:
        if self._whole_ticket is not None:
            self._old_tickets.append(self._whole_ticket)
        self._whole_ticket = ticket

    def _release_old(self) -> None:
        if all(member.joining is None for member in self._fleet.members):  # else one may be reading
            for ticket in self._old_tickets:
                self.transport.release(ticket)
            self._old_tickets = []

    # Sampling

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Rollout]:
        """Sample on all actors; a chunk whose actor dies or dawdles runs again elsewhere, with the same seeds.

        Raises:
            SamplerError: `version` is not the installed one, or actors died more often than `max_restarts` allows.
            ConfigError: a prompt does not fit the engine's context.
        """
        if version != self.version:
            raise SamplerError(f"asked for version {version}, serving {self.version}; install that version first")
        work = _Batch(split_evenly(requests, self.size))
        prompts = () if self._probe is None else self._probe.prompts
        try:
            while work.unfinished:
                self._settle()
                for member in self._fleet.members:
                    if member.serves != version or member.busy is not None or member in work.members:
                        continue
                    chunk = work.next_chunk()
                    if chunk is None:
                        break
                    asked = member.actor.generate.remote(work.chunks[chunk], sampling, version, prompts)
                    work.started(asked, member, chunk)
                self._collect(work, version)
        finally:
            for ref, (member, _, _) in work.running.items():
                member.busy = ref
        return work.rollouts()

    def interrupt(self, version: int) -> None:
        """See `rlq.types.Sampler`."""
        for member in list(self._fleet.members):  # another thread may be replacing one
            member.actor.interrupt.remote(version)

    def _collect(self, work: "_Batch", version: int) -> None:
        """Wait for an answer, or until it is time to look after slow chunks and fresh actors."""
        others = [ref for m in self._fleet.members for ref in (m.joining, m.busy) if ref is not None]
        refs = [*work.running, *others]
        if not refs:
            raise SamplerError("no sampler is left; look at the warnings above")
        done, _ = ray.wait(refs, num_returns=1, timeout=min(work.patience(), self._patience()))
        if not done and time.perf_counter() - work.heard_s > self._patience():
            raise self._silence()
        for ref in done:
            if ref not in work.running:
                continue
            member, chunk, _ = work.running.pop(ref)
            try:
                answer: Answer = _get(ref)
            except (RayActorError, SamplerError) as error:
                self._replace(member, f"generating with version {version}", error)
                work.failed(chunk)
                continue
            try:
                self._prove(member, answer)
            except SamplerError as error:
                self._distrust(member, error)
                work.failed(chunk)
            else:
                self.busy_s += answer.seconds
                work.finished(chunk, answer.rollouts, answer.seconds)

    def _answers(self, waiting: dict[ray.ObjectRef, Member], start: float):
        """Yield calls as they are answered; a caller may add more. Slow ones are left behind, to catch up."""
        first: float | None = None
        while waiting:
            timeout = self._patience() if first is None else SLOW_FACTOR * first + SLOW_S
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout)
            if not done and first is None:
                raise self._silence()
            if not done:
                for member in waiting.values():
                    logger.warning("%s is slow; going on without it until it has caught up", member)
                return
            if first is None:
                first = time.perf_counter() - start
            yield done[0], waiting.pop(done[0])

    def _stuck(self, member: Member) -> bool:
        """It ran before and has not caught up; one that still waits for its place in the cluster may take for ever."""
        return time.perf_counter() - member.since > self._patience()

    def _patience(self) -> float:
        return self.options.call_timeout_s

    def _silence(self) -> SamplerError:
        return SamplerError(f"no sampler answered within {self._patience():.0f} s; the run is stopped")

    # Size and life

    def resize(self, num_samplers: int) -> None:
        """Have actors join or leave, between two batches; fresh ones take part once they have started and installed.

        Raises:
            ConfigError: the cluster can never hold so many.
            SamplerError: it cannot place them now.
        """
        extra = num_samplers - len(self._fleet.members)
        for member in self._fleet.members[num_samplers:]:
            self._fleet.drop(member)
        if extra > 0:
            fresh = self._fleet.grow(extra)
            if self.version is not None:
                for member in fresh:
                    self._join(member)
        self.size = num_samplers

    def change_scheme(self, scheme: Scheme) -> None:
        """Start fresh actors for another scheme; they serve nothing until the next install."""
        self.scheme, self.version, self._snapshot, self._ahead = scheme, None, None, None
        self._keep_whole(None)
        self._fleet.restart(scheme)

    def close(self) -> None:
        """Kill the actors and free their bundles."""
        self._fleet.close()
        self.transport.close()


class _Batch:
    """Chunks of requests, who runs which, and what came back; every chunk's answer is taken once."""

    def __init__(self, chunks: list[list[Request]]):
        self.chunks = chunks
        self.running: dict[ray.ObjectRef, tuple[Member, int, float]] = {}
        self.heard_s = time.perf_counter()
        self._pending = deque(range(len(chunks)))
        self._results: dict[int, list[Rollout]] = {}
        self._slowest = 0.0

    @property
    def unfinished(self) -> bool:
        return len(self._results) < len(self.chunks)

    @property
    def members(self) -> list[Member]:
        return [member for member, _, _ in self.running.values()]

    def next_chunk(self) -> int | None:
        """The next chunk that nobody runs, or else one that its only actor has had for too long."""
        if self._pending:
            return self._pending.popleft()
        now, runners = time.perf_counter(), [chunk for _, chunk, _ in self.running.values()]
        for member, chunk, since in self.running.values():
            overdue = bool(self._results) and now - since > self._deadline()
            if overdue and chunk not in self._results and runners.count(chunk) == 1:
                logger.warning("%s has had a chunk for %.1f s; another one takes it too", member, now - since)
                return chunk
        return None

    def _deadline(self) -> float:
        return SLOW_FACTOR * self._slowest + SLOW_S

    def patience(self) -> float:
        """Seconds until a chunk may be overdue."""
        now = time.perf_counter()
        left = [self._deadline() - (now - since) for _, _, since in self.running.values()] if self._results else []
        return max(min((s for s in left if s > 0), default=1.0), 0.01)

    def started(self, ref: ray.ObjectRef, member: Member, chunk: int) -> None:
        self.running[ref] = (member, chunk, time.perf_counter())

    def failed(self, chunk: int) -> None:
        """Run it again, unless somebody does or did."""
        if chunk not in self._results and all(other != chunk for _, other, _ in self.running.values()):
            self._pending.appendleft(chunk)
        self.heard_s = time.perf_counter()

    def finished(self, chunk: int, rollouts: list[Rollout], seconds: float) -> None:
        self._results.setdefault(chunk, rollouts)
        self._slowest, self.heard_s = max(self._slowest, seconds), time.perf_counter()

    def rollouts(self) -> list[Rollout]:
        return [rollout for chunk in range(len(self.chunks)) for rollout in self._results[chunk]]


def split_evenly(requests: Sequence[Request], parts: int) -> list[list[Request]]:
    """Cut `requests` into at most `parts` consecutive, non-empty chunks whose sizes differ by at most one."""
    parts = min(parts, len(requests))
    bounds = [len(requests) * i // parts for i in range(parts + 1)] if parts else [0]
    return [list(requests[a:b]) for a, b in pairwise(bounds)]


def _get(ref: ray.ObjectRef):
    """`ray.get` that raises the actor's own exception rather than Ray's wrapper around it."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise error.cause from None
