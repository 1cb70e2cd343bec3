"""Recipes: a part of a scheme's identity, applied before rounding or in place of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from grpo_steps import MODEL
from transformers import AutoModelForCausalLM

from rlq.errors import ConfigError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import delta, snapshot
from rlq.quantize import QuantizedTensor, quantize
from rlq.recipes.base import RECIPES, Recipe, build, needs
from rlq.recipes.statistics import Statistics
from samplers.options import SamplerConfig
from samplers.testing.reference import TransformersSampler

PLAIN, IDENTITY = Scheme.preset("fp8_tensor"), Scheme.preset("fp8_tensor", recipe=["identity"])


@dataclass(frozen=True)
class Double(Recipe):
    """Multiplies every weight; an example of a recipe that transforms."""

    factor: float = 2.0

    def needs(self) -> frozenset[str]:
        return frozenset({"channel_amax"})

    def transform(self, tensors: Mapping[str, torch.Tensor], statistics: Statistics) -> Mapping[str, torch.Tensor]:
        return {name: tensor * self.factor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Coarse(Recipe):
    """Quantizes `down_proj` with a scale twice as large; an example of a recipe with its own way of rounding."""

    def quantize(self, name, weight, scheme, statistics, amax=None) -> QuantizedTensor | None:
        return quantize(weight, scheme, amax=2 * weight.abs().max()) if "down_proj" in name else None


class Cut(Recipe):
    """Changes a shape, which no recipe may."""

    def transform(self, tensors: Mapping[str, torch.Tensor], statistics: Statistics) -> Mapping[str, torch.Tensor]:
        return {name: tensor[:1] for name, tensor in tensors.items()}


@pytest.fixture
def registry(monkeypatch):
    for name, recipe in {"double": Double, "coarse": Coarse, "cut": Cut}.items():
        monkeypatch.setitem(RECIPES, name, recipe)


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def make(policy, *recipe: str):
    return snapshot(policy.named_parameters(), Scheme.preset("fp8_tensor", recipe=recipe), 1)


def test_the_identity_changes_no_byte(policy):
    plain, identity = make(policy), make(policy, "identity")
    assert plain.digest == identity.digest
    assert plain.scheme != identity.scheme


def test_recipes_transform_in_order_and_round_in_their_own_way(policy, registry):
    plain, doubled, coarse = make(policy), make(policy, "double:factor=4", "double:factor=0.5"), make(policy, "coarse")
    scale = "model.layers.0.mlp.{}.weight_scale"
    for module in ("up_proj", "down_proj"):
        name = scale.format(module)
        assert torch.equal(doubled.tensors[name], 2 * plain.tensors[name])
    assert torch.equal(coarse.tensors[scale.format("up_proj")], plain.tensors[scale.format("up_proj")])
    assert torch.equal(coarse.tensors[scale.format("down_proj")], 2 * plain.tensors[scale.format("down_proj")])
    with pytest.raises(ConfigError, match="changed names or shapes"):
        make(policy, "cut")


def test_a_snapshot_of_another_recipe_is_another_scheme(policy):
    sampler = TransformersSampler(json.loads((MODEL / "config.json").read_text()), PLAIN)
    with pytest.raises(SnapshotError, match=r"snapshot is 'fp8_tensor \(recipe \['identity'\]\)', this sampler serves"):
        sampler.install(make(policy, "identity"))
    with pytest.raises(SnapshotError, match="send it whole"):
        delta.encode(make(policy), make(policy, "identity"))


def test_a_scheme_with_recipes_is_plain_data():
    assert Scheme.from_dict(json.loads(json.dumps(IDENTITY.to_dict()))) == IDENTITY
    assert "recipe" not in PLAIN.to_dict(), "what was written before recipes still opens, and the other way round"


def test_needs_are_those_of_scheme_and_recipes(registry):
    assert not needs(IDENTITY)
    assert needs(Scheme.preset("fp8_static", recipe=["double"])) == {"input_amax", "channel_amax"}
    assert needs(Scheme.preset("fp8", kv_cache="fp8.tensor")) == {"cache_amax"}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("identiti", "unknown recipe 'identiti'; did you mean identity"),
        ("identity:alpha=1", "recipe 'identity' has no option 'alpha'; options: none"),
        ("double:factr=1", "no option 'factr'; options: factor"),
        ("double:factor=x", "'x' in recipe 'double:factor=x' is no float"),
    ],
)
def test_texts_that_name_nothing_are_refused_in_one_line(text, match, registry):
    for use in (lambda: build([text]), lambda: SamplerConfig(sampler_recipe=[text])):
        with pytest.raises(ConfigError, match=match) as caught:
            use()
        assert "\n" not in str(caught.value)
    assert SamplerConfig(sampler_scheme="fp8_tensor", sampler_recipe=["identity"]).scheme() == IDENTITY
    assert build(["double:factor=3"]) == (Double(3.0),)
