"""Deltas make exactly the next version, or nothing."""

import itertools
import math
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlq.errors import SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, delta, snapshot, tensor_digest

SCHEMES = ["fp8", "int8", "nvfp4", "mxfp4", "w4a16", "fp8_block", "bf16"]


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.layers.0.mlp.up_proj.weight": (96, 256), "model.layers.0.mlp.down_proj.weight": (256, 128)}
    out = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    return out | {"model.norm.weight": torch.ones(256), "lm_head.weight": torch.randn(32, 256, generator=generator)}


def stepped(tensors: dict[str, torch.Tensor], lr: float, seed: int) -> dict[str, torch.Tensor]:
    """Sign steps, as Adam takes at first."""
    generator = torch.Generator().manual_seed(seed)
    return {n: t - lr * torch.randn(t.shape, generator=generator).sign() for n, t in tensors.items()}


def publish(tensors: dict[str, torch.Tensor], scheme: str, version: int) -> Snapshot:
    return snapshot(tensors.items(), Scheme.preset(scheme), version)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-4, 1e-2])
def test_the_result_is_the_new_version(scheme, lr):
    old = publish(weights(), scheme, 3)
    new = publish(stepped(weights(), lr, 1), scheme, 4)
    blob = delta.encode(old, new)
    made = delta.apply(old, blob)
    assert (made.version, made.scheme, made.digest) == (4, new.scheme, new.digest)
    assert tensor_digest(made.tensors) == tensor_digest(new.tensors)
    assert list(made.tensors) == list(new.tensors)
    info = delta.open_delta(blob).info
    assert (info.base_version, info.version, info.digest) == (3, 4, new.digest)
    assert info.elements == sum(t.numel() for t in new.tensors.values())
    assert (info.changed == 0) == (len(delta.open_delta(blob).names) == 0)


@pytest.mark.parametrize("lr", [1e-4, 1e-1])
def test_patches_are_read_without_the_base(lr):
    old, new = publish(weights(), "fp8", 3), publish(stepped(weights(), lr, 1), "fp8", 4)
    opened = delta.open_delta(memoryview(delta.encode(old, new)))
    opened.check_base(old.version, old.digest)
    patches = dict(opened.patches())
    assert list(patches) == opened.names
    for name, patch in patches.items():
        before, after = delta.flat_integers(old.tensors[name].clone()), delta.flat_integers(new.tensors[name])
        where = slice(None) if patch.where is None else patch.where
        assert (patch.fresh(before) == after[where]).all()
        assert not np.array_equal(before, after)
        patch.apply_(before)
        assert np.array_equal(before, after)
    for name in set(old.tensors) - set(patches):
        assert torch.equal(old.tensors[name], new.tensors[name])


def test_a_chain_of_500_versions_ends_where_a_whole_snapshot_does():
    learner = {name: t[:32].clone() for name, t in weights().items() if "down" not in name}
    served = last = publish(learner, "fp8", 0)
    for version in range(1, 501):
        learner = stepped(learner, 1e-4, version)
        new = publish(learner, "fp8", version)
        served = delta.apply(served, delta.encode(last, new))
        last = new
    whole = publish(learner, "fp8", 500)
    assert list(served.tensors) == list(whole.tensors)
    assert all(torch.equal(as_bytes_tensor(served.tensors[n]), as_bytes_tensor(t)) for n, t in whole.tensors.items())


def as_bytes_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_decoding_holds_little_more_than_what_it_returns():
    """A million changes of a tensor of two million: 5 MB of positions and values."""
    codes = torch.randint(0, 200, (2_000_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    moved = codes + (torch.rand(codes.shape, generator=torch.Generator().manual_seed(1)) < 0.5)
    scheme = Scheme.preset("fp8")
    old, new = (Snapshot({"w": t}, v, scheme, tensor_digest({"w": t})) for v, t in enumerate((codes, moved)))
    opened = delta.open_delta(delta.encode(old, new))
    list(opened.patches())  # compiles
    tracemalloc.start()
    ((_, patch),) = opened.patches()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert patch.where is not None
    assert peak < patch.where.nbytes + patch.values.nbytes + 2**21


def test_a_delta_of_everything_is_not_larger_than_the_snapshot():
    old, new = publish(weights(0), "fp8", 0), publish(weights(9), "fp8", 1)
    blob = delta.encode(old, new)
    assert len(blob) < new.nbytes + 4096
    assert delta.apply(old, blob).digest == new.digest


def test_small_changes_cost_little_more_than_their_entropy():
    """0.1% of a million codes moved by one step of either sign: positions and a sign, 12.4 bits each.

    A position costs (H(p) / p) bits, H the binary entropy of p = 0.001: 11.4. A sign costs 1.
    """
    codes = torch.randint(0, 256, (1024, 1024), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    moved = codes.clone()
    where = torch.rand(codes.shape, generator=torch.Generator().manual_seed(1)) < 1e-3
    moved[where] += torch.where(torch.rand(int(where.sum()), generator=torch.Generator().manual_seed(2)) < 0.5, 1, 255)
    scheme = Scheme.preset("fp8")
    old = Snapshot({"w": codes}, 0, scheme, tensor_digest({"w": codes}))
    new = Snapshot({"w": moved}, 1, scheme, tensor_digest({"w": moved}))
    p = 1e-3
    entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p + 1
    body = delta.open_delta(delta.encode(old, new)).body
    assert len(body) * 8 / int(where.sum()) < 1.05 * entropy


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_change_of_any_type_survives(data):
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.int64]))
    size = data.draw(st.integers(1, 300))
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=size * width, max_size=size * width)))
    old = raw.to(torch.uint8).view(dtype)
    fresh = raw.to(torch.uint8).clone()
    for at in data.draw(st.lists(st.integers(0, size * width - 1), max_size=20)):
        fresh[at] ^= data.draw(st.integers(1, 255))
    scheme = Scheme.preset("bf16")
    base = Snapshot({"t": old}, 0, scheme, tensor_digest({"t": old}))
    new = Snapshot({"t": fresh.view(dtype)}, 1, scheme, tensor_digest({"t": fresh.view(dtype)}))
    made = delta.apply(base, delta.encode(base, new)).tensors["t"]
    assert torch.equal(made.view(torch.uint8), fresh)


# ---- what is refused


@pytest.fixture(scope="module")
def pair():
    return publish(weights(), "fp8", 3), publish(stepped(weights(), 1e-4, 1), "fp8", 4)


def test_a_wrong_base_is_refused(pair):
    old, new = pair
    blob = delta.encode(old, new)
    for wrong in (new, replace(old, version=2), publish(weights(5), "fp8", 3)):
        with pytest.raises(SnapshotError, match="applies to version 3"):
            delta.apply(wrong, blob)


def test_a_delta_of_an_older_rlq_is_refused_by_name(pair):
    blob = delta.OLD_MAGIC + delta.encode(*pair)[len(delta.MAGIC) :]
    with pytest.raises(SnapshotError, match="written by an older rlq; send the whole snapshot"):
        delta.open_delta(blob)


def test_other_schemes_and_names_have_no_delta(pair):
    old, _ = pair
    with pytest.raises(SnapshotError, match="not possible"):
        delta.encode(old, publish(weights(), "int8", 4))
    renamed = {name.replace("up", "gate"): tensor for name, tensor in weights().items()}
    with pytest.raises(SnapshotError, match="missing"):
        delta.encode(old, publish(renamed, "fp8", 4))


def test_a_thousand_damaged_deltas_are_refused(pair):
    """Cut short, bits flipped, pieces swapped, doubled, streams reordered: not applied, and the base is as it was."""
    old, new = pair
    blob, rng = delta.encode(old, new), random.Random(0)
    opened = delta.open_delta(blob)
    starts = np.cumsum([len(blob) - len(opened.body), *opened.streams.values()])
    payloads = [blob[a:b] for a, b in itertools.pairwise(starts)]
    for _ in range(1000):
        damaged = bytearray(blob)
        kind = rng.choice(["cut", "flip", "swap", "double", "reorder"])
        a, b = sorted(rng.sample(range(len(blob)), 2))
        if kind == "cut":
            del damaged[a:]
        elif kind == "flip":
            damaged[a] ^= 1 << rng.randrange(8)
        elif kind == "swap":
            damaged = damaged[b:] + damaged[:b]
        elif kind == "double":
            damaged += damaged[a:b]
        else:
            first = rng.randrange(1, len(payloads))
            damaged[starts[0] : starts[-1]] = b"".join(payloads[first:] + payloads[:first])
            assert damaged != blob
        with pytest.raises(SnapshotError):
            delta.apply(old, bytes(damaged))
    assert tensor_digest(old.tensors) == old.digest


def test_a_result_with_another_digest_is_refused(pair):
    old, new = pair
    with pytest.raises(SnapshotError, match="send it whole"):
        delta.apply(old, delta.encode(old, replace(new, digest="0" * 64)))
