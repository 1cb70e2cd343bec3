"""A loaded vLLM model as wire tensors: which ones it expects, what it really holds, and new values written in place."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rlq.publish import TensorSpec

from .emulated import DERIVED, EmulatedLinearMethod, ShardParameter


@dataclass(frozen=True)
class Slot:
    """Where a wire tensor lives in the engine."""

    module: torch.nn.Module
    """Its layer."""
    rows: torch.Tensor
    """View of the layer's storage, in the published orientation."""
    tile_rows: int
    """Rows that share one published row: block scales are stored once per row."""
    exact: bool
    """Stored as published; otherwise in the compute dtype, from which casting back to bf16 is exact."""

    def read(self) -> torch.Tensor:
        """The tensor as it was published."""
        published = self.rows[:: self.tile_rows] if self.tile_rows > 1 else self.rows
        return (published if self.exact else published.to(torch.bfloat16)).contiguous()

    def write(self, tensor: torch.Tensor) -> None:
        """Overwrite it; what the layer derives from it is stale until `refresh`."""
        if self.tile_rows > 1:
            tensor = tensor.repeat_interleave(self.tile_rows, 0)[: len(self.rows)]
        self.rows.copy_(tensor)


def slots(model: torch.nn.Module) -> dict[str, Slot]:
    """Slots under the names that a checkpoint uses, fused layers split into their shards.

    A tied head is its embedding and is not listed again.

    Args:
        model: vLLM model on one device, not tensor-parallel.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    out: dict[str, Slot] = {}
    for module_name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for leaf, param in own.items():
            if leaf in DERIVED or (tied_to_embedding(model) and module_name == "lm_head"):
                continue
            parent, _, last = module_name.rpartition(".")
            shards = packed.get(last)
            names = [f"{parent}.{shard}.{leaf}" for shard in shards] if shards else [f"{module_name}.{leaf}"]
            exact = "weight_scale" in own and leaf != "bias"
            tile_rows = getattr(param, "tile_rows", 1)
            views = _shards(module, param, len(names))
            out |= {n: Slot(module, view, tile_rows, exact) for n, view in zip(names, views, strict=True)}
    return out


def wire_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the model holds, as it would be published."""
    return {name: slot.read() for name, slot in slots(model).items()}


def place(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Overwrite wire tensors in place and renew what their layers derive from them.

    Only for layers whose storage has the published layout; see `placeable`.
    """
    known, touched = slots(model), {}
    for name, tensor in tensors:
        known[name].write(tensor)
        touched[id(known[name].module)] = known[name].module
    for module in touched.values():
        method = getattr(module, "quant_method", None)
        if isinstance(method, EmulatedLinearMethod):
            method.process_weights_after_loading(module)


def placeable(model: torch.nn.Module) -> bool:
    """True if overwriting in place renews everything: all linears are rlq's own, and attention derives no weights."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.linear import LinearBase

    linears = [m for m in model.modules() if isinstance(m, LinearBase)]
    foreign = [m for m in linears if not isinstance(m.quant_method, EmulatedLinearMethod)]
    return bool(linears) and not foreign and not any(isinstance(m, MLAAttention) for m in model.modules())


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
    return list(tensor.split(module.logical_widths)) if count > 1 else [tensor]  # type: ignore[arg-type]


def _unpadded(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """Drop the rows that vLLM appends to a vocabulary to make it divisible."""
    rows = getattr(module, "org_vocab_size", None)
    return tensor if rows is None else tensor[:rows]


def _row_major(tensor: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Undo the transposition that vLLM's kernels apply to a weight, which they note as `output_dim`."""
    return tensor.t() if tensor.ndim == 2 and getattr(param, "output_dim", 0) == 1 else tensor
