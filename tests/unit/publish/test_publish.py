"""Publishing: what is on the wire and on disk is exactly the quantized bf16 cast, and damage is refused by name."""

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig

from rlq.errors import ConfigError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import (
    ALIGN,
    MANIFEST,
    PackedSnapshot,
    Snapshot,
    TensorSpec,
    as_bytes,
    check_specs,
    pack,
    read_directory,
    snapshot,
    tensor_digest,
    unpack,
    write_directory,
)
from rlq.quantize import quantize
from rlq.weights.canonical import bf16_checkpoint
from samplers.testing.reference import TransformersSampler

FP8, BF16 = Scheme.preset("fp8"), Scheme.preset("bf16")


def tiny_llama(*, tied: bool = False, seed: int = 0) -> Any:
    """Two layers with biases everywhere; every parameter random, so that no two are equal by chance."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def snap(model) -> Snapshot:
    return snapshot(model.named_parameters(), FP8, 3)


def same_bytes(a: Snapshot, b: Snapshot) -> bool:
    return list(a.tensors) == list(b.tensors) and all(
        TensorSpec.of(a.tensors[name]) == TensorSpec.of(b.tensors[name])
        and np.array_equal(as_bytes(a.tensors[name]), as_bytes(b.tensors[name]))
        for name in a.tensors
    )


def edited(snap: Snapshot, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**snap.tensors, **tensors}


# ---- what is published


def test_identity_scheme_publishes_the_bf16_cast(model):
    published = snapshot(model.named_parameters(), BF16, 0)
    cast = bf16_checkpoint(model.named_parameters())
    assert list(published.tensors) == list(cast)
    assert all(torch.equal(published.tensors[name], cast[name]) for name in cast)
    assert published.nbytes == 2 * sum(p.numel() for p in model.parameters())


def test_every_linear_is_the_quantized_bf16_cast_and_nothing_else_changes(model, snap):
    for name, cast in bf16_checkpoint(model.named_parameters()).items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):  # biases, norms, embedding and head
            assert torch.equal(snap.tensors[name], cast)
            assert f"{module}.weight_scale" not in snap.tensors
            continue
        expected = quantize(cast, "fp8.channel")
        assert snap.tensors[name].dtype == torch.float8_e4m3fn
        assert np.array_equal(as_bytes(snap.tensors[name]), as_bytes(expected.codes))
        assert torch.equal(snap.tensors[f"{module}.weight_scale"], expected.scale)
    quantized = [name for name in snap.tensors if name.endswith("_scale")]
    assert len(quantized) == 2 * 7  # seven projections in each of two layers


def test_quantization_starts_from_the_bf16_cast_and_not_from_the_masters():
    # The cast rounds the masters' amax up to a tie: a scale computed from fp32 would be another one.
    master = torch.tensor([[1.0, 1.0 + 2**-9], [2.0, 1.0 + 3 * 2**-9]]).t().contiguous()
    published = snapshot([("a.weight", master)], FP8, 0)
    from_cast, from_master = (quantize(w, "fp8.channel").scale for w in (master.bfloat16(), master))
    assert torch.equal(published.tensors["a.weight_scale"], from_cast)
    assert not torch.equal(from_cast, from_master)


@pytest.mark.parametrize("scheme", [BF16, FP8], ids=lambda s: s.name)
def test_a_push_does_not_depend_on_what_was_pushed_before(scheme):
    first, second = tiny_llama(seed=1), tiny_llama(seed=2)
    pushed = [snapshot(m.named_parameters(), scheme, v) for m, v in ((first, 1), (second, 2), (first, 1))]
    assert same_bytes(pushed[0], pushed[2])
    assert pushed[0].digest == pushed[2].digest != pushed[1].digest


@pytest.mark.parametrize("scheme", [BF16, FP8], ids=lambda s: s.name)
def test_a_receiver_holds_the_same_bytes_after_1_2_1_as_after_1(scheme):
    model = tiny_llama(seed=1)
    sampler = TransformersSampler(model.config.to_dict(), scheme)
    one = snapshot(model.named_parameters(), scheme, 1)
    two = snapshot(tiny_llama(seed=2).named_parameters(), scheme, 2)
    held = []
    for pushed in (one, two, one):
        sampler.install(pushed)
        held.append(tensor_digest(dict(sampler.model.named_parameters())))
    assert held[0] == held[2] != held[1]


def test_training_on_does_not_change_what_was_published():
    model = tiny_llama()
    published = snapshot(model.named_parameters(), FP8, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert tensor_digest(published.tensors) == published.digest


def test_a_tied_head_is_published_once_and_an_untied_one_beside_the_embedding(snap):
    tied = snapshot(tiny_llama(tied=True).named_parameters(), FP8, 0)
    assert "lm_head.weight" not in tied.tensors
    assert set(snap.tensors) - set(tied.tensors) == {"lm_head.weight"}
    assert snap.tensors["lm_head.weight"].dtype == snap.tensors["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_one_nan_refuses_the_snapshot_and_names_the_tensor(model):
    named = {name: p.detach().clone() for name, p in model.named_parameters()}
    named["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    with pytest.raises(SnapshotError, match=r"1 non-finite values in 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        snapshot(named.items(), FP8, 0)


def test_a_scheme_that_quantizes_nothing_is_refused(model):
    everything = Scheme.preset("fp8", ignore=["re:.*"])
    with pytest.raises(SnapshotError, match="'fp8' quantizes none of"):
        snapshot(model.named_parameters(), everything, 0)
    with pytest.raises(SnapshotError, match="'fp8' quantizes none of"):
        snapshot([("norm.weight", torch.ones(4))], FP8, 0)


@pytest.mark.parametrize("pattern", ["model.layers.0.mlp.up_projection", "re:.*mlp_gate$"])
def test_an_ignore_pattern_that_matches_nothing_is_refused(model, pattern):
    with pytest.raises(ConfigError) as error:
        snapshot(model.named_parameters(), Scheme.preset("fp8", ignore=["lm_head", pattern]), 0)
    assert repr(pattern) in str(error.value)


def test_an_ignore_pattern_keeps_its_modules_in_bf16(model):
    scheme = Scheme.preset("fp8", ignore=["lm_head", "model.layers.0.mlp.down_proj", r"re:.*layers\.1\.self_attn.*"])
    published = snapshot(model.named_parameters(), scheme, 0)
    linears = {name for name in published.tensors if name.endswith("_proj.weight")}
    kept = {name for name in linears if f"{name}_scale" not in published.tensors}
    assert all(published.tensors[name].dtype == torch.bfloat16 for name in kept)
    attention = {f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkvo"}
    assert kept == attention | {"model.layers.0.mlp.down_proj.weight"}


# ---- digest


def test_digest_does_not_depend_on_order(snap):
    assert tensor_digest(dict(reversed(snap.tensors.items()))) == tensor_digest(snap.tensors) == snap.digest


def test_digest_changes_with_one_bit(snap):
    name = "model.norm.weight"
    flipped = snap.tensors[name].clone()
    flipped.view(torch.int16)[7] ^= 1
    assert tensor_digest(edited(snap, **{name: flipped})) != snap.digest


def test_digest_sees_the_sign_of_zero():
    assert tensor_digest({"a": torch.tensor([0.0])}) != tensor_digest({"a": torch.tensor([-0.0])})


def test_digest_changes_with_a_name_a_dtype_and_a_shape(snap):
    name = "model.norm.weight"
    rest = {k: v for k, v in snap.tensors.items() if k != name}
    tensor = snap.tensors[name]
    variants = {
        "name": {**rest, "model.norms.weight": tensor},
        "dtype": {**rest, name: tensor.view(torch.float16)},  # the same bytes
        "shape": {**rest, name: tensor.view(4, -1)},  # the same bytes
        "missing": rest,
    }
    digests = {kind: tensor_digest(tensors) for kind, tensors in variants.items()}
    assert len({snap.digest, *digests.values()}) == 5


def test_digest_does_not_confuse_where_one_tensor_ends_and_the_next_begins():
    a, b = torch.arange(4, dtype=torch.uint8), torch.arange(4, 8, dtype=torch.uint8)
    assert tensor_digest({"a": a, "b": b}) != tensor_digest({"a": torch.cat([a, b]), "b": b[:0]})


# ---- names and shapes sent = installed

SPECS = {"a": TensorSpec("bfloat16", (4, 2)), "b": TensorSpec("float8_e4m3fn", (8, 8)), "c": TensorSpec("float32", ())}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({k: v for k, v in SPECS.items() if k != "b"}, "1 missing: b"),
        ({**SPECS, "d": TensorSpec("float32", (1,))}, "1 unexpected: d"),
        ({**SPECS, "b": TensorSpec("float8_e4m3fn", (8, 4))}, r"1 misshapen: b is .*\(8, 4\).*not .*\(8, 8\)"),
        ({**SPECS, "b": TensorSpec("float8_e5m2", (8, 8))}, "1 misshapen: b is .*e5m2.*not .*e4m3fn"),
        ({"a": SPECS["a"], "x": SPECS["b"], "c": SPECS["c"]}, "1 missing: b; 1 unexpected: x"),
        ({}, "3 missing: a, b, c"),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "renamed", "nothing"],
)
def test_specs_that_differ_are_refused_by_name(sent, message):
    with pytest.raises(SnapshotError, match=message) as error:
        check_specs(sent, SPECS)
    assert "\n" not in str(error.value)


def test_equal_specs_pass_in_any_order():
    check_specs(dict(reversed(SPECS.items())), SPECS)


def test_a_long_list_of_faults_stays_one_short_line():
    many = {f"layer{i}": TensorSpec("float32", (1,)) for i in range(500)}
    with pytest.raises(SnapshotError, match="500 missing: layer0, layer1, layer2;") as error:
        check_specs({}, many)
    assert len(str(error.value)) < 200


def test_the_receiver_refuses_and_keeps_serving(model, snap):
    sampler = TransformersSampler(model.config.to_dict(), FP8)
    sampler.install(snap)
    before = tensor_digest(dict(sampler.model.named_parameters()))
    name = "model.layers.0.mlp.up_proj.weight_scale"
    without = {k: v for k, v in snap.tensors.items() if k != name}
    for tensors in (without, edited(snap, extra=torch.ones(1)), edited(snap, **{name: torch.ones(3, 1)})):
        with pytest.raises(SnapshotError, match="snapshot refused"):
            sampler.install(replace(snap, tensors=tensors, version=4))
    assert sampler.version == 3
    assert tensor_digest(dict(sampler.model.named_parameters())) == before


# ---- pack and unpack

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


def of_every_dtype() -> Snapshot:
    """Odd sizes, so that every tensor but the first needs alignment; an empty, a zero-dimensional and a large one."""
    noise = torch.randint(0, 2, (3 * 7 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {str(dtype): noise[: 21 * dtype.itemsize].view(dtype).view(3, 7) for dtype in DTYPES}
    tensors |= {
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.5),
        "last": torch.empty(0, dtype=torch.int8),
    }
    return Snapshot(tensors, 7, FP8, tensor_digest(tensors))


def test_pack_and_unpack_are_exact_for_every_dtype():
    snap = of_every_dtype()
    again = unpack(pack(snap))
    assert (again.version, again.scheme, again.digest) == (snap.version, snap.scheme, snap.digest)
    assert same_bytes(snap, again)
    assert tensor_digest(again.tensors) == snap.digest


def test_unpack_shares_the_buffer_and_pack_does_not_share_the_tensors():
    snap = of_every_dtype()
    packed = pack(snap)
    base = packed.buffer.ctypes.data
    for name, tensor in unpack(packed).tensors.items():
        if tensor.numel():
            assert np.shares_memory(as_bytes(tensor), packed.buffer)
            assert (tensor.data_ptr() - base) % ALIGN == 0
            assert not np.shares_memory(as_bytes(snap.tensors[name]), packed.buffer)


def test_unpack_reads_a_read_only_buffer_in_silence(snap):
    packed = pack(snap)
    packed.buffer.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_bytes(snap, unpack(packed))


def test_header_is_plain_data_that_survives_json(snap):
    packed = pack(snap)
    header = json.loads(json.dumps(packed.header))
    assert same_bytes(snap, unpack(PackedSnapshot(header, packed.buffer)))


def test_a_snapshot_without_tensors_packs():
    empty = Snapshot({}, 0, BF16, tensor_digest({}))
    assert unpack(pack(empty)) == empty


# ---- directory


def test_directory_round_trip(snap, model, tmp_path):
    config = model.config.to_dict()
    write_directory(snap, tmp_path / "new" / "folder", config)
    again = read_directory(tmp_path / "new" / "folder")
    assert (again.version, again.scheme, again.digest) == (3, FP8, snap.digest)
    assert {name: TensorSpec.of(t) for name, t in again.tensors.items()} == snap.specs
    assert tensor_digest(again.tensors) == snap.digest
    manifest = json.loads((tmp_path / "new" / "folder" / MANIFEST).read_text())
    assert (manifest["tensors"], manifest["nbytes"]) == (len(snap.tensors), snap.nbytes)
    assert "quantization_config" not in config  # the caller's dictionary is not written to


def test_a_received_snapshot_can_be_written(snap, model, tmp_path):
    write_directory(unpack(pack(snap)), tmp_path, model.config.to_dict())
    assert read_directory(tmp_path).digest == snap.digest


def test_identity_directory_has_no_quantization_config(model, tmp_path):
    write_directory(snapshot(model.named_parameters(), BF16, 0), tmp_path, model.config.to_dict())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_an_interrupted_write_is_refused_even_over_a_complete_snapshot(snap, model, tmp_path):
    write_directory(snap, tmp_path, model.config.to_dict())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()  # the second write gets past the weights and fails at the configuration
    with pytest.raises(OSError):
        write_directory(replace(snap, version=4), tmp_path, model.config.to_dict())
    with pytest.raises(SnapshotError, match=f"no {MANIFEST}.*write it again"):
        read_directory(tmp_path)


@pytest.mark.parametrize("where", ["length", "header", "first", "middle", "last"])
def test_one_flipped_byte_is_refused(snap, model, tmp_path, where):
    write_directory(snap, tmp_path, model.config.to_dict())
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    header = int.from_bytes(data[:8], "little")  # safetensors: length of the header, the header, the tensors
    start = 8 + header
    at = {"length": 3, "header": 12, "first": start, "middle": (start + len(data)) // 2, "last": len(data) - 1}[where]
    data[at] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(SnapshotError, match=r"damaged.*write it again"):
        read_directory(tmp_path)


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_truncated_file_is_refused(snap, model, tmp_path, length):
    write_directory(snap, tmp_path, model.config.to_dict())
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:length])
    with pytest.raises(SnapshotError, match=r"damaged.*write it again"):
        read_directory(tmp_path)


def test_missing_weights_are_refused(snap, model, tmp_path):
    write_directory(snap, tmp_path, model.config.to_dict())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SnapshotError, match=r"damaged.*write it again"):
        read_directory(tmp_path)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ignore", [None, ["lm_head", "model.layers.0.mlp.down_proj"]], ids=["default", "ignore"])
def test_transformers_loads_the_directory_and_dequantizes_to_our_values(tmp_path, tied, ignore):
    if tied and ignore:
        ignore = ignore[1:]  # a tied head has no module to name
    model = tiny_llama(tied=tied)
    snap = snapshot(model.named_parameters(), Scheme.preset("fp8", ignore=ignore), 0)
    write_directory(snap, tmp_path, model.config.to_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        result: Any = AutoModelForCausalLM.from_pretrained(
            tmp_path,
            dtype=torch.float32,  # with bf16, transformers rounds the fp32 scales
            quantization_config=CompressedTensorsConfig(dequantize=True),
            output_loading_info=True,
        )
    loaded, report = result
    assert not any(report.values())
    for name, cast in bf16_checkpoint(model.named_parameters()).items():
        module = name.removesuffix(".weight")
        quantized = module != name and f"{module}.weight_scale" in snap.tensors
        expected = quantize(cast, "fp8.channel").dequantize(torch.float32) if quantized else cast.float()
        assert torch.equal(loaded.get_parameter(name), expected), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
