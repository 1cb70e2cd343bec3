"""Schemes: names, options, patterns that mean what they say, and what travels with a snapshot."""

import pytest
import torch

from rlq.errors import ConfigError, SnapshotError
from rlq.formats.modules import DEFAULT_IGNORE, fused_siblings
from rlq.formats.schemes import PRESETS, LayerScheme, Scheme, TensorScheme
from rlq.publish import snapshot
from rlq.quantize import QuantizedTensor
from rlq.recipes.statistics import Statistics
from rlq.weights.quantize import check_scheme

# The contract's table: preset, weights, activations.
TABLE = {
    "bf16": (None, None),
    "fp8": ("fp8.channel", "fp8.token"),
    "fp8_tensor": ("fp8.tensor", "fp8.tensor"),
    "fp8_block": ("fp8.block128x128", "fp8.group128"),
    "fp8_static": ("fp8.channel", "fp8.tensor"),
    "fp8_e5m2": ("fp8_e5m2.channel", "fp8_e5m2.token"),
    "w8a16": ("fp8.channel", None),
    "int8": ("int8.channel", "int8.token"),
    "int8_tensor": ("int8.channel", "int8.tensor"),
    "w4a16": ("int4.group128", None),
    "w4a8": ("int4.group128", "fp8.token"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "nvfp4a16": ("nvfp4", None),
    "mxfp4": ("mxfp4", "mxfp4"),
    "mxfp4a16": ("mxfp4", None),
    "mxfp8": ("mxfp8", "mxfp8"),
}
LAYERS = [f"model.layers.{i}" for i in range(12)]
PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
PROJECTIONS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
LINEARS = [f"{layer}.{name}" for layer in LAYERS for name in PROJECTIONS] + ["lm_head"]
SHAPES = {f"{name}.weight": torch.Size((32, 32)) for name in ["model.embed_tokens", *LINEARS]}
SHAPES |= {f"{layer}.input_layernorm.weight": torch.Size((32,)) for layer in LAYERS}


def test_presets_are_the_contract():
    found = {n: tuple(str(t) if t else None for t in (s.weights, s.activations)) for n, s in PRESETS.items()}
    assert found == TABLE
    assert [name for name, scheme in PRESETS.items() if scheme.static] == ["fp8_static"]


@pytest.mark.parametrize("text", ["fp8.tensor", "fp8.block128x64", "int4.group32", "fp8_e5m2.token", "nvfp4", "mxfp8"])
def test_names_round_trip(text):
    assert str(TensorScheme.parse(text)) == text


def test_options_travel():
    scheme = Scheme.preset(
        "nvfp4",
        ignore=["lm_head", r"re:.*o_proj$"],
        per_layer={r"re:.*down_proj$": "fp8"},
        kv_cache="int4",
        static=True,
    )
    assert Scheme.from_dict(scheme.to_dict()) == scheme
    assert Scheme.from_dict(Scheme.preset("fp8").to_dict()) == Scheme.preset("fp8")
    layer = scheme.layer("model.layers.3.mlp.down_proj")
    assert layer == LayerScheme(PRESETS["fp8"].weights, PRESETS["fp8"].activations)
    assert scheme.layer("model.layers.3.mlp.up_proj").static
    assert scheme.layer("model.layers.3.self_attn.o_proj") == LayerScheme()
    assert scheme.for_module("model.embed_tokens") is None
    assert scheme.for_module("model.layers.3.mlp.up_proj", ndim=3) is None


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("fp_8", {}, "did you mean fp8"),
        ("fp8", {"kv_cache": "fp4"}, "fp8, int8, int4"),
        ("fp8", {"per_layer": {"lm_head": "fp7"}}, "unknown scheme 'fp7'"),
        ("fp8", {"ignore": ["re:*.mlp"]}, "not a regular expression"),
        ("fp8", {"static": True}, "no static form"),
        ("w8a16", {"static": True}, "no static form"),
    ],
)
def test_bad_options_are_refused(name, options, match):
    with pytest.raises(ConfigError, match=match):
        Scheme.preset(name, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ignore": ["model.layers.0.mlp.gate"]}, "matches no module"),
        ({"per_layer": {"re:.*expert.*": "fp8"}}, "per_layer pattern 're:.*expert.*' matches no module"),
        ({"per_layer": {"re:.*": "fp8"}}, "matches every linear"),
        # layers.1. also names layers.10 and layers.11; the literal form names layers.1 alone.
        ({"ignore": [r"re:model.layers.1."]}, r"also matches 'model\.layers\.10\."),
        ({"ignore": [r"re:model\.layers\.1.*"]}, r"also matches 'model\.layers\.10\."),
        ({"per_layer": {r"re:.*layers.1.mlp": "bf16", r"re:.*[02].mlp": "fp8"}}, None),
        ({"ignore": [r"re:model\.layers\.1\..*"]}, None),
        ({"ignore": [r"re:.*\.layers\.(0|11)\..*", "lm_head"]}, None),
        ({"ignore": ["model.layers.0.self_attn.k_proj"]}, "are one fused layer"),
        ({"per_layer": {r"re:.*gate_proj$": "fp8"}}, "are one fused layer"),
    ],
)
def test_patterns_mean_what_they_say(options, match):
    scheme = Scheme.preset("nvfp4", **options)
    if match is None:
        check_scheme(scheme, SHAPES)
        return
    with pytest.raises(ConfigError, match=match):
        check_scheme(scheme, SHAPES)


def test_a_scheme_that_quantizes_nothing_is_refused():
    with pytest.raises(SnapshotError, match="quantizes none"):
        check_scheme(Scheme.preset("fp8", ignore=["re:.*"]), SHAPES)
    check_scheme(Scheme.preset("bf16"), SHAPES)


def test_fused_siblings():
    assert fused_siblings("model.layers.0.mlp.up_proj") == (
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    )
    assert fused_siblings("model.layers.0.mlp.down_proj") == ("model.layers.0.mlp.down_proj",)
    assert fused_siblings("q_proj") == ("q_proj", "k_proj", "v_proj")


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = {"q_proj": 1.0, "k_proj": 3.0, "v_proj": 0.1, "gate_proj": 0.1, "up_proj": 0.2}
    return {
        name: torch.randn(shape, generator=generator) * scales.get(name.split(".")[-2], 1.0)
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensor"])
def test_fused_layers_share_the_scale_that_spans_a_tensor(name):
    """Engines fuse q/k/v and gate/up and keep one such scale; with one, fusing changes no value."""
    scheme = Scheme.preset(name)
    tensors, source = snapshot(weights().items(), scheme, 0).tensors, weights()
    suffix = "weight_global_scale" if name == "nvfp4" else "weight_scale"
    assert scheme.weights is not None
    for group in (PROJECTIONS[:3], PROJECTIONS[4:6]):
        modules = [f"model.layers.3.{leaf}" for leaf in group]
        assert len({tensors[f"{module}.{suffix}"].item() for module in modules}) == 1
        parts = []
        for module in modules:
            wire = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")}
            parts.append(QuantizedTensor.from_wire(wire, scheme.weights).dequantize())
        from rlq import quantize

        fused = torch.cat([source[f"{module}.weight"] for module in modules]).to(torch.bfloat16)
        assert torch.equal(torch.cat(parts), quantize(fused, scheme.weights).dequantize())
    down, o = (tensors[f"model.layers.3.{leaf}.{suffix}"] for leaf in ("mlp.down_proj", "self_attn.o_proj"))
    assert down.item() != o.item()


def test_static_scales_need_calibration_and_are_shared_by_fused_layers():
    scheme = Scheme.preset("fp8_static")
    with pytest.raises(ConfigError, match="calibrat"):
        snapshot(weights().items(), scheme, 0)
    statistics = Statistics({name: 4.48 for name in LINEARS} | {"model.layers.0.self_attn.k_proj": 8.96})
    tensors = snapshot(weights().items(), scheme, 0, statistics).tensors
    scales = [tensors[f"model.layers.0.self_attn.{leaf}.input_scale"].item() for leaf in ("q_proj", "k_proj", "v_proj")]
    assert scales == [pytest.approx(0.02)] * 3
    nvfp4 = snapshot(weights().items(), Scheme.preset("nvfp4", static=True), 0, statistics).tensors
    assert nvfp4["model.layers.0.mlp.down_proj.input_global_scale"].item() == pytest.approx(2688 / 4.48)


def test_default_ignores_may_match_nothing():
    assert "lm_head" in DEFAULT_IGNORE
    check_scheme(Scheme.preset("fp8"), {k: v for k, v in SHAPES.items() if not k.startswith("lm_head")})
