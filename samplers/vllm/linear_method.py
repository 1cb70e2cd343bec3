"""One vLLM linear layer that holds published tensors and multiplies exactly the values that a kernel would multiply.

The layer keeps the wire tensors as they were published, and next to them the dequantized weight in the engine's compute
dtype. Everything that `apply` reads is a registered parameter, so vLLM's layer-wise reload replaces it in place.

Tensor-parallel shards of a weight are cut from the published codes and scales, never quantized on their own: rows and
their scales go to the rank that computes them, columns are cut at tile borders.
"""

from collections.abc import Callable

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
from vllm.model_executor.utils import replace_parameter

from rlq.emulate.linear import emulated_linear
from rlq.errors import ConfigError
from rlq.formats.elements import ELEMENTS
from rlq.formats.schemes import LayerScheme, TensorScheme
from rlq.quantize import QuantizedTensor, quantize_activations
from rlq.weights.quantize import INPUT_GLOBAL_SCALE, input_scale_suffix

# Derived parameters; never on the wire.
COMPUTE_WEIGHT, COMPUTE_INPUT_SCALE = "compute_weight", "compute_input_scale"
DERIVED = (COMPUTE_WEIGHT, COMPUTE_INPUT_SCALE)
UNBOUNDED = 1 << 30
"""More rows and columns than a tile has."""


class ShardParameter(PerTensorScaleParameter):
    """One small tensor per shard of a fused layer, stacked: scales of a whole tensor, and shapes."""

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """Load the only shard of a layer that is not fused."""
        self.data[0].copy_(loaded_weight.view(self.data[0].shape))

    load_row_parallel_weight = load_column_parallel_weight

    def _load_into_shard_id(self, loaded_weight: torch.Tensor, shard_id: str | int, **kwargs) -> None:
        shard = self.data[self._shard_id_as_int(shard_id)]
        shard.copy_(loaded_weight.view(shard.shape))


@register_weight_loader_v2_supported_method
class EmulatedLinearMethod(LinearMethodBase):
    """Serves one linear layer (fused or not) from published tensors."""

    def __init__(self, scheme: LayerScheme):
        self.scheme = scheme

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Register the wire tensors of this layer, in the dtypes in which they are published."""
        loader = extra_weight_attrs["weight_loader"]
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        layer.logical_widths = output_partition_sizes  # type: ignore[assignment]  # vLLM's convention
        self.compute_dtype, self.columns = params_dtype, columns
        self.cut = columns < input_size  # ranks hold columns, and see the part of the input that belongs to theirs

        def matrix(name: str, width: int, dtype: torch.dtype, load: Callable = loader) -> None:
            data = torch.empty(rows, width, dtype=dtype)
            layer.register_parameter(
                name, ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)
            )

        self.per_shard: set[str] = set()

        def per_shard(name: str, dtype: torch.dtype = torch.float32, width: int = 1) -> None:
            self.per_shard.add(name)
            data = torch.empty(len(output_partition_sizes), width, dtype=dtype)
            layer.register_parameter(name, ShardParameter(data=data, weight_loader=loader))

        weights = self.scheme.weights
        if weights is None:
            matrix("weight", columns, torch.bfloat16)
            return
        element, tile_rows = weights.element, self.tile_rows("weight_scale")
        tile = weights.tile(rows, input_size)[1]
        if columns < input_size and tile < input_size and columns % max(tile, element.pack):
            raise ConfigError(
                f"{weights} cannot be cut to {columns} of {input_size} columns; use fewer tensor-parallel ranks"
            )
        packed = element.pack > 1
        matrix("weight_packed" if packed else "weight", -(-columns // element.pack), element.dtype)
        if weights.granularity == "tensor":
            per_shard("weight_scale")
        elif weights.granularity in ("channel", "token"):
            data = torch.empty(rows, 1)
            layer.register_parameter(
                "weight_scale", ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
            )
        elif weights.granularity.startswith("block"):
            matrix(
                "weight_scale", -(-columns // tile), torch.float32, _one_scale_per_row(loader, tile_rows, output_size)
            )
        else:
            block = weights.block_format
            matrix("weight_scale", -(-columns // tile), torch.float32 if block is None else ELEMENTS[block.scale].dtype)
        if weights.granularity != "tensor" and weights.spans_tensor:
            per_shard("weight_global_scale")
        if packed and element.kind == "int":
            per_shard("weight_shape", torch.int64, 2)
        if self.scheme.static:
            assert self.scheme.activations is not None
            per_shard(input_scale_suffix(self.scheme.activations))

    def tile_rows(self, leaf: str) -> int:
        """Stored rows of a parameter per published row: a scale of a block of rows is stored for each of them."""
        weights = self.scheme.weights
        if leaf != "weight_scale" or weights is None or not weights.granularity.startswith("block"):
            return 1
        return weights.tile(UNBOUNDED, UNBOUNDED)[0]

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Dequantize once per installed version."""
        for name, tensor in self.derive(layer, dict(layer.named_parameters())).items():
            replace_parameter(layer, name, tensor, prefer_copy=True)

    def derive(
        self, layer: torch.nn.Module, params: dict[str, torch.Tensor], rows: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """What `apply` reads, from a layer's wire tensors: its own, or those of its next version.

        Args:
            layer: the layer.
            params: its wire tensors.
            rows: the rows of the weight to derive, ascending; None derives all.
        """
        widths: list[int] = layer.logical_widths  # type: ignore[assignment]
        if rows is not None:
            params = {n: p if n in self.per_shard else p[rows] for n, p in params.items() if n not in DERIVED}
            ends = torch.searchsorted(rows, torch.tensor(widths).cumsum(0))
            widths = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype)).tolist()
        if self.scheme.weights is None:
            derived = {COMPUTE_WEIGHT: params["weight"].to(self.compute_dtype)}
        else:
            derived = {COMPUTE_WEIGHT: self._dequantize(params, widths, self.scheme.weights)}
        if self.scheme.static:
            # Fused shards read one input; were their scales to differ, the one that covers all would be right.
            assert self.scheme.activations is not None
            name = input_scale_suffix(self.scheme.activations)
            scale = params[name].min() if name == INPUT_GLOBAL_SCALE else params[name].max()
            derived[COMPUTE_INPUT_SCALE] = scale.reshape(1).clone()
        return derived

    def _dequantize(self, params: dict[str, torch.Tensor], widths: list[int], scheme: TensorScheme) -> torch.Tensor:
        if scheme.granularity.startswith("block"):
            # Rows have a scale each here, so that a block may end inside a shard.
            scheme = TensorScheme(scheme.format, f"group{scheme.tile(1, self.columns)[1]}")
        if not scheme.spans_tensor:
            return QuantizedTensor.from_wire(params, scheme, self.columns).dequantize(self.compute_dtype)
        parts, top = [], 0
        for shard, rows in enumerate(widths):
            own = {n: p[shard] if n in self.per_shard else p[top : top + rows] for n, p in params.items()}
            parts.append(QuantizedTensor.from_wire(own, scheme, self.columns).dequantize(self.compute_dtype))
            top += rows
        return torch.cat(parts)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply."""
        scale = layer.compute_input_scale if self.scheme.static else None
        activations = self.scheme.activations
        if self.cut and activations is not None and scale is None:
            # A scale belongs to a whole row, however many ranks share it.
            whole = quantize_activations(tensor_model_parallel_all_gather(x), activations)
            x, activations = whole.chunk(layer.tp_size, -1)[layer.tp_rank], None  # type: ignore[arg-type,index]
        return emulated_linear(x, layer.compute_weight, bias, activations, scale)  # type: ignore[arg-type]


def _one_scale_per_row(loader: Callable, tile_rows: int, rows: int) -> Callable:
    """Wrap a weight loader: scales (blocks of rows, tiles) are repeated for every row before they are cut to shards."""

    def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *shard, **shard_by_name) -> None:
        loader(param, loaded_weight.repeat_interleave(tile_rows, 0)[:rows], *shard, **shard_by_name)

    return load
