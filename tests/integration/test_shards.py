"""Tensor-parallel shards of the emulated linear: cut from what was published, never quantized on their own."""

from typing import Any

import pytest
import torch

from rlq.errors import ConfigError
from rlq.formats.schemes import Scheme
from rlq.quantize import quantize
from rlq.weights.quantize import quantize_weights

RANKS = 2
ROWS, COLUMNS = 384, 512  # half of the rows ends inside a block of 128
SCHEMES = ["bf16", "fp8", "fp8_tensor", "fp8_block", "int8", "w4a16", "w4a8", "nvfp4", "mxfp4", "mxfp8"]


@pytest.fixture
def rank(request, monkeypatch) -> int:
    """Makes vLLM's parameters believe that they live on this rank of two."""
    import vllm.model_executor.parameter as parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: request.param)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: RANKS)
    return request.param


every_rank = pytest.mark.parametrize("rank", range(RANKS), indirect=True)


def published(scheme: Scheme, names: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Wire tensors, and the dequantized weight of every module."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"{n}.weight": torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16) for n in names}
    wire = {name: tensor for _, tensors in quantize_weights(weights, scheme, None) for name, tensor in tensors.items()}
    full = {}
    amax = max(float(w.abs().max()) for w in weights.values())  # modules that are fused share what spans a tensor
    for name in names:
        spans = scheme.weights is not None and scheme.weights.spans_tensor
        weight = weights[f"{name}.weight"]
        full[name] = weight.float() if scheme.weights is None else quantize(
            weight, scheme.weights, amax=amax if spans else None
        ).dequantize(torch.float32)  # fmt: skip
    return wire, full


def layer(scheme: Scheme, columns: int, widths: list[int], load) -> tuple[Any, Any]:
    from samplers.vllm.linear_method import EmulatedLinearMethod

    method, module = EmulatedLinearMethod(scheme.layer("model.layers.0.mlp.up_proj")), torch.nn.Module()
    method.create_weights(module, columns, widths, COLUMNS, ROWS, torch.float32, weight_loader=load)
    return method, module


@every_rank
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_a_shard_is_a_slice_of_the_published_weight(name, rank, cut):
    scheme, module_name = Scheme.preset(name), "model.layers.0.mlp.up_proj"
    wire, full = published(scheme, (module_name,))

    def load(param, tensor):
        (param.load_column_parallel_weight if cut == "rows" else param.load_row_parallel_weight)(tensor)

    rows, columns = (ROWS // RANKS, COLUMNS) if cut == "rows" else (ROWS, COLUMNS // RANKS)
    method, module = layer(scheme, columns, [rows], load)
    for wire_name, tensor in wire.items():
        parameter = module.get_parameter(wire_name.rpartition(".")[2])
        parameter.weight_loader(parameter, tensor)
    method.process_weights_after_loading(module)
    top, left = (rank * rows, 0) if cut == "rows" else (0, rank * columns)
    assert torch.equal(module.compute_weight, full[module_name][top : top + rows, left : left + columns])


@every_rank
@pytest.mark.parametrize("name", SCHEMES)
def test_a_shard_of_a_fused_layer_is_a_slice_of_each_of_its_modules(name, rank):
    scheme = Scheme.preset(name)
    names = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    wire, full = published(scheme, names)
    rows = ROWS // RANKS

    def load(param, tensor, shard):
        param.load_merged_column_weight(tensor, shard_id=shard, shard_offset=shard * rows, shard_size=rows)

    method, module = layer(scheme, COLUMNS, [rows, rows], load)
    for wire_name, tensor in wire.items():
        owner, _, leaf = wire_name.rpartition(".")
        parameter = module.get_parameter(leaf)
        parameter.weight_loader(parameter, tensor, names.index(owner))
    method.process_weights_after_loading(module)
    expected = torch.cat([full[n][rank * rows : (rank + 1) * rows] for n in names])
    assert torch.equal(module.compute_weight, expected)


@every_rank
@pytest.mark.parametrize("name", ["w4a16", "fp8_block", "nvfp4"])
def test_columns_are_not_cut_inside_a_tile(name, rank):
    with pytest.raises(ConfigError, match="fewer tensor-parallel ranks"):
        layer(Scheme.preset(name), 8, [ROWS], lambda *args: None)
