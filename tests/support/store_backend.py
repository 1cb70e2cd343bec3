"""A transfer backend for CPUs, registered with vLLM as users' own are: tensors go through the rendezvous' TCP store.

Its two engines do what those of NCCL do, in the same order and with the same waiting; only the wire is another one.
"""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from samplers.transport.gpu import INIT_INFOS


@dataclass
class StoreInit(WeightTransferInitInfo):
    port: int
    rank_offset: int
    world_size: int


@dataclass
class StoreUpdate(WeightTransferUpdateInfo):
    names: list[str]


@dataclass
class StoreTrainerInit(TrainerInitInfo):
    backend: ClassVar[str] = "store"
    port: int
    world_size: int


class StoreEngine(WeightTransferEngine[StoreInit, StoreUpdate]):
    init_info_cls = StoreInit
    update_info_cls = StoreUpdate
    group: Any = None

    def init_transfer_engine(self, init_info):
        # As NCCL's engine does: each worker's place within its own vLLM engine, behind the offset.
        rank = init_info.rank_offset + self.parallel_config.data_parallel_index + self.parallel_config.rank
        self.group = StatelessProcessGroup.create("127.0.0.1", init_info.port, rank, init_info.world_size)

    def start_weight_update(self):
        raise AssertionError("the model is not reloaded")

    finish_weight_update = start_weight_update

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))  # without waiting for an accelerator

    def receive_weights(self, update_info):
        receiver: Any = self.model
        for name in update_info.names:
            receiver.load_weights([(name, self.group.broadcast_obj(None, src=0))])

    def shutdown(self):
        self.group = None


class StoreTrainer(TrainerWeightTransferEngine[StoreTrainerInit]):
    init_info_cls = StoreTrainerInit
    group: Any = None
    lose: ClassVar[str | None] = None
    """Name of a piece that gets lost."""

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        engine = cls(client=client, source=source)
        worker = StoreInit(init_info.port, 1, init_info.world_size)
        with ThreadPoolExecutor(1) as pool:
            met = pool.submit(client.init_weight_transfer_engine, asdict(worker))
            engine.group = StatelessProcessGroup.create("127.0.0.1", init_info.port, 0, init_info.world_size)
            met.result()
        return engine

    def send_weights(self):
        assert self.source is not None
        self.client.start_weight_update()
        names = [meta.name for meta in self.source.metadata() if meta.name != self.lose]
        pool = ThreadPoolExecutor(1)
        received = pool.submit(self.client.update_weights, asdict(StoreUpdate(names)))
        for name, tensor in self.source:
            if name != self.lose:
                assert tensor.dtype == torch.uint8
                self.group.broadcast_obj(tensor, src=0)
        received.result()
        pool.shutdown(wait=False)
        self.client.finish_weight_update()


def register() -> None:
    """Make `store` known in this process; vLLM refuses a second time."""
    if "store" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("store", StoreEngine)
        WeightTransferTrainerFactory.register_engine("store", StoreTrainer)
    INIT_INFOS["store"] = init_info


def init_info(world_size: int) -> StoreTrainerInit:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return StoreTrainerInit(port, world_size, rank=0)
