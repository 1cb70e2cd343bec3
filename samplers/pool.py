"""A pool of Ray actors behind the `Sampler` protocol: one version everywhere, least-loaded dispatch, bounded restarts.

Requests are cut into chunks of fixed composition, and an actor runs one chunk at a time. Which actor runs which chunk
depends on timing; what a chunk yields does not, so a run is reproducible bit for bit.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlq import delta
from rlq.errors import ConfigError, SamplerError, SnapshotError
from rlq.publish import Snapshot, pack
from rlq.schemes import Scheme
from rlq.types import InstallReport, Request, Rollout, Sampler, Sampling

from .actor import SamplerActor
from .engine import VllmSampler
from .options import SamplerConfig

logger = logging.getLogger(__name__)

# Warnings of torch and vLLM that nobody who samples can act on; read when the actor's process starts.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::FutureWarning"}


@dataclass(frozen=True)
class PoolOptions:
    """Size and patience of a pool."""

    num_samplers: int = 2
    """Actors."""
    num_cpus: float = 1
    """CPUs per actor; also its thread count."""
    num_gpus: float = 0
    """GPUs per actor."""
    max_restarts: int = 3
    """Actors replaced over the pool's life before it gives up."""
    startup_timeout_s: float = 300.0
    """Seconds for all actors to load."""
    whole_every: int = 1
    """Versions per whole snapshot; those in between travel as deltas."""
    call_timeout_s: float = 1800.0
    """Seconds without any answer after which busy actors count as dead."""


@dataclass
class _Member:
    """One actor of the pool."""

    index: int
    actor: Any  # an ActorHandle; Ray generates its methods
    where: str = "not started"


class SamplerPool:
    """See the module's docstring.

    Args:
        factory: builds a sampler in the actor's process.
        args: its picklable arguments; it is called with these and `scheme`.
        scheme: what the samplers serve.
        options: size and patience.

    Raises:
        ConfigError: the cluster can never hold the actors.
        SamplerError: the actors cannot be placed now.
    """

    def __init__(self, factory: Callable[..., Sampler], args: tuple, scheme: Scheme, options: PoolOptions):
        self.scheme, self.options = scheme, options
        self._factory, self._args = factory, args
        self._restarts = 0
        self._snapshot: Snapshot | None = None  # what every fresh actor receives first, and the base of the next delta
        self._packed: ray.ObjectRef | None = None  # the same in the object store, if somebody needed it whole
        self._since_whole = 0
        self.version: int | None = None
        self.busy_s = 0.0  # seconds spent generating, summed over actors
        self._bundles = self._reserve()
        self._members = [_Member(i, self._spawn(i)) for i in range(options.num_samplers)]

    @classmethod
    def vllm(cls, model_config: dict, config: SamplerConfig) -> "SamplerPool":
        """A pool of vLLM engines for the model that `model_config` (its `config.json`) describes."""
        options = PoolOptions(
            num_samplers=config.num_samplers,
            num_cpus=config.sampler_num_cpus,
            num_gpus=config.sampler_num_gpus,
            max_restarts=config.sampler_max_restarts,
            whole_every=config.sampler_whole_every,
            startup_timeout_s=config.sampler_startup_timeout_s,
        )
        scheme = config.scheme()
        return cls(VllmSampler, (model_config, config.engine()), scheme, options)

    def _reserve(self):
        """Reserve one bundle per actor, or say at once what the cluster lacks."""
        o = self.options
        bundle = {k: v for k, v in (("CPU", o.num_cpus), ("GPU", o.num_gpus)) if v}
        check_capacity(o.num_samplers, bundle, ray.cluster_resources())
        group = placement_group([bundle] * o.num_samplers, strategy="PACK")
        if not group.wait(timeout_seconds=30):
            free = {k: v for k, v in ray.available_resources().items() if k in bundle}
            remove_placement_group(group)
            raise SamplerError(
                f"{o.num_samplers} x {bundle} not free within 30 s (free now: {free}); "
                "stop other jobs or lower num_samplers"
            )
        return group

    def _spawn(self, index: int) -> Any:
        o = self.options
        return (
            ray.remote(SamplerActor)
            .options(
                num_cpus=o.num_cpus,
                num_gpus=o.num_gpus,
                max_restarts=0,  # a restarted actor would serve nothing; the pool makes a fresh one and installs first
                runtime_env={"env_vars": QUIET | {"OMP_NUM_THREADS": str(max(1, int(o.num_cpus)))}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=index),
            )
            .remote(self._factory, self._args, self.scheme)
        )

    def _await_start(self) -> None:
        refs: list[Any] = [member.actor.where.remote() for member in self._members]
        _, late = ray.wait(refs, num_returns=len(refs), timeout=self.options.startup_timeout_s)
        if late:
            self.close()
            raise SamplerError(
                f"{len(late)} of {len(refs)} samplers did not start within {self.options.startup_timeout_s:.0f} s; "
                "raise sampler_startup_timeout_s or look at the workers' logs"
            )
        try:
            for member, (host, pid) in zip(self._members, ray.get(refs), strict=True):
                member.where = f"pid {pid} on {host}"
        except RayActorError as error:
            self.close()
            raise SamplerError(f"a sampler could not start: {_last_line(error)}") from None

    def install(self, snap: Snapshot) -> InstallReport:
        """Serve `snap` on every actor; none serves it before all of them do. The first call waits for the actors.

        Raises:
            SnapshotError: refused by the samplers, which go on serving the previous version.
            SamplerError: actors did not start, or died more often than `max_restarts` allows.
        """
        if self.version is None:
            self._await_start()
        start = time.perf_counter()
        blob = self._delta(snap)
        previous = self._snapshot, self._packed
        self._snapshot, self._packed = snap, None
        shipped = snap.nbytes if blob is None else blob.nbytes
        sent = self._whole() if blob is None else ray.put(blob)
        reports: list[InstallReport] = []
        waiting = {(m.actor.install if blob is None else m.actor.update).remote(sent): m for m in self._members}
        whole = set(waiting) if blob is None else set()
        while waiting:
            ref, member = self._next(waiting)
            try:
                reports.append(_get(ref))
                continue
            except SnapshotError as error:
                if ref in whole:  # the samplers go on with what they have, and so does the pool
                    self._snapshot, self._packed = previous
                    raise
                logger.warning("sampler %d needs version %d whole: %s", member.index, snap.version, error)
            except (RayActorError, SamplerError) as error:
                self._replace(member, f"installing version {snap.version}", error)
            again = member.actor.install.remote(self._whole())
            waiting[again] = member
            whole.add(again)
        self.version = snap.version
        self._since_whole = 1 if blob is None else self._since_whole + 1
        total = time.perf_counter() - start
        slowest = max(report.install_s for report in reports)
        pause = max(report.pause_s for report in reports)
        return replace(reports[0], ship_s=total - slowest, install_s=slowest, pause_s=pause, shipped_bytes=shipped)

    def _delta(self, snap: Snapshot) -> np.ndarray | None:
        """What turns the served version into `snap`, or None if it has to travel whole."""
        if self.version is None or self._snapshot is None or self._since_whole >= self.options.whole_every:
            return None
        blob = delta.encode(self._snapshot, snap)
        return np.frombuffer(blob, np.uint8) if len(blob) < snap.nbytes else None

    def _whole(self) -> ray.ObjectRef:
        """The current snapshot in the object store."""
        assert self._snapshot is not None
        if self._packed is None:
            self._check_store(self._snapshot.nbytes)
            self._packed = ray.put(pack(self._snapshot))
        return self._packed

    def _check_store(self, nbytes: int) -> None:
        """Ray would spill to disk without a word; two snapshots (the old and the new one) must fit."""
        size = ray.cluster_resources().get("object_store_memory", 0)
        if 2 * nbytes > size:
            raise SamplerError(
                f"two snapshots of {nbytes / 2**20:.0f} MiB do not fit the object store ({size / 2**20:.0f} MiB); "
                "start Ray with a larger --object-store-memory"
            )

    def switch(self, scheme: Scheme) -> None:
        """Start fresh actors for another scheme; they serve nothing until the next install."""
        self.scheme, self.version, self._snapshot, self._packed = scheme, None, None, None
        for member in self._members:
            ray.kill(member.actor)
            member.actor, member.where = self._spawn(member.index), "not started"

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Rollout]:
        """Sample on all actors; a chunk whose actor dies runs again, with the same seeds, on a fresh one.

        Raises:
            SamplerError: `version` is not the installed one, or actors died more often than `max_restarts` allows.
            ConfigError: a prompt does not fit the engine's context.
        """
        if version != self.version:
            raise SamplerError(f"asked for version {version}, serving {self.version}; install that version first")
        chunks = split_evenly(requests, len(self._members))
        results: list[list[Rollout]] = [[] for _ in chunks]
        pending, idle = deque(range(len(chunks))), deque(self._members)
        running: dict[ray.ObjectRef, tuple[_Member, int]] = {}
        while pending or running:
            while pending and idle:
                member, chunk = idle.popleft(), pending.popleft()
                running[member.actor.generate.remote(chunks[chunk], sampling, version)] = (member, chunk)
            ref, (member, chunk) = self._next(running)
            try:
                results[chunk], seconds = _get(ref)
                self.busy_s += seconds
            except (RayActorError, SamplerError) as error:
                self._replace(member, f"generating with version {version}", error)
                # Calls to one actor run in order, so the fresh one installs before it generates.
                member.actor.install.remote(self._whole())
                pending.appendleft(chunk)
            idle.append(member)
        return [rollout for result in results for rollout in result]

    def _next(self, running: dict):
        done, _ = ray.wait(list(running), num_returns=1, timeout=self.options.call_timeout_s)
        if not done:
            raise SamplerError(f"no sampler answered within {self.options.call_timeout_s:.0f} s; the run is stopped")
        return done[0], running.pop(done[0])

    def _replace(self, member: _Member, phase: str, error: Exception) -> None:
        """Put a fresh actor in the place of a dead or broken one; SamplerError once the restarts are used up."""
        self._restarts += 1
        reason = f"sampler {member.index} ({member.where}) failed while {phase}: {_last_line(error)}"
        if self._restarts > self.options.max_restarts:
            raise SamplerError(
                f"{reason}; all {self.options.max_restarts} restarts are used, raise sampler_max_restarts to go on"
            )
        logger.warning("%s; restart %d of %d", reason, self._restarts, self.options.max_restarts)
        ray.kill(member.actor)
        member.actor, member.where = self._spawn(member.index), "restarted"

    def close(self) -> None:
        """Kill the actors and free their bundles."""
        for member in self._members:
            ray.kill(member.actor)
        remove_placement_group(self._bundles)


def check_capacity(count: int, bundle: Mapping[str, float], total: Mapping[str, float]) -> None:
    """Raise ConfigError if `count` bundles can never fit the cluster's `total` resources."""
    for resource, each in bundle.items():
        if count * each > total.get(resource, 0):
            raise ConfigError(
                f"{count} samplers need {count * each:g} {resource}, the cluster has {total.get(resource, 0):g}; "
                f"lower num_samplers or sampler_num_{resource.lower()}s, or add nodes"
            )


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


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
