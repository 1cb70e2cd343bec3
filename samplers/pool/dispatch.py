"""Which actor samples what: chunks of fixed composition, one at a time per actor, slow ones taken over.

Which actor runs which chunk depends on timing; what a chunk yields does not, so a run is reproducible bit for bit.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import ray
from ray.exceptions import RayActorError

from rlq.errors import SamplerError
from rlq.types import Request, Rollout, Sampling

from . import calls
from .actor import Answer
from .fleet import Member
from .shipping import Shipping

logger = logging.getLogger(__name__)


class Dispatch:
    """Samples on all actors that serve a version.

    Args:
        shipping: knows who serves it, and looks after who does not.
    """

    def __init__(self, shipping: Shipping):
        self.shipping = shipping
        self.fleet = shipping.fleet
        self.busy_s = 0.0
        """Seconds spent generating, summed over actors."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int, parts: int) -> list[Rollout]:
        """See `SamplerPool.generate`; the requests are cut into `parts` chunks."""
        work = Batch(split_evenly(requests, parts))
        probe = self.shipping.probe
        prompts = () if probe is None else probe.prompts
        try:
            while work.unfinished:
                self.shipping.look_after()
                for member in self.fleet.members:
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

    def _collect(self, work: "Batch", version: int) -> None:
        """Wait for an answer, or until it is time to look after slow chunks and fresh actors."""
        others = [ref for m in self.fleet.members for ref in (m.joining, m.busy) if ref is not None]
        refs = [*work.running, *others]
        if not refs:
            raise SamplerError("no sampler is left; look at the warnings above")
        patience_s = self.fleet.options.call_timeout_s
        done, _ = ray.wait(refs, num_returns=1, timeout=min(work.patience(), patience_s))
        if not done and time.perf_counter() - work.heard_s > patience_s:
            raise calls.silence(patience_s)
        for ref in done:
            if ref in work.running:
                self._take(work, ref, version)

    def _take(self, work: "Batch", ref: ray.ObjectRef, version: int) -> None:
        member, chunk, _ = work.running.pop(ref)
        try:
            answer: Answer = calls.result(ref)
        except (RayActorError, SamplerError) as error:
            self.shipping.replace(member, f"generating with version {version}", error)
            work.failed(chunk)
            return
        try:
            self.shipping.prove(member, answer)
        except SamplerError as error:
            self.shipping.install_again(member, error)
            work.failed(chunk)
            return
        self.busy_s += answer.seconds
        work.finished(chunk, answer.rollouts, answer.seconds)


class Batch:
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
        return calls.SLOW_FACTOR * self._slowest + calls.SLOW_S

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
