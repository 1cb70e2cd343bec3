"""A pool of Ray actors behind the `Sampler` protocol: one version everywhere, least-loaded dispatch, few restarts."""

from collections.abc import Callable, Sequence

from rlq.emulate.probe import ScoreCheck
from rlq.errors import SamplerError
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot
from rlq.types import InstallReport, Request, Rollout, Sampling

from ..options import PoolOptions, SamplerConfig
from ..transport import ObjectStore
from ..transport.base import Transport
from ..vllm.engine import VllmSampler
from .actor import Engine
from .dispatch import Dispatch
from .fleet import Fleet
from .outbox import Outbox
from .shipping import Shipping


class SamplerPool:
    """Actors that serve one version, `shipping` and `dispatch` of which do the work.

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
        self.scheme = scheme
        self.size = options.num_samplers  # chunks per batch; not the number of actors that happen to live
        self.fleet = Fleet(factory, args, scheme, options)
        self.shipping = Shipping(self.fleet, Outbox(transport or ObjectStore()))
        self.dispatch = Dispatch(self.shipping)

    @classmethod
    def vllm(cls, model_config: dict, config: SamplerConfig) -> "SamplerPool":
        """A pool of vLLM engines for the model that `model_config` (its `config.json`) describes."""
        args = (model_config, config.engine())
        return cls(VllmSampler, args, config.scheme(), config.pool(), config.transport(model_config))

    @property
    def version(self) -> int | None:
        """Version that is served; None before the first install."""
        return self.shipping.version

    @property
    def proof(self) -> dict[str, float]:
        """See `rlq.types.Sampler`."""
        return self.shipping.proof

    def ship(self, snap: Snapshot) -> None:
        """Begin to send a version while the one before is served; `install` waits for it and commits.

        May be called from another thread than the one that generates.
        """
        self.shipping.ship(snap)

    def install(self, snap: Snapshot, probe: ScoreCheck | None = None) -> InstallReport:
        """Serve `snap`; no actor serves it before all that can have it ready. The first call waits for the actors.

        What the engines read back, and how they score the probe, is looked at before their first rollouts are.

        Raises:
            SnapshotError: refused by the samplers, which go on serving the previous version.
            SamplerError: actors did not start, or died more often than `max_restarts` allows.
        """
        return self.shipping.install(snap, probe)

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Rollout]:
        """Sample on all actors; a chunk whose actor dies or is slow runs again elsewhere, with the same seeds.

        Raises:
            SamplerError: `version` is not the installed one, or actors died more often than `max_restarts` allows.
            ConfigError: a prompt does not fit the engine's context.
        """
        if version != self.version:
            raise SamplerError(f"asked for version {version}, serving {self.version}; install that version first")
        return self.dispatch.generate(requests, sampling, version, self.size)

    def interrupt(self, version: int) -> None:
        """See `rlq.types.Sampler`."""
        for member in list(self.fleet.members):  # another thread may be replacing one
            member.actor.interrupt.remote(version)

    def resize(self, num_samplers: int) -> None:
        """Have actors join or leave, between two batches; fresh ones take part once they have started and installed.

        Raises:
            ConfigError: the cluster can never hold so many.
            SamplerError: it cannot place them now.
        """
        extra = num_samplers - len(self.fleet.members)
        for member in self.fleet.members[num_samplers:]:
            self.fleet.drop(member)
        if extra > 0:
            fresh = self.fleet.grow(extra)
            if self.version is not None:
                for member in fresh:
                    self.shipping.catch_up(member)
        self.size = num_samplers

    def change_scheme(self, scheme: Scheme) -> None:
        """Start fresh actors for another scheme; they serve nothing until the next install."""
        self.scheme = scheme
        self.shipping.forget()
        self.fleet.restart(scheme)

    def close(self) -> None:
        """Kill the actors and free their bundles."""
        self.fleet.close()
        self.shipping.outbox.transport.close()
