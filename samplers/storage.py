"""Read a loaded vLLM model back as wire tensors: which tensors it expects, and what it really holds."""

import torch

from rlq.publish import TensorSpec

from .emulated import DERIVED, ShardParameter


def wire_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """View the model's parameters under the names that a checkpoint uses, fused layers split into their shards.

    Parameters outside the scheme are held in the engine's compute dtype; they came from bf16, so casting them back is
    exact. A tied head is its embedding and is not listed again.

    Args:
        model: vLLM model on one device, not tensor-parallel.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    out: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False, prefix=""):
            if leaf in DERIVED or (tied_to_embedding(model) and module_name == "lm_head"):
                continue
            parent, _, last = module_name.rpartition(".")
            shards = packed.get(last)
            names = [f"{parent}.{shard}.{leaf}" for shard in shards] if shards else [f"{module_name}.{leaf}"]
            out.update(zip(names, _shards(module, param, len(names)), strict=True))
    return {name: _as_published(name, tensor, out) for name, tensor in out.items()}


def tied_to_embedding(model: torch.nn.Module) -> bool:
    """True if the head shares the embedding's weight."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))


def expected_specs(model: torch.nn.Module) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes of a complete snapshot for this model."""
    return {name: TensorSpec.of(tensor) for name, tensor in wire_tensors(model).items()}


def _shards(module: torch.nn.Module, param: torch.nn.Parameter, count: int) -> list[torch.Tensor]:
    """Split a parameter of a layer that fuses `count` modules into what each of them published."""
    if isinstance(param, ShardParameter):
        return list(param.data)
    tensor = _row_major(_unpadded(module, param.data), param)
    rows = list(tensor.split(module.logical_widths)) if count > 1 else [tensor]  # type: ignore[arg-type]
    tile_rows = getattr(param, "tile_rows", 1)
    return [part[::tile_rows] for part in rows]


def _unpadded(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """Drop the rows that vLLM appends to a vocabulary to make it divisible."""
    rows = getattr(module, "org_vocab_size", None)
    return tensor if rows is None else tensor[:rows]


def _row_major(tensor: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Undo the transposition that vLLM's kernels apply to a weight, which they note as `output_dim`."""
    return tensor.t() if tensor.ndim == 2 and getattr(param, "output_dim", 0) == 1 else tensor


def _as_published(name: str, tensor: torch.Tensor, siblings: dict[str, torch.Tensor]) -> torch.Tensor:
    quantized = f"{name.rpartition('.')[0]}.weight_scale" in siblings and not name.endswith(".bias")
    return (tensor if quantized else tensor.to(torch.bfloat16)).contiguous()
