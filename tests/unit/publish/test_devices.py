"""Weights are quantized on the device on which they live: only codes and scales come to the host, each once."""

import pytest
import torch
from recording_device import DEVICE, OnDevice, RecordingDevice

from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, delta, pack, snapshot, tensor_digest, unpack
from rlq.publish.digest import PIECE
from rlq.publish.types import PackedSnapshot

SCHEMES = ["fp8", "fp8_tensor", "fp8_block", "int8", "w4a16", "nvfp4", "mxfp4", "mxfp8", "bf16"]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj": (128, 256), "k_proj": (64, 256), "v_proj": (64, 256), "o_proj": (256, 128)}
    named = {f"model.layers.0.self_attn.{n}.weight": torch.randn(s, generator=generator) for n, s in shapes.items()}
    embedding = torch.randn(32, 256, generator=generator)
    return named | {"model.norm.weight": torch.ones(256), "model.embed_tokens.weight": embedding}


def publish(scheme: str, *, keep: bool) -> tuple[Snapshot, RecordingDevice]:
    with RecordingDevice() as device:
        named = {name: OnDevice(tensor) for name, tensor in weights().items()}
        named["lm_head.weight"] = named["model.embed_tokens.weight"]  # tied
        return snapshot(named.items(), Scheme.preset(scheme), 1, keep_on_device=keep), device


def crossed(device: RecordingDevice) -> list[tuple[torch.dtype, int]]:
    return sorted(((copy.dtype, torch.Size(copy.shape).numel()) for copy in device.copies), key=str)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_tensor_that_is_published_crosses_once_and_nothing_else_does(scheme):
    expected = snapshot(weights().items(), Scheme.preset(scheme), 1)
    snap, device = publish(scheme, keep=False)
    assert snap.digest == expected.digest, "the same bytes as from host memory"
    assert all(type(tensor) is torch.Tensor for tensor in snap.tensors.values())
    made_on_host = [n for n in snap.tensors if n.endswith("weight_shape")]
    sent = [(t.dtype, t.numel()) for n, t in snap.tensors.items() if t.numel() > 1 and n not in made_on_host]
    assert crossed(device) == sorted(sent, key=str)
    if scheme != "bf16":
        for name in weights():
            if name.endswith("_proj.weight"):
                shape = tuple(weights()[name].shape)
                assert not [c for c in device.copies if c.shape == shape and c.dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_codes_that_stay_cross_for_their_digest_alone(scheme):
    expected = snapshot(weights().items(), Scheme.preset(scheme), 1)
    snap, device = publish(scheme, keep=True)
    assert snap.digest == expected.digest
    assert {tensor.device for tensor in snap.tensors.values()} == {DEVICE}
    total = sum(torch.empty(0, dtype=c.dtype).element_size() * torch.Size(c.shape).numel() for c in device.copies)
    alone = sum(t.nbytes for t in snap.tensors.values() if t.nbytes == 1)
    assert total == sum(t.nbytes for t in snap.tensors.values()) - alone
    before = len(device.copies)
    with device:
        header, buffer = pack(snap, DEVICE)
    assert buffer.device == DEVICE
    assert len(device.copies) == before, "packed where the codes are"
    assert isinstance(buffer, OnDevice)
    assert tensor_digest(unpack(PackedSnapshot(header, buffer.inner.numpy())).tensors) == snap.digest


def test_host_packs_and_deltas_copy_each_tensor_once():
    snap, device = publish("fp8", keep=True)
    base = snapshot([(n, t * 1.01) for n, t in weights().items()], Scheme.preset("fp8"), 0)
    device.copies.clear()
    with device:
        packed = pack(snap)
    assert tensor_digest(unpack(packed).tensors) == snap.digest
    assert len(device.copies) == len(snap.tensors)
    device.copies.clear()
    with device:
        blob = delta.encode(base, snap)
    assert len(device.copies) == len(snap.tensors)
    assert delta.apply(base, blob).digest == snap.digest


def test_a_digest_is_made_in_pieces_of_bounded_size():
    whole = torch.zeros(PIECE + 8, dtype=torch.uint8)
    with RecordingDevice() as device:
        assert tensor_digest({"a": OnDevice(whole)}) == tensor_digest({"a": whole})
    assert [copy.shape for copy in device.copies] == [(PIECE,), (8,)]
