"""Engines of several ranks: what each has to hold, and two real ranks on a CPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, TensorSpec, snapshot

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests/support/sharded_worker.py"

pytestmark = pytest.mark.slow

ROWS, COLUMNS, VOCABULARY = 192, 64, 37
NAMES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.k_proj")


@pytest.fixture(scope="module")
def snap() -> Snapshot:
    weights = {f"{name}.weight": torch.randn(ROWS, COLUMNS) for name in NAMES}
    weights |= {"model.embed_tokens.weight": torch.randn(VOCABULARY, COLUMNS), "model.norm.weight": torch.ones(COLUMNS)}
    return snapshot(weights.items(), Scheme.preset("fp8_block"), 1)


def held(snap: Snapshot, ranks: int) -> list[dict]:
    """What `ranks` correct ranks would report: rows, columns, keys on two neighbours each, a vocabulary, the rest."""
    from samplers.vllm.sharded import Part, _sha256

    tensors = dict(snap.tensors)
    for name in NAMES:  # one row of block scales per row of the weight
        tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"].repeat_interleave(128, 0)[:ROWS]
    out = []
    for rank in range(ranks):
        own = {}
        for name, tensor in tensors.items():
            first, cut = None, tensor
            if "up_proj" in name:
                cut = tensor.chunk(ranks, 0)[rank]
            elif "down_proj.weight" in name and tensor.shape[1] > 1:
                cut = tensor.chunk(ranks, 1)[rank]
            elif "k_proj" in name:
                cut = tensor.chunk(ranks // 2, 0)[rank // 2]
            elif "embed" in name:
                first = rank * 10
                cut = tensor[first : first + 10]
            part = Part(TensorSpec.of(cut), 128 if "scale" in name else 1, first, _sha256(cut.contiguous()))
            own[name] = part
        out.append(own)
    return out


def test_ranks_that_hold_their_parts_hold_the_version(snap):
    from samplers.vllm.sharded import differing_parts

    assert differing_parts(snap, held(snap, 4)) == []


def test_one_wrong_byte_is_noticed(snap):
    from samplers.vllm.sharded import differing_parts

    ranks = held(snap, 4)
    name = "model.layers.0.self_attn.k_proj.weight_scale"
    ranks[3][name] = replace(ranks[3][name], digest=ranks[0][name].digest)
    assert differing_parts(snap, ranks) == [f"{name} of rank 3"]


def test_a_vocabulary_with_rows_that_nobody_holds_does_not_fit(snap):
    from samplers.vllm.sharded import _fits

    name = "model.embed_tokens.weight"
    ranks = [rank[name] for rank in held(snap, 4)]
    assert _fits(snap, name, ranks)
    assert not _fits(snap, name, [ranks[0], ranks[0], ranks[2], ranks[3]])
    assert not _fits(snap, name, ranks[:3])
    nothing = replace(ranks[3], first=60, spec=replace(ranks[3].spec, shape=(0, COLUMNS)))
    assert _fits(snap, name, [*ranks, nothing]), "a rank that has only rows that pad"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.norm.weight", lambda t: t[:-1]),
        ("model.norm.weight", lambda t: t.float()),
        ("model.embed_tokens.weight", lambda t: t[:-1]),
        ("model.embed_tokens.weight", lambda t: t[:, :-1]),
        ("model.layers.0.mlp.up_proj.weight", lambda t: t[:-1]),
        ("model.layers.0.mlp.up_proj.weight", lambda t: t.repeat(2, 1)),
        ("model.layers.0.mlp.down_proj.weight", lambda t: t[:, : COLUMNS // 8]),
    ],
)
def test_tensors_that_cannot_be_cut_like_this_do_not_fit(snap, name, change):
    from samplers.vllm.sharded import _fits

    ranks = held(snap, 4)
    assert all(_fits(snap, each, [rank[each] for rank in ranks]) for each in snap.tensors)
    changed = replace(snap, tensors=snap.tensors | {name: change(snap.tensors[name])})
    assert not _fits(changed, name, [rank[name] for rank in ranks])


def test_two_ranks_serve_what_was_published_and_sample_what_one_would():
    """Packed codes with two levels of scales, block scales, and a calibrated cache, in one engine."""
    options = {"per_layer": {r"re:.*\.mlp\..*": "fp8_block"}, "kv_cache": "fp8.tensor"}
    command = [sys.executable, str(WORKER), "nvfp4", json.dumps(options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["digests"] == [True] * 6, "four whole versions and two deltas"
    assert found["tokens"] > 100
    assert found["gap_median"] < 1e-6
    assert found["gap_mean"] < 0.01
    missing, short, delta = found["errors"]
    assert "o_proj.weight" in missing
    assert "1 tensors are missing, unexpected or misshapen: model.embed_tokens.weight" in short
    assert "this delta applies to version 0" in delta
    assert found["still"], "nothing of what was refused is left, and the deltas have led back"
    assert found["spoiled"].startswith("1 parts differ: model.layers.1.mlp.down_proj.weight")
    assert found["spoiled"].endswith("of rank 1")
