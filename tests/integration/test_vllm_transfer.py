"""The transport over vLLM's transfer engines: with fakes for order and faults, with real processes on a CPU backend.

NCCL and CUDA IPC need a GPU (`make gpu-check`); everything around them is the same for any backend that vLLM knows.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlq.errors import ConfigError, SamplerError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, snapshot
from rlq.types import Request, Sampling
from samplers.options import PoolOptions
from samplers.pool.pool import SamplerPool
from samplers.testing.scripted import Script, ScriptedEngine
from samplers.transport import gpu as vllm_transfer
from samplers.transport.gpu import Client, Pieces, Receiver, VllmTransfer
from samplers.transport.object_store import StoreTicket

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]  # importing vLLM takes 20 s in each process

FP8 = Scheme.preset("fp8")
SAMPLING = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(1,))
REQUESTS = [Request((i, 7), num_samples=2, seed=100 * i) for i in range(5)]
EXPECTED = [(100 * i + j,) for i in range(5) for j in range(2)]


def snap(version: int) -> Snapshot:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(version // 2))
    weight[0, 0] += version  # half of the versions differ in one place
    return snapshot([("model.layers.0.mlp.up_proj.weight", weight), ("model.norm.weight", torch.ones(8))], FP8, version)


@pytest.fixture(scope="module")
def backend():
    import store_backend

    store_backend.register()
    return store_backend


@pytest.fixture(scope="module")
def factory(backend):
    """Builds a `ScriptedEngine` in a process that knows the backend."""
    folder = str(Path(backend.__file__).parent)

    def scripted(script, scheme):
        sys.path.insert(0, folder)
        import store_backend

        store_backend.register()
        return ScriptedEngine(script, scheme)

    return scripted


# ---- bytes


@pytest.mark.parametrize("size", [0, 1, 5, 8, 9, 64])
def test_pieces_cover_the_bytes_once_and_say_so_before(size, monkeypatch):
    monkeypatch.setattr(vllm_transfer, "PIECE_BYTES", 4)
    source, receiver = Pieces(), Receiver()
    source.data = torch.arange(size, dtype=torch.uint8)
    told = source.metadata()
    assert [(m.name, m.dtype, m.shape) for m in told] == [(n, t.dtype, tuple(t.shape)) for n, t in source]
    receiver.start(size)
    receiver.load_weights(iter(source))
    assert torch.equal(receiver.take(size), source.data)


def test_bytes_that_are_missing_or_of_another_version_are_not_taken(monkeypatch):
    monkeypatch.setattr(vllm_transfer, "PIECE_BYTES", 4)
    source, receiver = Pieces(), Receiver()
    source.data = torch.arange(10, dtype=torch.uint8)
    receiver.start(10)
    receiver.load_weights(list(source)[1:])
    with pytest.raises(SnapshotError, match="6 of 10 bytes arrived; send the version again"):
        receiver.take(10)
    receiver.start(10)
    receiver.load_weights(source)
    with pytest.raises(SnapshotError, match="10 of 12 bytes"):
        receiver.take(12)
    with pytest.raises(SnapshotError, match="0 of 10 bytes"):
        receiver.take(10)


def test_what_arrived_does_not_lie_in_the_buffers_that_vllm_uses_again():
    receiver, buffer = Receiver(), torch.arange(4, dtype=torch.uint8)
    receiver.start(4)
    receiver.load_weights([("0", buffer)])
    buffer.zero_()
    assert receiver.take(4).tolist() == [0, 1, 2, 3]


# ---- order and faults, with fake actors


class FakeActor:
    """A handle whose calls are noted, or fail."""

    def __init__(self, name: str, calls: list, fail: str | None = None):
        self.transfer = _Call(name, calls, fail)


class _Call:
    def __init__(self, name, calls, fail):
        self.name, self.calls, self.fail = name, calls, fail

    def remote(self, endpoint, method, *args):
        assert endpoint is Receiver
        self.calls.append((method, self.name, *args))
        return FAIL.remote() if method == self.fail else ray.put(None)


@ray.remote
def fail():
    raise ValueError("the wire broke")


FAIL: Any = fail


def test_init_start_update_finish_reach_all_actors_in_this_order_with_ranks_of_their_own():
    calls: list = []
    client = Client("nccl", [FakeActor("a", calls), FakeActor("b", calls)])
    client.nbytes = 12
    client.init_weight_transfer_engine({"master_port": 1, "rank_offset": 1})
    client.start_weight_update()
    client.update_weights({"names": ["0"]})
    client.update_weights({"names": ["4"]})
    client.finish_weight_update()
    assert calls == [
        ("join", "a", "nccl", {"master_port": 1, "rank_offset": 1}),
        ("join", "b", "nccl", {"master_port": 1, "rank_offset": 2}),
        ("start", "a", 12),
        ("start", "b", 12),
        *[("update", name, {"names": [at]}) for at in ("0", "4") for name in "ab"],
    ]


def test_it_is_the_protocol_that_vllm_asks_for():
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

    assert isinstance(Client("nccl", []), VLLMWeightSyncClient)


class FakeEngine:
    """Drives its client like vLLM's engines do."""

    def __init__(self, client, source, hang: threading.Event | None):
        self.client, self.source, self.hang, self.closed = client, source, hang, False
        client.init_weight_transfer_engine({"rank_offset": 1})

    def send_weights(self):
        self.client.start_weight_update()
        pool = ThreadPoolExecutor(1)
        pushed = pool.submit(self.client.update_weights, {"names": [name for name, _ in self.source]})
        if self.hang is not None:
            self.hang.wait()  # a broadcast whose peer is gone
        pushed.result()
        self.client.finish_weight_update()

    def shutdown(self):
        self.closed = True


@pytest.fixture
def engines(monkeypatch):
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    made: list[FakeEngine] = []
    hang: list[threading.Event] = []

    def trainer_init(info, *, client, source):
        made.append(FakeEngine(client, source, hang[0] if hang else None))
        return made[-1]

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
    monkeypatch.setitem(vllm_transfer.INIT_INFOS, "nccl", lambda world_size: world_size)
    made_and_hang: Any = (made, hang)
    yield made_and_hang
    for event in hang:
        event.set()


def test_a_group_is_formed_once_per_set_of_actors(engines):
    made, _ = engines
    calls: list = []
    a, b = FakeActor("a", calls), FakeActor("b", calls)
    way = VllmTransfer("nccl")
    for version, to in enumerate([[a, b], [a, b], [a], [a]]):
        assert not way.send(version, snap(version), to).lasting
    assert [len(engine.client.actors) for engine in made] == [2, 1]
    way.close()


def test_without_actors_to_send_to_it_is_the_object_store(engines):
    way = VllmTransfer("nccl")
    ticket = way.send(1, snap(1))
    assert isinstance(ticket, StoreTicket)
    opened: Any = ticket.open()
    assert opened.digest == snap(1).digest


@pytest.mark.parametrize("stage", ["join", "start", "update"])
def test_a_first_transfer_that_fails_stops_the_run_and_a_later_one_takes_the_object_store(stage, engines, caplog):
    calls: list = []
    good, bad = FakeActor("good", calls), FakeActor("bad", calls, fail=stage)
    with pytest.raises(SamplerError, match=r"no nccl transfer to the samplers .*the wire broke.*object_store"):
        VllmTransfer("nccl").send(1, snap(1), [good, bad])
    way = VllmTransfer("nccl")
    assert not way.send(1, snap(1), [good]).lasting
    ticket = way.send(2, snap(2), [good, bad])
    opened: Any = ticket.open()
    assert opened.digest == snap(2).digest
    assert "version 2 goes by object store, nccl failed" in caplog.text
    assert not way.send(3, snap(3), [good]).lasting, "the next group is a new one"


def test_a_broadcast_that_hangs_because_a_peer_died_is_left_behind(engines):
    _, hang = engines
    calls: list = []
    way = VllmTransfer("nccl")
    way.send(1, snap(1), [FakeActor("good", calls)])
    hang.append(threading.Event())
    ticket = way.send(2, snap(2), [FakeActor("good", calls), FakeActor("dead", calls, fail="update")])
    assert ticket.lasting, "the call to the dead actor failed long before the time was up"


def test_a_transfer_has_a_time_limit(engines, monkeypatch):
    _, hang = engines
    monkeypatch.setattr(vllm_transfer, "TRANSFER_S", 0.2)
    hang.append(threading.Event())
    with pytest.raises(SamplerError, match="not finished after 0 s"):
        VllmTransfer("nccl").send(1, snap(1), [FakeActor("a", [])])


def test_ipc_reaches_one_host_and_knows_one_rank(monkeypatch):
    with pytest.raises(ConfigError, match="out of reach of ipc; set sampler_transport: nccl"):
        VllmTransfer("ipc").check_hosts(["elsewhere"])
    VllmTransfer("nccl").check_hosts(["elsewhere"])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="needs a learner of one rank"):
        VllmTransfer("ipc")


def test_what_the_gpu_backends_are_made_from_is_what_this_vllm_takes():
    nccl: Any = vllm_transfer.nccl_init_info(3)
    assert (nccl.backend, nccl.world_size, nccl.rank, nccl.packed) == ("nccl", 3, 0, True)
    assert nccl.packed_buffer_size_bytes == vllm_transfer.BUFFER_BYTES >= vllm_transfer.PIECE_BYTES
    ipc: Any = vllm_transfer.ipc_init_info(3)
    assert asdict(ipc) == {"rank": 0, "packed": True, "packed_buffer_size_bytes": vllm_transfer.BUFFER_BYTES}


# ---- real processes, real rendezvous


def test_versions_and_deltas_reach_a_pool_through_deaths_and_losses(backend, factory, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(vllm_transfer, "PIECE_BYTES", 256)  # several pieces
    way = VllmTransfer("store")
    script = Script(snap(0).specs, fault="die", phase="stage", on_version=4, once=str(tmp_path / "once"))
    options = PoolOptions(num_samplers=2, max_restarts=2, call_timeout_s=120, whole_every=3)
    pool = SamplerPool(factory, (script,), FP8, options, way)
    groups, sizes = [], []
    for version in range(1, 9):
        report = pool.install(snap(version))
        sizes.append(report.shipped_bytes)
        assert report.digest == snap(version).digest
        while True:
            rollouts = pool.generate(REQUESTS, SAMPLING, version=version)
            assert [tuple(r.token_ids.tolist()) for r in rollouts] == EXPECTED
            if version < 6 or sum(m.serves == version for m in pool.fleet.members) == 2:
                break  # the fresh actor has caught up, through the object store
        groups.append(way._client)
    assert groups[0] is groups[1] is groups[2]
    assert len({id(group) for group in groups[3:]}) > 1, "without the dead one, then with the fresh one"
    assert groups[-1] is not None
    assert len(groups[-1].actors) == 2
    assert sizes[0] == sizes[3] == snap(1).nbytes
    assert pool.fleet.restarts == 1
    monkeypatch.setattr(backend.StoreTrainer, "lose", "0")
    assert pool.install(snap(9)).digest == snap(9).digest
    assert "needs version 9 whole: " in caplog.text
    assert "bytes arrived" in caplog.text
    assert {r.version for r in pool.generate(REQUESTS, SAMPLING, version=9)} == {9}
    pool.close()
