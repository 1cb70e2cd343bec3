"""A loaded vLLM model as wire tensors: which ones it expects, and what it really holds."""

import hashlib
from dataclasses import dataclass

import torch

from rlq.publish import TensorSpec, as_bytes, combined_digest, digest_entry
from rlq.publish.delta import Delta, Patch
from rlq.weights.quantize import CACHE_SCALES

from .linear_method import DERIVED, EmulatedLinearMethod, ShardParameter

HASHED_AT_ONCE = 1 << 18
"""Elements that are read at once to be hashed."""


@dataclass(frozen=True)
class Slot:
    """Where a wire tensor lives in the engine."""

    module: torch.nn.Module
    """Its layer."""
    leaf: str
    """Name of the layer's parameter that holds it."""
    shard: int
    """Its place among the tensors that the parameter fuses."""
    shards: int
    """How many those are."""
    tile_rows: int
    """Stored rows per published row: block scales are stored once per row of the weight."""
    exact: bool
    """Stored as published; otherwise in the compute dtype, from which casting back to bf16 is exact."""

    def rows(self, storage: torch.Tensor) -> torch.Tensor:
        """View of its rows, in the published orientation; `storage` is the parameter's data or a copy of it."""
        return _shards(self.module, getattr(self.module, self.leaf), storage, self.shards)[self.shard]

    @property
    def stored(self) -> torch.Tensor:
        """View of it in the engine, in the published orientation."""
        return self.rows(getattr(self.module, self.leaf).data)[:: self.tile_rows]

    @property
    def dtype(self) -> torch.dtype:
        """In which it was published."""
        return getattr(self.module, self.leaf).dtype if self.exact else torch.bfloat16

    @property
    def spec(self) -> TensorSpec:
        """What was published looks like this."""
        return TensorSpec.of(self.stored.to("meta", self.dtype))

    def read(self) -> torch.Tensor:
        """A copy of the tensor as it was published, on the CPU."""
        return self.stored.to("cpu", self.dtype, copy=True, memory_format=torch.contiguous_format)

    def own_digest(self, name: str, patch: Patch | None = None) -> bytes:
        """Its part of `tensor_digest`, as it is or as a patch will leave it, without a copy of all of it."""
        stored, hashed = self.stored, hashlib.sha256()
        width = stored[:1].numel()
        step = max(1, HASHED_AT_ONCE // width)
        for top in range(0, len(stored), step):
            wire = stored[top : top + step].to("cpu", self.dtype, copy=patch is not None)
            if patch is not None:
                patch.between(top * width, (top + step) * width).apply_to(wire)
            hashed.update(as_bytes(wire).data)
        return digest_entry(name, self.spec, hashed.digest())

    def write(self, tensor: torch.Tensor, storage: torch.Tensor) -> None:
        """Put a published tensor where it belongs in `storage`, the parameter's data or a copy of it."""
        rows = self.rows(storage)
        if self.tile_rows > 1:
            tensor = tensor.repeat_interleave(self.tile_rows, 0)[: len(rows)]
        rows.copy_(tensor)


def slots(model: torch.nn.Module) -> dict[str, Slot]:
    """Slots under the names that a checkpoint uses, fused layers split into their shards.

    A tied head is its embedding and is not listed again. A tensor-parallel rank has slots for its parts.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    out: dict[str, Slot] = {}
    for module_name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for leaf in own:
            if leaf in DERIVED or (tied_to_embedding(model) and module_name == "lm_head"):
                continue
            parent, _, last = module_name.rpartition(".")
            shards = packed.get(last)
            names = [f"{parent}.{shard}.{leaf}" for shard in shards] if shards else [f"{module_name}.{leaf}"]
            if leaf in CACHE_SCALES:  # vLLM has a layer of its own for what checkpoints say of their attention
                names = [f"{parent}.{leaf}"]
            exact = ("weight_scale" in own and leaf != "bias") or leaf in CACHE_SCALES
            method = getattr(module, "quant_method", None)
            tile_rows = method.tile_rows(leaf) if isinstance(method, EmulatedLinearMethod) else 1
            out |= {n: Slot(module, leaf, i, len(names), tile_rows, exact) for i, n in enumerate(names)}
    return out


def touched(model: torch.nn.Module, version: Delta) -> dict[str, torch.Tensor]:
    """All new wire tensors of the modules that a delta changes: a fused layer is never reloaded in part."""
    known = slots(model)
    modules = {id(known[name].module) for name in version.names}
    tensors = {name: slot.read() for name, slot in known.items() if id(slot.module) in modules}
    for name, patch in version.patches():
        patch.apply_to(tensors[name])
    return tensors


def digest(model: torch.nn.Module) -> str:
    """`tensor_digest` of what the model holds."""
    return combined_digest({name: slot.own_digest(name) for name, slot in slots(model).items()})


def placeable(model: torch.nn.Module) -> bool:
    """True if overwriting in place renews everything: all linears are rlq's own, and attention derives no weights."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.linear import LinearBase

    linears = [m for m in model.modules() if isinstance(m, LinearBase)]
    foreign = [m for m in linears if not isinstance(m.quant_method, EmulatedLinearMethod)]
    return bool(linears) and not foreign and not any(isinstance(m, MLAAttention) for m in model.modules())


def on_cpu(model: torch.nn.Module) -> bool:
    """True if the model lies in this machine's memory."""
    return next(model.parameters()).device.type == "cpu"


def tied_to_embedding(model: torch.nn.Module) -> bool:
    """True if the head shares the embedding's weight."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))


def expected_specs(model: torch.nn.Module) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes of a complete snapshot for this model."""
    return {name: slot.spec for name, slot in slots(model).items()}


def _shards(
    module: torch.nn.Module, param: torch.nn.Parameter, storage: torch.Tensor, count: int
) -> list[torch.Tensor]:
    """Split the storage of a parameter that fuses `count` modules into what each of them published."""
    if isinstance(param, ShardParameter):
        return list(storage)
    tensor = _row_major(_unpadded(module, storage), param)
    return list(tensor.split(module.logical_widths)) if count > 1 else [tensor]  # type: ignore[arg-type]


def is_padded(module: torch.nn.Module) -> bool:
    """True if the layer may have rows that nobody publishes."""
    return hasattr(module, "org_vocab_size")


def _unpadded(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """Drop the rows that vLLM appends to a vocabulary to make it divisible."""
    return tensor[: module.shard_indices.num_org_elements] if is_padded(module) else tensor  # type: ignore[union-attr]


def _row_major(tensor: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Undo the transposition that vLLM's kernels apply to a weight, which they note as `output_dim`."""
    return tensor.t() if tensor.ndim == 2 and getattr(param, "output_dim", 0) == 1 else tensor
