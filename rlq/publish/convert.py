"""A checkpoint directory becomes a quantized one, shard by shard.

Everything that can be checked is checked first. The result grows beside its destination under a temporary name and is
renamed into place when its manifest is written, so an interrupted run leaves nothing that looks complete.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..errors import ConfigError, SnapshotError
from ..files import directory_renamed
from ..formats.schemes import Scheme
from ..quantize import QuantizedTensor
from ..quantize.quality import Quality, measure
from ..recipes.base import build, needs, transform
from ..recipes.statistics import Statistics, calibrate_checkpoint
from ..weights.compressed_tensors import checkpoint_config, unreadable
from ..weights.files import INDEX, CheckpointFiles
from ..weights.quantize import check_scheme, quantize_weights
from .digest import combined_digest, own_digest
from .directory import write_manifest
from .make import rounding

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", INDEX)


@dataclass(frozen=True)
class QuantizedWeight:
    """What became of one weight."""

    name: str
    """Its name in the checkpoint it came from."""
    scheme: str
    """Tensor scheme."""
    bytes_before: int
    """Bytes in bf16."""
    bytes_after: int
    """Bytes of codes and scales."""
    quality: Quality
    """Error against bf16."""


def quantize_checkpoint(
    model: Path, out: Path, scheme: Scheme, calibration: Path | None = None
) -> tuple[list[QuantizedWeight], dict]:
    """Write the quantized checkpoint; memory holds one shard of it and one tensor, with recipes the whole model.

    Args:
        model: bf16, fp16 or fp32 checkpoint.
        out: destination, absent or empty.
        scheme: model scheme.
        calibration: texts for static activation scales and for recipes that need statistics.

    Returns:
        One row per quantized weight, and totals in bytes.

    Raises:
        ConfigError, SnapshotError: before anything is written, for whatever is known to be wrong by then.
        SnapshotError: non-finite weights, or a disk that is full or not writable; nothing is left at `out`.
    """
    config = _read_config(model)
    files = CheckpointFiles(model)
    _check_types(files)
    check_scheme(scheme, files.shapes)
    _check_destination(model, out)
    weights = _Part(files, list(files))
    statistics = _statistics(model, scheme, calibration)
    recipes = build(scheme.recipe)
    if recipes:
        weights = transform(recipes, dict(weights), statistics)
    rows: list[QuantizedWeight] = []
    own: dict[str, bytes] = {}
    where: dict[str, str] = {}
    after = 0
    console = Console(stderr=True)
    with directory_renamed(out) as partial, Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(scheme.name, total=len(files))
        for shard in files.shards:
            done: dict[str, torch.Tensor] = {}
            part = _Part(weights, files.shards[shard])
            for name, wire in quantize_weights(part, scheme, statistics.input_amax, rounding(recipes, statistics)):
                done |= wire
                if len(wire) > 1:
                    rows.append(_row(name, part[name], wire, scheme))
                bar.advance(task)
            own |= {name: own_digest(name, tensor) for name, tensor in done.items()}
            where |= dict.fromkeys(done, shard)
            after += sum(tensor.nbytes for tensor in done.values())
            _save(done, partial / shard)
        before = sum(shape.numel() * 2 for shape in files.shapes.values())
        totals = _totals(before, after, rows)
        if len(files.shards) > 1:
            index = {"metadata": {"total_size": after}, "weight_map": where}
            (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        _copy_rest(model, partial)
        config |= {"dtype": "bfloat16", "quantization_config": checkpoint_config(scheme, files.shapes)}
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_manifest(partial, scheme, 0, combined_digest(own), {"tensors": len(own), "nbytes": after})
    totals["notes"] = _notes(scheme, files.shapes)
    return rows, totals


class _Part(Mapping[str, torch.Tensor]):
    """Some tensors of a model in bf16; all can be looked up, because fused layers share scales across shards."""

    def __init__(self, weights: Mapping[str, torch.Tensor], names: list[str]):
        self.weights = weights
        self.names = names

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.weights[name]
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _statistics(model: Path, scheme: Scheme, calibration: Path | None) -> Statistics:
    wanted = needs(scheme) - {"cache_amax"}  # a checkpoint says nothing about a cache
    if wanted and calibration is None:
        raise ConfigError(f"scheme '{scheme}' reads statistics of activations; pass --calibration FILE")
    return Statistics() if calibration is None else calibrate_checkpoint(model, calibration, wanted)


def _row(name: str, weight: torch.Tensor, wire: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedWeight:
    module = name.removesuffix(".weight")
    tensor_scheme = scheme.for_module(module)
    assert tensor_scheme is not None
    own = {full.removeprefix(f"{module}."): tensor for full, tensor in wire.items()}
    q = QuantizedTensor.from_wire(own, tensor_scheme, weight.shape[1])
    quality = measure(weight, q)
    return QuantizedWeight(name, str(tensor_scheme), weight.numel() * 2, q.nbytes, quality)


def _totals(before: int, after: int, rows: list[QuantizedWeight]) -> dict:
    return {
        "bytes_before": before,
        "bytes_after": after,
        "quantized_bytes_before": sum(row.bytes_before for row in rows),
        "quantized_bytes_after": sum(row.bytes_after for row in rows),
    }


def _notes(scheme: Scheme, shapes: Mapping[str, torch.Size]) -> list[str]:
    """What a reader of the checkpoint has to know."""
    reason = unreadable(scheme, shapes)
    if reason is not None:
        return [f"config.json names rlq's own method, which vLLM knows through rlq's plugin: {reason}"]
    if scheme.activations is not None and scheme.activations.format == "nvfp4" and not scheme.static:
        return ["config.json declares NVFP4A16: engines need a calibrated scale for the activations, see --calibration"]
    return []


def _read_config(model: Path) -> dict:
    path = model / "config.json"
    if not path.is_file():
        raise ConfigError(f"{model} has no config.json; name a checkpoint directory")
    config = json.loads(path.read_text())
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method")
        raise ConfigError(f"{model} is quantized already ({method}); start from the bf16 checkpoint")
    return config


def _check_types(files: CheckpointFiles) -> None:
    for name, dtype in files.dtypes.items():
        if name.endswith(".weight") and dtype not in ("BF16", "F16", "F32"):
            raise SnapshotError(f"{name!r} is {dtype}; quantize a bf16, fp16 or fp32 checkpoint")


def _check_destination(model: Path, out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; name another directory")
    if out.resolve() == model.resolve() or model.resolve() in out.resolve().parents:
        raise ConfigError(f"{out} lies inside the checkpoint; name a directory of its own")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out.absolute().parent} does not exist; create it first")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how it reports a full disk
        raise SnapshotError(f"writing {path.name} failed ({error}); nothing was left") from None


def _copy_rest(model: Path, partial: Path) -> None:
    """Tokenizer, generation settings and licence; weights and config are written anew."""
    weights = {path for pattern in WEIGHT_FILES for path in model.glob(pattern)}
    for path in model.iterdir():
        if path.is_file() and path not in weights and path.name != "config.json":
            shutil.copyfile(path, partial / path.name)
