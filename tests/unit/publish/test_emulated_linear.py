"""The emulated linear: what it computes is what was published, and gradients go straight through its roundings."""

import copy
from dataclasses import replace

import pytest
import torch
from grpo_steps import MODEL
from transformers import AutoModelForCausalLM

from rlq.emulate.linear import EmulatedLinear, emulated_linear
from rlq.emulate.model import emulate, load_snapshot
from rlq.emulate.scores import token_logprobs
from rlq.errors import ConfigError
from rlq.formats.schemes import PRESETS, LayerScheme, Scheme
from rlq.publish import snapshot
from rlq.quantize import quantize, quantize_activations
from rlq.weights.hooks import linears

NAMES = [name for name in PRESETS if name not in ("bf16", "fp8_static")]
IDS = torch.tensor([[3, 4, 5, 44, 7, 8], [9, 12, 3, 7, 44, 5]])


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def layer(name: str, *, trainable: bool, bias: bool = True) -> EmulatedLinear:
    torch.manual_seed(0)
    scheme = PRESETS[name]
    return EmulatedLinear(
        torch.nn.Linear(128, 96, bias=bias), LayerScheme(scheme.weights, scheme.activations), trainable=trainable
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_trainable_model_computes_what_is_published_of_it(name, policy):
    """Bit for bit, scales that fused layers share included, at every version."""
    scheme = Scheme.preset(name)
    trained, frozen = copy.deepcopy(policy), copy.deepcopy(policy)
    emulate(trained, scheme, trainable=True)
    emulate(frozen, scheme)
    with torch.no_grad():
        for version in range(2):
            for parameter in trained.parameters():
                parameter.mul_(1 + 1e-3 * version)
            load_snapshot(frozen, snapshot(trained.named_parameters(), scheme, version))
            masters = [id(module.weight) for module in trained.modules() if isinstance(module, EmulatedLinear)]
            for parameter in trained.parameters():
                if id(parameter) not in masters:
                    parameter.copy_(parameter.bfloat16())  # what is not quantized is published in bf16
            assert torch.equal(trained(input_ids=IDS).logits, frozen(input_ids=IDS).logits)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_a_plain_linear_on_the_rounded_values(name):
    module = layer(name, trainable=True)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1), requires_grad=True)
    upstream = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    module(x).backward(upstream)
    scheme = PRESETS[name]
    assert scheme.weights is not None
    plain = torch.nn.Linear(128, 96)
    with torch.no_grad():
        plain.weight.copy_(quantize(module.weight.bfloat16(), scheme.weights).dequantize())
        plain.bias.copy_(module.bias.bfloat16())
        rounded = x if scheme.activations is None else quantize_activations(x, scheme.activations)
    rounded = rounded.detach().requires_grad_()
    plain(rounded).backward(upstream)
    for ours, plains in ((x, rounded), (module.weight, plain.weight), (module.bias, plain.bias)):
        assert ours.grad is not None
        assert plains.grad is not None
        assert torch.equal(ours.grad, plains.grad)


def test_the_plugin_s_function_passes_gradients_too():
    x = torch.randn(4, 64, requires_grad=True)
    emulated_linear(x, torch.eye(64), None, PRESETS["fp8"].activations).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 64))


def test_masters_are_the_replaced_layer_s_own(policy):
    model = copy.deepcopy(policy)
    before = dict(model.named_parameters())
    emulate(model, Scheme.preset("fp8"), trainable=True)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is parameter for name, parameter in before.items()), "an optimizer goes on with them"
    assert len(linears(model)) == 1, "the head"


def test_what_cannot_be_computed_is_refused(policy):
    module = layer("fp8_tensor", trainable=True)
    module.scheme = replace(module.scheme, static=True)
    with pytest.raises(ConfigError, match="calibrate first"):
        module(torch.ones(1, 128))
    with pytest.raises(ConfigError, match="cannot be trained through its recipes"):
        emulate(copy.deepcopy(policy), Scheme.preset("fp8", recipe=["identity"]), trainable=True)


def test_token_logprobs_are_those_of_the_tempered_softmax():
    logits, ids = torch.randn(2, 3, 7, dtype=torch.bfloat16), torch.tensor([[0, 6, 3], [2, 2, 5]])
    found = token_logprobs(logits, ids, 0.7)
    expected = torch.distributions.Categorical(logits=logits.float() / 0.7).log_prob(ids)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected)
    plain = torch.log_softmax(logits.float(), -1).gather(-1, ids[..., None])[..., 0]
    assert torch.equal(token_logprobs(logits, ids), plain), "temperature 1 changes no bit"
