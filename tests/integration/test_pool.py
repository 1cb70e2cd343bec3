"""The Ray pool with a scripted sampler: order, versions and faults, on real actors that really die."""

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch
import toy_transport
from ray import cloudpickle
from toy_transport import FilePerVersion

from rlq.emulate.probe import Probe
from rlq.errors import ConfigError, SamplerError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, snapshot, tensor_digest
from rlq.types import Request, Sampling
from samplers.options import PoolOptions, SamplerConfig
from samplers.pool import calls
from samplers.pool.dispatch import split_evenly
from samplers.pool.fleet import FLAPS, REST, check_capacity
from samplers.pool.pool import SamplerPool
from samplers.testing.scripted import Script, ScriptedEngine
from samplers.transport import TRANSPORTS
from samplers.transport.directory import read_version

pytestmark = pytest.mark.usefixtures("ray_session")

FP8 = Scheme.preset("fp8")
SAMPLING = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(1,))
REQUESTS = [Request((i, 7), num_samples=2, seed=100 * i) for i in range(5)]
EXPECTED = [(100 * i + j,) for i in range(5) for j in range(2)]  # the script answers with the seed


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"model.layers.0.mlp.up_proj.weight": torch.full((4, 8), value), "model.norm.weight": torch.ones(8)}


def snap(version: int, value: float = 1.0) -> Snapshot:
    return snapshot(weights(value).items(), FP8, version)


def make_pool(*, count: int = 2, restarts: int = 2, whole_every: int = 1, transport=None, **faults) -> SamplerPool:
    script = Script(specs=snap(0).specs, **faults)
    options = PoolOptions(num_samplers=count, max_restarts=restarts, call_timeout_s=60, whole_every=whole_every)
    return SamplerPool(ScriptedEngine, (script,), FP8, options, transport)


@pytest.fixture(scope="module")
def pool(ray_session):
    pool = make_pool()
    yield pool
    pool.close()


def tokens(rollouts) -> list[tuple[int, ...]]:
    return [tuple(r.token_ids.tolist()) for r in rollouts]


def test_rollouts_come_back_in_request_order_with_their_version(pool):
    report = pool.install(snap(3))
    rollouts = pool.generate(REQUESTS, SAMPLING, version=3)
    assert (report.version, report.num_tensors) == (3, 3)
    assert tokens(rollouts) == EXPECTED
    assert {(r.version, r.scheme, r.temperature) for r in rollouts} == {(3, "fp8", 1.0)}


def test_a_version_that_is_not_served_is_refused(pool):
    pool.install(snap(1))
    with pytest.raises(SamplerError, match="asked for version 2, serving 1"):
        pool.generate(REQUESTS, SAMPLING, version=2)


def test_versions_may_go_back(pool):
    digests = [pool.install(snap(version, float(version))).digest for version in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]
    assert {r.version for r in pool.generate(REQUESTS, SAMPLING, version=1)} == {1}


def damaged(kind: str) -> Snapshot:
    """A snapshot of version 2 with one fault that the publisher did not see."""
    good = snap(2)
    tensors = dict(good.tensors)
    if kind == "missing":
        del tensors["model.norm.weight"]
    elif kind == "unexpected":
        tensors["model.extra.weight"] = torch.zeros(2)
    else:
        tensors["model.norm.weight"] = torch.ones(9, dtype=torch.bfloat16)
    return replace(good, tensors=tensors, digest=tensor_digest(tensors))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("missing", "model.norm.weight"), ("unexpected", "model.extra.weight"), ("misshapen", "model.norm.weight")],
)
def test_a_snapshot_that_does_not_fit_is_refused_and_the_old_version_stays(pool, kind, name):
    pool.install(snap(1))
    with pytest.raises(SnapshotError, match=f"1 {kind}: {name}"):
        pool.install(damaged(kind))
    assert pool.version == 1
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=1)) == EXPECTED


def test_an_actor_that_dies_while_installing_is_replaced_and_serves_the_new_version(tmp_path, caplog):
    pool = make_pool(count=1, fault="die", phase="install", on_version=2, once=str(tmp_path / "died"))
    pool.install(snap(1))
    assert pool.install(snap(2)).version == 2
    assert "failed while installing version 2" in caplog.text
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=2)) == EXPECTED
    pool.close()


def test_an_actor_that_dies_while_starting_is_replaced(tmp_path, caplog):
    pool = make_pool(fault="die", phase="start", once=str(tmp_path / "died"))
    pool.install(snap(1))
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=1)) == EXPECTED
    assert "failed while starting" in caplog.text
    assert pool.fleet.restarts == 1
    pool.close()


def test_restarts_are_bounded():
    pool = make_pool(count=1, restarts=2, fault="die", phase="generate", on_version=1)
    pool.install(snap(1))
    with pytest.raises(SamplerError, match="all 2 restarts are used, raise sampler_max_restarts"):
        pool.generate(REQUESTS, SAMPLING, version=1)
    pool.close()


def test_after_a_switch_the_pool_serves_the_other_scheme_only():
    pool = make_pool(count=1)
    pool.install(snap(1))
    bf16 = Scheme.preset("bf16")
    pool.change_scheme(bf16)
    with pytest.raises(SamplerError, match="asked for version 1, serving None"):
        pool.generate(REQUESTS, SAMPLING, version=1)
    with pytest.raises(SnapshotError, match="snapshot is 'fp8', this sampler serves 'bf16'"):
        pool.install(snap(1))
    pool.close()


def test_an_actor_killed_while_generating_is_replaced_and_nothing_is_lost(caplog):
    pool = make_pool(call_s=1.5)
    pool.install(snap(1))
    place: Any = ray.get(pool.fleet.members[0].actor.where.remote())
    victim = place.pid
    threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
    start = time.monotonic()
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=1)) == EXPECTED
    assert time.monotonic() - start > 1.5, "the kill must have landed inside the call"
    assert pool.fleet.restarts == 1
    assert f"sampler 0 (pid {victim}" in caplog.text
    assert "failed while generating with version 1" in caplog.text
    pool.close()


# ---- what is served is proved


PROBE = Probe(((1, 2, 3), (4, 5)), ((-1.0, -1.0), (-1.0,)), tolerance=0.1)


def test_every_sampler_proves_what_it_serves_before_its_rollouts_count(pool):
    pool.install(snap(1), PROBE)
    pool.generate(REQUESTS, SAMPLING, version=1)
    assert pool.proof == {"sync/proven_samplers": 2.0, "sync/canary_nats": 0.0}


@pytest.mark.parametrize(("fault", "phase"), [("corrupt", "digest"), ("miscompute", "score")])
def test_an_engine_that_serves_something_else_is_installed_again(fault, phase, tmp_path, caplog):
    pool = make_pool(fault=fault, phase=phase, on_version=2, once=str(tmp_path / "once"))
    for version in (1, 2):
        pool.install(snap(version, float(version)), PROBE)
        assert tokens(pool.generate(REQUESTS, SAMPLING, version=version)) == EXPECTED
    assert "is installed again" in caplog.text
    assert ("reads back as" if fault == "corrupt" else "the canary is 1 nats per token off") in caplog.text
    assert pool.fleet.restarts == 0
    pool.close()


def test_an_engine_that_goes_on_serving_something_else_is_replaced_until_the_restarts_are_used_up(caplog):
    pool = make_pool(count=1, restarts=1, fault="miscompute", phase="score", on_version=1)
    pool.install(snap(1), PROBE)
    with pytest.raises(SamplerError, match=r"the canary is 1 nats.*all 1 restarts are used"):
        pool.generate(REQUESTS, SAMPLING, version=1)
    assert caplog.text.count("is installed again") == 2  # the first engine and the one that took its place
    pool.close()


# ---- shipping ahead, deltas, transports


def test_a_version_is_shipped_while_the_one_before_is_being_sampled():
    pool = make_pool(call_s=1.0)
    pool.install(snap(1))
    batch: list[Any] = []
    sampling = threading.Thread(target=lambda: batch.extend(pool.generate(REQUESTS, SAMPLING, version=1)))
    sampling.start()
    time.sleep(0.3)
    two = snap(2)
    pool.ship(two)
    assert pool.shipping.ahead is not None
    done, _ = ray.wait(list(pool.shipping.ahead.staging), num_returns=2, timeout=30)
    assert len(done) == 2
    assert sampling.is_alive(), "both hold version 2 while version 1 is being sampled"
    sampling.join()
    assert {r.version for r in batch} == {1}
    assert pool.install(two).version == 2
    assert {r.version for r in pool.generate(REQUESTS, SAMPLING, version=2)} == {2}
    pool.close()


def test_interrupted_sampling_returns_whole_groups_once_the_next_version_is_there_to_switch_to():
    pool = make_pool(call_s=3.0)
    pool.install(snap(1))
    batch: list[Any] = []
    start = time.perf_counter()
    sampling = threading.Thread(target=lambda: batch.extend(pool.generate(REQUESTS, SAMPLING, version=1)))
    sampling.start()
    time.sleep(1.2)
    two = snap(2)
    pool.ship(two)
    pool.interrupt(1)
    sampling.join()
    assert time.perf_counter() - start < 3.0
    assert pool.shipping.ahead is not None
    done, _ = ray.wait(list(pool.shipping.ahead.staging), num_returns=2, timeout=0)
    assert len(done) == 2, "both actors were ready for version 2 before they stopped"
    assert 0 < len(batch) < len(EXPECTED)
    assert len(batch) % 2 == 0
    assert set(tokens(batch)) < set(EXPECTED)
    assert pool.generate(REQUESTS, SAMPLING, version=1) == [], "and so it stays until the install"
    pool.install(two)
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=2)) == EXPECTED
    pool.interrupt(1)  # too late, and nobody minds
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=2)) == EXPECTED
    pool.close()


@pytest.mark.parametrize("name", ["object_store", "shared_memory", "directory"])
def test_every_transport_carries_whole_versions_and_deltas_and_serves_late_samplers(name, tmp_path):
    way: Any = SamplerConfig(sampler_transport=name, sampler_transport_dir=str(tmp_path)).transport({})
    once = str(tmp_path / "once")
    pool = make_pool(whole_every=3, transport=way, fault="die", phase="install", on_version=5, once=once)
    shipped = []
    for version in range(1, 7):
        now = snap(version, 1.0 + version / 4)
        report = pool.install(now)
        shipped.append(report.shipped_bytes)
        assert report.digest == now.digest
        assert tokens(pool.generate(REQUESTS, SAMPLING, version=version)) == EXPECTED
    assert shipped[0] == shipped[3] == snap(1).nbytes
    assert pool.fleet.restarts == 1
    if name == "directory":
        assert read_version(tmp_path, 6).digest == now.digest
    if name == "shared_memory":
        while sum(m.serves == 6 for m in pool.fleet.members) < 2:  # who is joining may still be reading
            assert tokens(pool.generate(REQUESTS, SAMPLING, version=6)) == EXPECTED
        pool.install(snap(7, 3.0))
        assert len(list(way._folder.iterdir())) <= 2, "old versions are freed"
    pool.close()


def test_a_transport_is_added_by_a_class_and_a_row(tmp_path, monkeypatch):
    """The class is `toy_transport.FilePerVersion`; it has a check and an end that the actors host."""
    monkeypatch.setitem(TRANSPORTS, "toy", FilePerVersion)
    cloudpickle.register_pickle_by_value(toy_transport)  # actors do not have the tests' folder on their path
    with pytest.raises(ConfigError, match="toy needs sampler_transport_dir"):
        SamplerConfig(sampler_transport="toy")
    way: Any = SamplerConfig(sampler_transport="toy", sampler_transport_dir=str(tmp_path)).transport({})
    pool = make_pool(whole_every=2, transport=way)
    for version in range(1, 5):
        now = snap(version, 1.0 + version / 4)
        assert pool.install(now).digest == now.digest
        assert tokens(pool.generate(REQUESTS, SAMPLING, version=version)) == EXPECTED
    assert pool.proof == {"sync/proven_samplers": 2.0}
    assert len(list(tmp_path.iterdir())) == 4
    pool.close()


def test_an_object_store_that_others_have_filled_is_waited_for_and_nothing_crashes(pool):
    filler = [ray.put(torch.ones(20 << 20, dtype=torch.uint8).numpy()) for _ in range(9)]  # 180 of 200 MB, all in use
    big = {"model.layers.0.mlp.up_proj.weight": torch.ones(4, 8), "model.norm.weight": torch.ones(8)}
    for version in (1, 2, 3):
        pool.install(snapshot(big.items(), FP8, version))
        assert tokens(pool.generate(REQUESTS, SAMPLING, version=version)) == EXPECTED
    assert len(filler) == 9


# ---- slow, flapping, joining and leaving actors


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(calls, "SLOW_S", 1.0)


def test_requests_of_an_actor_that_hangs_move_on_and_nothing_is_doubled(impatient, tmp_path, caplog):
    pool = make_pool(fault="hang", phase="generate", on_version=1, once=str(tmp_path / "once"), hang_s=8.0)
    pool.install(snap(1))
    start = time.monotonic()
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=1)) == EXPECTED
    assert time.monotonic() - start < 8
    assert "another one takes it too" in caplog.text
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=1)) == EXPECTED  # on the other actor alone
    pool.install(snap(2))
    while sum(m.serves == 2 for m in pool.fleet.members) < 2:  # the slow one catches up
        assert tokens(pool.generate(REQUESTS, SAMPLING, version=2)) == EXPECTED
        time.sleep(0.2)
    assert pool.fleet.restarts == 0
    pool.close()


def test_an_actor_that_hangs_while_receiving_is_left_behind_and_catches_up(impatient, tmp_path, caplog):
    pool = make_pool(fault="hang", phase="stage", on_version=2, once=str(tmp_path / "once"), hang_s=30.0)
    pool.install(snap(1))
    start = time.monotonic()
    assert pool.install(snap(2)).version == 2
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=2)) == EXPECTED
    assert time.monotonic() - start < 30
    assert "going on without it until it has caught up" in caplog.text
    deadline = time.monotonic() + 30
    while sum(m.serves == 2 for m in pool.fleet.members) < 2:
        assert tokens(pool.generate(REQUESTS, SAMPLING, version=2)) == EXPECTED
        assert time.monotonic() < deadline
    pool.close()


def test_an_actor_that_fails_again_and_again_rests_and_the_others_go_on(caplog):
    pool = make_pool(restarts=9)
    pool.install(snap(1))
    flapping = pool.fleet.members[0]
    for count in range(1, FLAPS + 1):
        place: Any = ray.get(flapping.actor.where.remote())
        os.kill(place.pid, signal.SIGKILL)
        while flapping.failures < count:
            assert tokens(pool.generate(REQUESTS, SAMPLING, version=1)) == EXPECTED
    assert "times in a row, going on without it for 10 versions" in caplog.text
    for version in range(2, 2 + REST):
        assert len(pool.fleet.members) == 1
        pool.install(snap(version))
        assert tokens(pool.generate(REQUESTS, SAMPLING, version=version)) == EXPECTED
    assert flapping in pool.fleet.members, "it is tried again"
    pool.close()


def test_actors_join_and_leave_between_batches(pool):
    pool.install(snap(1))
    pool.resize(3)
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=1)) == EXPECTED
    while sum(m.serves == 1 for m in pool.fleet.members) < 3:
        pool.generate(REQUESTS, SAMPLING, version=1)
    pool.resize(1)
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=1)) == EXPECTED
    pool.resize(2)
    pool.install(snap(2))
    assert {r.version for r in pool.generate(REQUESTS, SAMPLING, version=2)} == {2}
    with pytest.raises(ConfigError, match="9 samplers need 9 CPU"):
        pool.resize(9)
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=2)) == EXPECTED


def test_a_cluster_that_can_never_hold_the_actors_fails_at_once():
    start = time.monotonic()
    with pytest.raises(ConfigError, match="9 samplers need 9 CPU, the cluster has 4; lower num_samplers"):
        make_pool(count=9)
    assert time.monotonic() - start < 5


def test_capacity_counts_every_resource():
    check_capacity(2, {"CPU": 1, "GPU": 1}, {"CPU": 2, "GPU": 2})
    with pytest.raises(ConfigError, match="4 samplers need 4 GPU, the cluster has 0"):
        check_capacity(4, {"CPU": 0.5, "GPU": 1}, {"CPU": 2})


def test_an_actor_that_cannot_start_names_its_own_error():
    factory: Any = dict
    pool = SamplerPool(factory, ("no pairs",), FP8, PoolOptions(num_samplers=1))
    with pytest.raises(SamplerError, match=r"could not start: ValueError: dictionary update sequence"):
        pool.install(snap(0))


def test_a_pool_that_never_answers_is_given_up():
    pool = make_pool(count=1, call_s=30)
    pool.fleet.options = replace(pool.fleet.options, call_timeout_s=1)
    pool.install(snap(1))
    with pytest.raises(SamplerError, match="no sampler answered within 1 s"):
        pool.generate(REQUESTS, SAMPLING, version=1)
    pool.close()


def test_a_snapshot_larger_than_the_object_store_names_both_sizes(pool):
    huge = {"model.norm.weight": torch.empty(300 << 20, dtype=torch.uint8)}
    with pytest.raises(SamplerError, match=r"snapshots of 300 MiB do not fit the object store \(\d+ MiB\)"):
        pool.install(Snapshot(huge, 1, FP8, "unused"))


@pytest.mark.parametrize(("count", "parts", "sizes"), [(5, 2, [2, 3]), (1, 3, [1]), (6, 3, [2, 2, 2]), (0, 2, [])])
def test_split_evenly(count, parts, sizes):
    chunks = split_evenly(REQUESTS[:1] * count, parts)
    assert [len(chunk) for chunk in chunks] == sizes
