"""Versions through vLLM's weight-transfer engines: NCCL between GPUs and nodes, CUDA IPC on a GPU that both sides use.

What travels is the packed snapshot or the delta, as it would lie in the object store, in pieces of bytes. So all
schemes and deltas go the same way. A whole version goes from the device that it lies on to the sampler's device. What
arrives lies beside the served version: it is checked before the engine is touched, and a transfer that breaks off costs
nothing but itself. An actor that cannot take part (it starts in the middle of a run, or survived one that died) gets
the version from the object store.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import ray
import torch
from ray.exceptions import RayError

from rlq.errors import ConfigError, SamplerError, SnapshotError, last_line
from rlq.publish import Snapshot, pack
from rlq.publish.delta import Delta, open_delta
from rlq.publish.pack import views

from .base import Ticket, TransportSettings, elsewhere
from .object_store import ObjectStore

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Bytes that travel under one name."""
BUFFER_BYTES = 256 << 20
"""Bytes that vLLM packs together; it holds two such buffers on each side of NCCL, and one for IPC."""
TRANSFER_S = 300.0
"""Seconds that samplers get to meet, and again to receive."""


# The samplers' side


class Receiver:
    """A sampler's end, hosted by its actor."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.device = torch.device("cpu")
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.arrived = 0

    def join(self, backend: str, init_info: dict) -> None:
        """Meet the learner; leaves the group that was there before."""
        from vllm.config import VllmConfig
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if self.engine is not None:
            self.engine.shutdown()
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        model: Any = self  # all that an engine asks of a model is `load_weights`
        # vLLM numbers the workers of one engine by its configuration; an actor is an engine of its own.
        self.engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend), VllmConfig(), self.device, model
        )
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start(self, nbytes: int) -> None:
        """Make room for a version, on the device where it arrives."""
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.arrived = 0

    def update(self, update_info: dict) -> None:
        """Receive some of it. vLLM would wrap this in a reload of the model, which is not touched here."""
        self.engine.update_weights(update_info)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Called by vLLM: keep pieces, which lie in buffers that it uses again."""
        for name, piece in weights:
            start = int(name)
            self.buffer[start : start + len(piece)].copy_(piece)
            self.arrived += len(piece)

    def take(self, nbytes: int) -> torch.Tensor:
        """What arrived, once.

        Raises:
            SnapshotError: not all of it did.
        """
        buffer, arrived = self.buffer, self.arrived
        self.start(0)
        if (len(buffer), arrived) != (nbytes, nbytes):
            raise SnapshotError(f"{arrived} of {nbytes} bytes arrived; send the version again")
        return buffer


@dataclass(frozen=True)
class ReceivedTicket:
    """A version that lies in the receiver of each sampler that took part."""

    nbytes: int
    """Its bytes."""
    header: dict | None
    """Header of a packed snapshot; None for a delta."""
    lasting: ClassVar[bool] = False
    """See `Ticket`."""

    def open(self, endpoint: Any = None) -> Snapshot | Delta:
        """Take what arrived at the actor's `Receiver`."""
        data = endpoint.take(self.nbytes)
        return open_delta(data.cpu().numpy().data) if self.header is None else views(self.header, data)


# The learner's side


def nccl_init_info(world_size: int) -> "TrainerInitInfo":
    """Rank 0 of a group that meets at a free port of this host."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    address = ray.util.get_node_ip_address()
    return NCCLTrainerInitInfo(address, port, world_size, packed_buffer_size_bytes=BUFFER_BYTES, rank=0)


def ipc_init_info(world_size: int) -> "TrainerInitInfo":
    """No group to meet: handles of this GPU's memory are all it takes."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=BUFFER_BYTES, rank=0)


INIT_INFOS: dict[str, Callable[[int], "TrainerInitInfo"]] = {"nccl": nccl_init_info, "ipc": ipc_init_info}
"""Backend of vLLM's registry to what its trainer engine is made from, given the number of processes."""


class Client:
    """vLLM's `VLLMWeightSyncClient` over sampler actors, each of them an engine of its own.

    Args:
        backend: name in vLLM's registries.
        actors: handles of `SamplerActor`.
    """

    def __init__(self, backend: str, actors: Sequence[Any]):
        self.backend, self.actors = backend, list(actors)
        self.nbytes = 0
        self.failure: Future[None] = Future()
        """Fails with the first call that fails, while vLLM may still wait for the others."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have all actors join; those that are counted are counted one by one."""
        infos = [init_info] * len(self.actors)
        if "rank_offset" in init_info:
            infos = [{**init_info, "rank_offset": init_info["rank_offset"] + i} for i in range(len(self.actors))]
        self._all(
            [
                a.transfer.remote(Receiver, "join", self.backend, info)
                for a, info in zip(self.actors, infos, strict=True)
            ]
        )

    def start_weight_update(self) -> None:
        """Have all actors make room."""
        self._all([actor.transfer.remote(Receiver, "start", self.nbytes) for actor in self.actors])

    def update_weights(self, update_info: Any) -> None:
        """Have all actors receive."""
        self._all([actor.transfer.remote(Receiver, "update", update_info) for actor in self.actors])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing was touched; the actors stage what they received when the pool tells them to."""

    def _all(self, refs: list[ray.ObjectRef]) -> None:
        """Wait for all calls, or for the first one that fails."""
        while refs:
            done, refs = ray.wait(refs, num_returns=1)
            try:
                ray.get(done)
            except RayError as error:
                self.failure.set_exception(error)
                raise


class Pieces:
    """vLLM's `WeightSource` over bytes, named by where each piece starts."""

    def __init__(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)

    def metadata(self) -> list[Any]:
        """Name, dtype and shape of each piece."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(str(at), torch.uint8, (len(self.data[at : at + PIECE_BYTES]),)) for at in self._starts()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for at in self._starts():
            yield str(at), self.data[at : at + PIECE_BYTES].to(device)

    def _starts(self) -> range:
        return range(0, len(self.data), PIECE_BYTES)


class VllmTransfer:
    """A transport over vLLM's transfer engines; see the module's docstring.

    Args:
        backend: `nccl`, `ipc`, or another one of `INIT_INFOS`.

    Raises:
        ConfigError: several learner ranks with `ipc`, whose engine wants all of them at every transfer.
    """

    keeps_device: ClassVar[bool] = True

    @classmethod
    def check(cls, settings: TransportSettings) -> None:
        """See `Transport`."""
        if not settings.sampler_num_gpus:
            raise ConfigError(
                f"sampler_transport {settings.sampler_transport} needs samplers on GPUs; set sampler_num_gpus, or "
                "sampler_transport: object_store"
            )

    @classmethod
    def from_config(cls, settings: TransportSettings, model_config: dict) -> "VllmTransfer":
        """See `Transport`."""
        return cls(settings.sampler_transport)

    def __init__(self, backend: str):
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if backend == "ipc" and ranks > 1:
            raise ConfigError("sampler_transport ipc needs a learner of one rank; use nccl or object_store")
        self.backend = backend
        self.store = ObjectStore()
        self._source = Pieces()
        self._client: Client | None = None
        self._engine: Any = None
        self._proven = False  # a transfer has worked

    def send(self, version: int, payload: Snapshot | bytes, to: Sequence[Any] = ()) -> Ticket:
        """See `Transport`; with nobody to send it to at once, through the object store.

        Raises:
            SamplerError: the very first transfer failed.
        """
        if not to:
            return self.store.send(version, payload)
        if isinstance(payload, bytes):
            header, buffer = None, torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        else:
            header, buffer = pack(payload, device=next(iter(payload.tensors.values())).device)
        try:
            self._meet(to)
            self._transfer(buffer)
        except (SamplerError, RayError, RuntimeError, ValueError) as error:
            self._leave()
            if not self._proven:
                raise SamplerError(
                    f"no {self.backend} transfer to the samplers ({last_line(error)}); "
                    "set sampler_transport: object_store"
                ) from error
            logger.warning("version %d goes by object store, %s failed: %s", version, self.backend, last_line(error))
            return self.store.send(version, payload)
        self._proven = True
        return ReceivedTicket(len(buffer), header)

    def _meet(self, actors: Sequence[Any]) -> None:
        """Form the group anew unless it has exactly these actors."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        if self._client is not None and self._client.actors == list(actors):
            return
        self._leave()
        client = Client(self.backend, actors)
        info, source = INIT_INFOS[self.backend](len(actors) + 1), self._source
        self._engine = _bounded(
            client,
            lambda: WeightTransferTrainerFactory.trainer_init(info, client=client, source=source),  # type: ignore[arg-type]
        )
        self._client = client

    def _transfer(self, data: torch.Tensor) -> None:
        assert self._client is not None
        self._client.nbytes, self._source.data = len(data), data
        try:
            _bounded(self._client, self._engine.send_weights)
        finally:
            self._source.data = torch.empty(0, dtype=torch.uint8)

    def _leave(self) -> None:
        engine, self._engine, self._client = self._engine, None, None
        if engine is not None:
            # Not waited for: a group that lost a member may hang here as well.
            threading.Thread(target=engine.shutdown, daemon=True).start()

    def release(self, ticket: Ticket) -> None:
        """What was received is gone once it is staged."""

    def check_hosts(self, hosts: Iterable[str]) -> None:
        """IPC reaches this host only."""
        away = elsewhere(hosts)
        if self.backend == "ipc" and away:
            raise ConfigError(f"samplers run on {', '.join(away)}, out of reach of ipc; set sampler_transport: nccl")

    def close(self) -> None:
        """Leave the group."""
        self._leave()


def _bounded(client: Client, work: Callable[[], Any]) -> Any:
    """Run what would hang for ever when a peer dies.

    Raises:
        SamplerError: it took too long.
        Exception: what it raised, or what a call to an actor raised meanwhile.
    """
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:  # raised again where it is waited for
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done, _ = wait([client.failure, result], TRANSFER_S, FIRST_COMPLETED)
    if not done:
        raise SamplerError(f"not finished after {TRANSFER_S:.0f} s")
    return done.pop().result()
