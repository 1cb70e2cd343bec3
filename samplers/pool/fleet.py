"""The actors of a pool: where they are placed, how they start, and who takes the place of one that died.

A fresh actor serves nothing until it has been installed, so it joins the others in its own time; they go on without it.
An actor that fails again and again rests for some versions before it is tried again. The run is given up once the
restarts are used up.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlq.errors import ConfigError, SamplerError, last_line
from rlq.formats.schemes import Scheme

from ..options import PoolOptions
from .actor import SHIP, Engine, Place, SamplerActor

logger = logging.getLogger(__name__)

# Warnings of torch and vLLM that nobody who samples can act on; read when the actor's process starts.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::FutureWarning"}
FLAPS = 3
"""Failures in a row, without proof of a version in between, after which an actor rests while others work."""
REST = 10
"""Versions for which it rests."""
CLOSE_S = 5.0
"""Seconds that actors get to end their engines' processes."""
NODE_LOSS_S = 15.0
"""Seconds that Ray gets to notice that a node is gone, before a failure on it ends the run."""


@dataclass(eq=False)
class Member:
    """One actor of the pool."""

    index: int
    """Its number, in messages."""
    group: PlacementGroup
    """What its resources are reserved in."""
    bundle: int
    """Its bundle there."""
    actor: Any
    """An ActorHandle; Ray generates its methods."""
    where: Place | None = None
    """Where it runs, once it has said so."""
    serves: int | None = None
    """Version that it is known to serve."""
    joining: ray.ObjectRef | None = None
    """An install that nobody waits for: a fresh actor's, or that of one which fell behind."""
    since: float = 0.0
    """When that was asked for, in `time.perf_counter` seconds."""
    busy: ray.ObjectRef | None = None
    """A call whose answer is not needed any more; until it comes the actor gets no other."""
    suspect: bool = False
    """It could not prove what it serves, and was installed again."""
    failures: int = 0
    """In a row."""

    def __str__(self) -> str:
        place = "not started" if self.where is None else f"pid {self.where.pid} on {self.where.host}"
        return f"sampler {self.index} ({place})"


class Fleet:
    """See the module's docstring.

    Args:
        factory: builds an engine in the actor's process.
        args: its picklable arguments; it is called with these and `scheme`.
        scheme: what the engines serve.
        options: size and patience.

    Raises:
        ConfigError: the cluster can never hold the actors.
        SamplerError: the actors cannot be placed now.
    """

    def __init__(self, factory: Callable[..., Engine], args: tuple, scheme: Scheme, options: PoolOptions):
        self.factory, self.args, self.scheme, self.options = factory, args, scheme, options
        self._failed_on: list[str | None] = []  # node of every failure
        self.members: list[Member] = []
        self.resting: list[tuple[Member, int]] = []
        self._versions = 0
        self._next_index = 0
        self.grow(options.num_samplers)

    def grow(self, count: int) -> list[Member]:
        """Reserve room for `count` more actors and start them."""
        o = self.options
        bundle = {k: v for k, v in (("CPU", o.num_cpus), ("GPU", o.num_gpus)) if v}
        check_capacity(len(self.members) + count, bundle, ray.cluster_resources())
        group = placement_group([bundle] * count, strategy=o.placement)
        if not group.wait(timeout_seconds=30):
            free = {k: v for k, v in ray.available_resources().items() if k in bundle}
            remove_placement_group(group)
            raise SamplerError(
                f"{count} x {bundle} ({o.placement}) not free within 30 s (free now: {free}); "
                "stop other jobs, lower num_samplers or choose another sampler_placement"
            )
        fresh = []
        for i in range(count):
            fresh.append(Member(self._next_index, group, i, self._spawn(group, i)))
            self._next_index += 1
        self.members += fresh
        return fresh

    def _spawn(self, group: PlacementGroup, bundle: int) -> Any:
        o = self.options
        remote: Any = ray.remote(concurrency_groups={SHIP: 1})  # type: ignore[call-overload]  # Ray documents it
        return (
            remote(SamplerActor)
            .options(
                num_cpus=o.num_cpus,
                num_gpus=o.num_gpus,
                max_restarts=0,  # a restarted actor would serve nothing; the pool makes a fresh one and installs first
                runtime_env={"env_vars": QUIET | {"OMP_NUM_THREADS": str(max(1, int(o.num_cpus)))}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            .remote(self.factory, self.args, self.scheme)
        )

    def await_start(self) -> None:
        """Wait until every actor runs.

        Raises:
            SamplerError: one cannot start, did not in time, or died more often than `max_restarts` allows.
        """
        deadline = time.monotonic() + self.options.startup_timeout_s
        waiting: dict[Any, Member] = {member.actor.where.remote(): member for member in self.members}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
            if not done:
                self.close()
                raise SamplerError(
                    f"{len(waiting)} of {self.options.num_samplers} samplers did not start within "
                    f"{self.options.startup_timeout_s:.0f} s; raise sampler_startup_timeout_s or look at the workers' "
                    "logs"
                )
            member = waiting.pop(done[0])
            try:
                member.where = ray.get(done[0])
            except RayActorError as error:
                if error.actor_init_failed:  # it raised, and would again
                    self.close()
                    raise SamplerError(f"a sampler could not start: {last_line(error)}") from None
                if self.replace(member, "starting", error):
                    waiting[member.actor.where.remote()] = member
        for line in sorted({member.where.runs for member in self.members if member.where}):
            logger.info("samplers: %s", line)

    def replace(self, member: Member, phase: str, error: Exception) -> bool:
        """Put a fresh actor in the place of a dead or broken one; it serves nothing yet.

        Returns:
            False if it rests instead.

        Raises:
            SamplerError: the restarts are used up.
        """
        reason = f"{member} failed while {phase}: {last_line(error)}"
        member.failures += 1
        if member.failures >= FLAPS and len(self.members) > 1:
            logger.warning("%s; %d times in a row, going on without it for %d versions", reason, member.failures, REST)
            ray.kill(member.actor)
            self.members.remove(member)
            self.resting.append((member, self._versions + REST))
            return False
        self._failed_on.append(member.where.node if member.where else None)
        deadline = time.monotonic() + (NODE_LOSS_S if len(alive_nodes()) > 1 else 0.0)
        while self.restarts > self.options.max_restarts and time.monotonic() < deadline:
            time.sleep(1)  # an actor is missed sooner than its node
        if self.restarts > self.options.max_restarts:
            raise SamplerError(
                f"{reason}; all {self.options.max_restarts} restarts are used, raise sampler_max_restarts to go on"
            )
        logger.warning("%s; restart %d of %d", reason, self.restarts, self.options.max_restarts)
        self._renew(member)
        return True

    def returning(self) -> None:
        """Start the actors that have rested long enough; to be called once per version."""
        self._versions += 1
        back = [member for member, until in self.resting if until <= self._versions]
        self.resting = [(member, until) for member, until in self.resting if until > self._versions]
        for member in back:
            member.failures = 0
            self._renew(member)
        self.members += back

    @property
    def restarts(self) -> int:
        """Failures so far, without those of nodes that are gone: that is nobody's fault, and costs many at once."""
        alive = alive_nodes()
        return sum(node is None or node in alive for node in self._failed_on)

    def _renew(self, member: Member) -> None:
        ray.kill(member.actor)
        member.actor = self._spawn(member.group, member.bundle)
        member.where = member.serves = member.joining = member.busy = None
        member.suspect = False

    def drop(self, member: Member) -> None:
        """Kill an actor for good."""
        ray.kill(member.actor)
        self.members.remove(member)
        others = [*self.members, *(resting for resting, _ in self.resting)]
        if not any(other.group is member.group for other in others):
            remove_placement_group(member.group)

    def restart(self, scheme: Scheme) -> None:
        """Start fresh actors for another scheme."""
        self.scheme = scheme
        for member in self.members:
            self._renew(member)

    def close(self) -> None:
        """Let the actors end in order, kill those that do not, and free what was reserved."""
        ending = [member.actor.close.remote() for member in self.members if member.where is not None]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=CLOSE_S)
        self.members += [member for member, _ in self.resting]
        self.resting = []
        for member in list(self.members):
            self.drop(member)


def check_capacity(count: int, bundle: Mapping[str, float], total: Mapping[str, float]) -> None:
    """Raise ConfigError if `count` bundles can never fit the cluster's `total` resources."""
    for resource, each in bundle.items():
        if count * each > total.get(resource, 0):
            raise ConfigError(
                f"{count} samplers need {count * each:g} {resource}, the cluster has {total.get(resource, 0):g}; "
                f"lower num_samplers or sampler_num_{resource.lower()}s, or add nodes"
            )


def alive_nodes() -> set[str]:
    """Ids of the cluster's living nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
