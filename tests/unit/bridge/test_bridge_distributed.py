"""Two real processes: the reducer that a training run uses gives every rank the whole batch's metrics."""

import pickle

import pytest
import torch
import torch.multiprocessing as multiprocessing

from rlq.bridge import Correction, DistributedReducer, correct


def batch():
    generator = torch.Generator().manual_seed(0)
    sampler = -2 * torch.rand(8, 20, generator=generator) - 0.1
    learner = sampler + 0.4 * torch.randn(8, 20, generator=generator)
    return learner, sampler, torch.arange(20) < torch.randint(1, 21, (8, 1), generator=generator)


CORRECTION = Correction(level="sequence", upper=5.0, normalize="batch", ess_target=0.7, denominator="kept")


def rank(index, store, out):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    part = [x.chunk(2)[index] for x in batch()]
    result = correct(part[0], part[1], part[2], CORRECTION, reduce=DistributedReducer())
    with open(f"{out}.{index}", "wb") as file:
        pickle.dump((result.weights, result.denominator, result.metrics), file)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    store, out = tmp_path / "store", tmp_path / "out"
    multiprocessing.spawn(rank, (str(store), str(out)), nprocs=2)  # type: ignore[attr-defined]
    results = [pickle.loads((tmp_path / f"out.{i}").read_bytes()) for i in range(2)]
    whole = correct(*batch(), CORRECTION)
    assert torch.equal(torch.cat([weights for weights, _, _ in results]), whole.weights)
    for _, denominator, metrics in results:
        assert denominator == whole.denominator
        assert metrics == pytest.approx(whole.metrics, rel=1e-12, abs=1e-15)
