"""The Ray actor that hosts one engine; a thin shell, so that everything below it runs and is tested without Ray.

Calls of the group `ship` run in a thread of their own, so that a version is checked and prepared while the engine
generates; calls without a group run one after the other.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import ray

from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot
from rlq.publish.delta import Delta
from rlq.types import InstallReport, Request, Rollout, Sampling

from ..transport import Ticket

SHIP = "ship"


class Engine(Protocol):
    """What an actor can host."""

    scheme: Scheme
    """Model scheme that it serves."""
    runs: str
    """What multiplies, in one line."""

    def stage(self, version: Snapshot | Delta) -> Any:
        """Check a version and prepare the switch to it, while the one before is served; in any thread."""
        ...

    def commit(self, staged: Any) -> InstallReport:
        """Switch to what `stage` returned."""
        ...

    def digest(self) -> str:
        """Digest of the tensors that the engine holds now; in any thread."""
        ...

    def score(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Log-probs in nats, at temperature 1, of every token of each prompt but its first."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Rollout]:
        """See `rlq.types.Sampler`."""
        ...

    def interrupt(self, version: int) -> None:
        """See `rlq.types.Sampler`."""
        ...

    def close(self) -> None:
        """End processes of its own, if it has any."""
        ...


class Place(NamedTuple):
    """Where an actor runs, and what."""

    host: str
    pid: int
    node: str
    runs: str


class Answer(NamedTuple):
    """What a generate call returns."""

    rollouts: list[Rollout]
    seconds: float
    digest: str | None = None
    """What the engine holds, read back; None if that was told before."""
    scores: Sequence[tuple[float, ...]] = ()
    """Log-probs of the probe's prompts, told with the digest."""


class SamplerActor:
    """Builds its engine from a picklable factory and forwards calls.

    Args:
        factory: called with `args` in the actor's process.
        args: picklable arguments.
        scheme: passed to the factory beside them.
    """

    def __init__(self, factory: Callable[..., Engine], args: tuple, scheme: Scheme):
        self.engine = factory(*args, scheme=scheme)
        self.endpoint: Any = None
        self._staged: Any = None
        self._reader = ThreadPoolExecutor(1)
        self._readback: Future[str] | None = None

    def where(self) -> Place:
        """Host, process and Ray node, for messages, and to tell a lost node from a lost process."""
        return Place(socket.gethostname(), os.getpid(), ray.get_runtime_context().get_node_id(), self.engine.runs)

    @ray.method(concurrency_group=SHIP)
    def transfer(self, endpoint: type, method: str, *args: Any) -> None:
        """Call a method of this actor's end of a transport: an `endpoint`, made at the first call."""
        if self.endpoint is None:
            self.endpoint = endpoint()
        getattr(self.endpoint, method)(*args)

    @ray.method(concurrency_group=SHIP)
    def stage(self, ticket: Ticket) -> None:
        """Fetch, check and prepare a version."""
        self._staged = self.engine.stage(ticket.open(self.endpoint))

    @ray.method(concurrency_group=SHIP)
    def interrupt(self, version: int) -> None:
        """Cut sampling short, once what was shipped before is prepared: calls of a group run in order."""
        self.engine.interrupt(version)

    def commit(self) -> InstallReport:
        """Switch to what was staged last."""
        staged, self._staged = self._staged, None
        return self._commit(staged)

    def install(self, ticket: Ticket) -> InstallReport:
        """Both steps at once, for an actor that serves nothing."""
        return self._commit(self.engine.stage(ticket.open(self.endpoint)))

    def _commit(self, staged: Any) -> InstallReport:
        report = self.engine.commit(staged)
        self._readback = self._reader.submit(self.engine.digest)  # beside the first requests
        return report

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, version: int, probe: Sequence[tuple[int, ...]]
    ) -> Answer:
        """Sample, and after a switch prove once what was switched to."""
        start = time.perf_counter()
        rollouts = self.engine.generate(requests, sampling, version)
        seconds = time.perf_counter() - start
        if self._readback is None:
            return Answer(rollouts, seconds)
        scores = self.engine.score(probe) if probe else []
        digest, self._readback = self._readback.result(), None
        return Answer(rollouts, seconds, digest, scores)

    def close(self) -> None:
        """End what the engine has started; the actor is of no use afterwards."""
        self.engine.close()
