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

from rlq.errors import ConfigError, SamplerError, SnapshotError
from rlq.publish import Snapshot, snapshot, tensor_digest
from rlq.schemes import Scheme
from rlq.types import Request, Sampling
from samplers.pool import PoolOptions, SamplerPool, check_capacity, split_evenly
from samplers.scripted import Script, ScriptedSampler

pytestmark = pytest.mark.usefixtures("ray_session")

FP8 = Scheme.preset("fp8")
SAMPLING = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(1,))
REQUESTS = [Request((i, 7), num_samples=2, seed=100 * i) for i in range(5)]
EXPECTED = [(100 * i + j,) for i in range(5) for j in range(2)]  # the script answers with the seed


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"model.layers.0.mlp.up_proj.weight": torch.full((4, 8), value), "model.norm.weight": torch.ones(8)}


def snap(version: int, value: float = 1.0) -> Snapshot:
    return snapshot(weights(value).items(), FP8, version)


def make_pool(*, count: int = 2, restarts: int = 2, **faults) -> SamplerPool:
    script = Script(specs=snap(0).specs, **faults)
    options = PoolOptions(num_samplers=count, max_restarts=restarts, call_timeout_s=60)
    return SamplerPool(ScriptedSampler, (script,), FP8, options)


@pytest.fixture(scope="module")
def pool(ray_session):
    pool = make_pool()
    yield pool
    pool.close()


def tokens(rollouts) -> list[tuple[int, ...]]:
    return [r.token_ids for r in rollouts]


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
    pool = make_pool(count=1, die_in="install", die_on_version=2, once=str(tmp_path / "died"))
    pool.install(snap(1))
    assert pool.install(snap(2)).version == 2
    assert "failed while installing version 2" in caplog.text
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=2)) == EXPECTED
    pool.close()


def test_restarts_are_bounded():
    pool = make_pool(count=1, restarts=2, die_in="generate", die_on_version=1)
    pool.install(snap(1))
    with pytest.raises(SamplerError, match="all 2 restarts are used, raise sampler_max_restarts"):
        pool.generate(REQUESTS, SAMPLING, version=1)
    pool.close()


def test_after_a_switch_the_pool_serves_the_other_scheme_only():
    pool = make_pool(count=1)
    pool.install(snap(1))
    bf16 = Scheme.preset("bf16")
    pool.switch(bf16)
    with pytest.raises(SamplerError, match="asked for version 1, serving None"):
        pool.generate(REQUESTS, SAMPLING, version=1)
    with pytest.raises(SnapshotError, match="snapshot is 'fp8', this sampler serves 'bf16'"):
        pool.install(snap(1))
    pool.close()


def test_an_actor_killed_while_generating_is_replaced_and_nothing_is_lost(caplog):
    pool = make_pool(call_s=1.5)
    pool.install(snap(1))
    _, victim = ray.get(pool._members[0].actor.where.remote())
    threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
    start = time.monotonic()
    assert tokens(pool.generate(REQUESTS, SAMPLING, version=1)) == EXPECTED
    assert time.monotonic() - start > 1.5, "the kill must have landed inside the call"
    assert pool._restarts == 1
    assert f"sampler 0 (pid {victim}" in caplog.text
    assert "failed while generating with version 1" in caplog.text
    pool.close()


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
    pool.options = replace(pool.options, call_timeout_s=1)
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
