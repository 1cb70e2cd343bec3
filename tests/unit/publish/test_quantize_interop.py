"""Against compressed-tensors: the same codes and scales, and the same values read back from our bytes."""

# compressed-tensors' annotations are wider than what it returns.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as theirs_fake_quantize
from compressed_tensors.quantization.lifecycle.forward import quantize as theirs_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam

from rlq.errors import ConfigError
from rlq.formats.schemes import PRESETS, Scheme, TensorScheme
from rlq.quantize import QuantizedTensor, quantize, quantize_activations
from rlq.quantize.reference import tensor_scale, unpack
from rlq.weights.compressed_tensors import _quantization_args, quantization_config

SAME_SCALES = ["fp8.tensor", "fp8.channel", "fp8.group128", "fp8.block128x128", "nvfp4", "mxfp4", "mxfp8"]
WEIGHTS = [*SAME_SCALES, "int8.channel", "int4.group128", "int8.tensor"]
SHAPES = [(256, 384), (96, 256)]


@pytest.fixture(autouse=True)
def eager():
    """Their FP4 cast is wrapped in torch.compile, which would compile for every shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


def hard(shape: tuple[int, int]) -> torch.Tensor:
    """Values over 40 binades with zero rows and blocks; no -0, whose sign they drop when they add a zero point."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, shape, generator=generator).float())
    x[0], x[1], x[2] = 0.0, -1e-9, 1e-42
    x[3, :128] = 0.0
    return x


def args_of(name: str) -> QuantizationArgs:
    return QuantizationArgs.model_validate(_quantization_args(TensorScheme.parse(name), dynamic=False))


def their_tiles(x: torch.Tensor, scheme: TensorScheme) -> torch.Tensor:
    """Elements of each tile along the last dimension, in the shape of the scales."""
    rows, columns = x.shape
    tile_rows, tile = scheme.tile(rows, columns)
    padded = torch.nn.functional.pad(x, (0, -columns % tile, 0, -rows % tile_rows))
    tiles = padded.view(padded.shape[0] // tile_rows, tile_rows, -1, tile).transpose(1, 2).flatten(2)
    return tiles.reshape(1, -1) if scheme.granularity == "tensor" else tiles


@pytest.mark.parametrize("shape", [(256, 384), (130, 256)])
@pytest.mark.parametrize("name", SAME_SCALES)
def test_codes_and_scales_are_theirs(name, shape):
    scheme, args, x = TensorScheme.parse(name), args_of(name), hard(shape)
    ours = quantize(x, scheme)
    tiles = their_tiles(x, scheme)
    global_scale = generate_gparam(x.min(), x.max()) if ours.global_scale is not None else None
    scale, zero_point = calculate_qparams(tiles.amin(-1), tiles.amax(-1), args, global_scale=global_scale)
    if global_scale is not None:
        assert torch.equal(ours.global_scale, global_scale)
    if ours.scale.dtype == torch.uint8:
        assert torch.equal(torch.exp2(ours.scale.double() - 127).float(), scale)
    else:
        assert torch.equal(ours.scale.float(), scale)
    theirs = theirs_quantize(x, scale, zero_point, args, global_scale=global_scale)
    codes = unpack(ours.codes, scheme.element, x.shape[1])
    assert torch.equal(scheme.element.values[codes.int()], theirs)


@pytest.mark.parametrize("name", ["fp8.token", "fp8.tensor", "fp8.group128", "mxfp4", "mxfp8", "nvfp4"])
def test_dynamic_activations_are_theirs(name):
    scheme, x = TensorScheme.parse(name), hard((64, 256))[None]  # they take batch and sequence apart
    block = scheme.block_format
    local = "local" if block is not None and block.tensor_scale else True
    args = QuantizationArgs.model_validate(_quantization_args(scheme, dynamic=local))
    given = generate_gparam(x.min(), x.max()) if local == "local" else None
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Module(), global_scale=given)
    theirs = theirs_fake_quantize(x, scale, zero_point, args, global_scale=given)
    assert torch.equal(quantize_activations(x, scheme, given), theirs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_read_our_bytes(name, shape, dtype):
    """Codes on disk, decompressed by their compressor, are our values: every scheme that they have, odd shapes too."""
    preset = Scheme("test", TensorScheme.parse(name), None)
    config = quantization_config(preset, [])
    group = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    q = quantize(hard(shape).to(dtype), name)
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    theirs = compressor.decompress(dict(q.to_wire()), group)["weight"]
    assert torch.equal(theirs, q.dequantize(theirs.dtype))
    if theirs.dtype == torch.float32:
        assert torch.equal(theirs, q.dequantize())


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "int4.group128", "fp8.channel"])
def test_they_write_our_bytes(name):
    x = hard((64, 256))
    q = quantize(x, name)
    config = quantization_config(Scheme("test", TensorScheme.parse(name), None), [])
    group = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    scale = q.scale if q.scale.dtype == torch.float32 else q.scale.float()
    if q.scale.dtype == torch.uint8:
        scale = torch.exp2(q.scale.double() - 127).float()
    state = {"weight": x, "weight_scale": scale}
    if q.global_scale is not None:
        state["weight_global_scale"] = q.global_scale
    theirs = BaseCompressor.get_value_from_registry(config["format"]).compress(state, group)
    ours = q.to_wire()
    assert set(theirs) == set(ours)
    for key in ours:
        assert theirs[key].dtype == ours[key].dtype, key
        assert torch.equal(theirs[key].view(torch.uint8), ours[key].view(torch.uint8)), key


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("bf16", "fp8_e5m2")])
def test_every_preset_is_a_valid_config(name):
    config = QuantizationConfig.model_validate(quantization_config(Scheme.preset(name), ["lm_head"]))
    assert config.ignore == ["lm_head"]
    activations = config.config_groups["group_0"].input_activations
    assert (activations is None) == (PRESETS[name].activations is None or name == "nvfp4")


def test_their_presets_are_ours():
    """What llm-compressor calls these schemes, field by field."""
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    pairs = {"fp8": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK", "int8": "W8A8", "w4a16": "W4A16", "nvfp4a16": "NVFP4A16"}
    pairs |= {"mxfp4": "MXFP4", "mxfp8": "MXFP8", "mxfp4a16": "MXFP4A16", "w4a8": "W4AFP8"}
    for ours, theirs in pairs.items():
        group = quantization_config(Scheme.preset(ours), [])["config_groups"]["group_0"]
        found, expected = QuantizationScheme.model_validate(group), preset_name_to_scheme(theirs, ["Linear"])
        for part in ("weights", "input_activations"):
            mine, yours = getattr(found, part), getattr(expected, part)
            drop = {"zp_dtype", "observer"}
            assert (mine and mine.model_dump(exclude=drop)) == (yours and yours.model_dump(exclude=drop)), (ours, part)
    group = quantization_config(Scheme.preset("nvfp4", static=True), [])["config_groups"]["group_0"]
    found = QuantizationScheme.model_validate(group).input_activations
    assert found is not None
    assert (found.dynamic, found.strategy, found.group_size) == ("local", "tensor_group", 16)


def test_mixed_precision_and_e5m2():
    mixed = Scheme.preset("nvfp4a16", per_layer={r"re:.*\.down_proj$": "fp8", r"re:.*\.o_proj$": "bf16"})
    config = quantization_config(mixed, ["lm_head"])
    assert config["format"] == "mixed-precision"
    formats = [group["format"] for group in config["config_groups"].values()]
    assert formats == ["nvfp4-pack-quantized", "float-quantized"]
    assert config["ignore"] == ["lm_head", r"re:.*\.o_proj$"]
    QuantizationConfig.model_validate(config)
    with pytest.raises(ConfigError, match="no E5M2"):
        quantization_config(Scheme.preset("fp8_e5m2"), [])


def test_a_scale_in_bf16_is_read():
    x = hard((16, 64))
    q = quantize(x, "fp8.channel")
    narrow = {"weight": q.codes, "weight_scale": q.scale.to(torch.bfloat16)}
    read = QuantizedTensor.from_wire(narrow, q.scheme)
    assert read.scale.dtype == torch.float32
    assert torch.equal(read.dequantize(), q.codes.float() * q.scale.to(torch.bfloat16).float())


def test_static_nvfp4_scale_is_their_divisor():
    scheme = TensorScheme.parse("nvfp4")
    assert scheme.spans_tensor
    assert tensor_scale(torch.tensor([6.0]), scheme).tolist() == [448.0]
