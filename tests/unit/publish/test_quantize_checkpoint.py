"""`rlq quantize`: what it writes, what it refuses, and that nothing half-written looks complete."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlq.cli.main import main
from rlq.errors import ConfigError, SnapshotError
from rlq.formats.schemes import PRESETS, Scheme
from rlq.publish import MANIFEST, read_directory, snapshot
from rlq.publish import convert as command
from rlq.quantize import QuantizedTensor, quantize
from rlq.quantize.quality import measure

CONFIG = {"model_type": "llama", "hidden_size": 128, "tie_word_embeddings": False}
LEAVES = {
    "self_attn.q_proj": 128,
    "self_attn.k_proj": 64,
    "self_attn.v_proj": 64,
    "mlp.gate_proj": 256,
    "mlp.up_proj": 256,
}
INPUT_AMAX = 5.0


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    named = {"model.embed_tokens.weight": torch.randn(32, 128, generator=generator)}
    for layer in range(2):
        for position, (leaf, rows) in enumerate(LEAVES.items()):
            named[f"model.layers.{layer}.{leaf}.weight"] = torch.randn(rows, 128, generator=generator) * (1 + position)
        named[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.randn(128, generator=generator)
        named[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(128)
    named["lm_head.weight"] = torch.randn(32, 128, generator=generator)
    return {name: tensor.to(torch.bfloat16) for name, tensor in named.items()}


def write_model(directory: Path, shards: int, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    # Round robin, so that fused layers lie in different shards.
    where = {name: f"model-{i % shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for shard in sorted(set(where.values())):
        save_file({n: t for n, t in tensors.items() if where[n] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model(tmp_path / "model", 3, weights())


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("bf16", "fp8_static")])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_bytes_on_disk_are_the_bytes_that_are_published(name, shards, tmp_path):
    directory, out = write_model(tmp_path / "model", shards, weights()), tmp_path / "out"
    rows, totals = command.quantize_checkpoint(directory, out, Scheme.preset(name))
    snap = snapshot(weights().items(), Scheme.preset(name), 0)
    found = read_directory(out)
    assert found.digest == snap.digest
    assert found.scheme == snap.scheme
    assert found.nbytes == totals["bytes_after"] == snap.nbytes
    assert len(rows) == 2 * len(LEAVES)
    assert (out / "tokenizer.json").is_file()
    config = json.loads((out / "config.json").read_text())
    method = config["quantization_config"]["quant_method"]
    assert method == ("rlq" if name in ("fp8_e5m2", "fp8_block") else "compressed-tensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    if shards > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(found.tensors)
        assert index["metadata"]["total_size"] == snap.nbytes


def test_the_command_prints_and_reports(model, tmp_path, capsys):
    report = tmp_path / "report.json"
    code = main(["quantize", str(model), str(tmp_path / "out"), "--scheme", "nvfp4", "--json", str(report)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "whole model" in printed.out
    assert "quantized weights" in printed.out
    assert "declares NVFP4A16" in printed.out
    data = json.loads(report.read_text())
    row = data["weights"][0]
    module = row["name"].removesuffix(".weight")
    assert row["name"] in printed.out
    snap = read_directory(tmp_path / "out")
    wire = {n.removeprefix(f"{module}."): t for n, t in snap.tensors.items() if n.startswith(f"{module}.")}
    scheme = PRESETS["nvfp4"].weights
    assert scheme is not None
    expected = measure(weights()[row["name"]], QuantizedTensor.from_wire(wire, scheme))
    assert row["quality"]["sqnr_db"] == pytest.approx(expected.sqnr_db)
    assert data["bytes_before"] == sum(t.nbytes for t in weights().values())


def test_quality_counts_what_it_says():
    x = torch.tensor([[448.0, 1000.0, -500.0, 1e-4, 0.0, 1.0] + [0.0] * 10])
    found = measure(x, quantize(x, "fp8.tensor", amax=448.0))
    assert found.max_error == 1000 - 448
    assert found.saturated_frac == 2 / 16
    assert found.zero_frac == 1 / 16
    perfect = measure(torch.ones(4, 4), quantize(torch.ones(4, 4), "fp8.channel"))
    assert perfect.sqnr_db == float("inf")
    uniform = torch.rand(256, 256) * 2 - 1
    # Uniform noise of one step: 20 log10(2^bits) dB, bits = log2(255) for 255 levels over [-1, 1].
    assert measure(uniform, quantize(uniform, "int8.tensor")).sqnr_db == pytest.approx(48.1, abs=0.2)


def break_missing_shard(model: Path) -> None:
    (model / "model-00001.safetensors").unlink()


def break_lying_index(model: Path) -> None:
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001.safetensors"  # it lies in the first
    path.write_text(json.dumps(index))


def break_truncated_shard(model: Path) -> None:
    path = model / "model-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def break_no_weights(model: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()


def break_quantized(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq"}}))


def break_no_config(model: Path) -> None:
    (model / "config.json").unlink()


def rewrite(model: Path, **changes: torch.Tensor) -> None:
    shutil.rmtree(model)
    write_model(model, 3, weights() | {name.replace("__", "."): tensor for name, tensor in changes.items()})


def break_nan(model: Path) -> None:
    bad = torch.ones(256, 128, dtype=torch.bfloat16)
    bad[3, 7] = float("nan")
    rewrite(model, model__layers__1__mlp__up_proj__weight=bad)


def break_nan_in_a_norm(model: Path) -> None:
    rewrite(model, model__layers__1__input_layernorm__weight=torch.full((128,), float("inf"), dtype=torch.bfloat16))


def break_integers(model: Path) -> None:
    rewrite(model, model__layers__1__mlp__up_proj__weight=torch.ones(256, 128, dtype=torch.int8))


@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (break_missing_shard, SnapshotError, "model-00001.safetensors is missing"),
        (break_lying_index, SnapshotError, "places 'lm_head.weight' in model-00001"),
        (break_truncated_shard, SnapshotError, "model-00002.safetensors cannot be read"),
        (break_no_weights, SnapshotError, "holds neither"),
        (break_quantized, ConfigError, "quantized already \\(awq\\)"),
        (break_no_config, ConfigError, "no config.json"),
        (break_nan, SnapshotError, "'model.layers.1.mlp.up_proj.weight'"),
        (break_nan_in_a_norm, SnapshotError, "128 non-finite values in 'model.layers.1.input_layernorm.weight'"),
        (break_integers, SnapshotError, "is I8"),
    ],
)
def test_damaged_checkpoints_are_refused_and_leave_nothing(damage, error, match, model, tmp_path):
    damage(model)
    with pytest.raises(error, match=match):
        command.quantize_checkpoint(model, tmp_path / "out", Scheme.preset("fp8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--scheme", "fp9"], "unknown scheme"),
        (["--scheme", "bf16"], "quantizes nothing"),
        (["--scheme", "fp8_static"], "--calibration"),
        (["--scheme", "fp8", "--calibration", "texts.txt"], "no static scales"),
        (["--scheme", "fp8", "--ignore", "re:.*expert.*"], "matches no module"),
        (["--scheme", "fp8", "--per-layer", "fp8"], "--per-layer takes PATTERN=SCHEME"),
        (["--scheme", "fp8", "--per-layer", "re:.*up_proj$=nvfp4"], "one fused layer"),
    ],
)
def test_bad_arguments_exit_with_one_line(arguments, match, model, tmp_path, capsys):
    assert main(["quantize", str(model), str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert match in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_destinations_that_cannot_be_used_are_refused(model, tmp_path):
    scheme = Scheme.preset("fp8")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    for out, match in [
        (full, "not empty"),
        (model, "not empty"),
        (model / "sub", "inside"),
        (tmp_path / "a/b", "create it"),
    ]:
        with pytest.raises(ConfigError, match=match):
            command.quantize_checkpoint(model, out, scheme)
    empty = tmp_path / "empty"
    empty.mkdir()
    command.quantize_checkpoint(model, empty, scheme)
    assert (empty / MANIFEST).is_file()


@pytest.mark.parametrize("moment", ["shard", "rename"])
def test_a_full_disk_leaves_nothing_that_looks_complete(moment, model, tmp_path, monkeypatch):
    saved = []

    def full(*args, **kwargs):
        if moment == "rename" or len(saved) == 1:
            raise OSError(28, "No space left on device")
        saved.append(args)
        return original(*args, **kwargs)

    owner, name = (command, "_save") if moment == "shard" else (os, "replace")
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(SnapshotError, match="No space left"):
        command.quantize_checkpoint(model, tmp_path / "out", Scheme.preset("fp8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_memory_stays_at_a_shard(tmp_path):
    """Eight shards of 1 M elements: never more of the result in memory than one shard."""
    tensors = {
        f"model.layers.{i}.mlp.down_proj.weight": torch.zeros(1024, 1024, dtype=torch.bfloat16) for i in range(8)
    }
    directory = write_model(tmp_path / "model", 8, tensors)
    held = []
    original = command._save

    def spy(done, path):
        held.append(sum(tensor.nbytes for tensor in done.values()))
        original(done, path)

    command._save = spy
    try:
        command.quantize_checkpoint(directory, tmp_path / "out", Scheme.preset("fp8"))
    finally:
        command._save = original
    assert held == [1024 * 1024 + 4 * 1024] * 8
