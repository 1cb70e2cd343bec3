"""From a learner's parameters to the bf16 checkpoint: names, cast, tied heads, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlq.errors import SnapshotError
from rlq.weights.canonical import bf16_checkpoint, canonical_name

NAME = "model.layers.0.mlp.gate_proj.weight"


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- names


@pytest.mark.parametrize(
    "wrapped",
    [
        "_orig_mod." + NAME,
        "module." + NAME,
        "module._orig_mod." + NAME,
        "_orig_mod.module." + NAME,
        "module.module._orig_mod." + NAME,
        "_fsdp_wrapped_module." + NAME,
        "model._fsdp_wrapped_module.layers.0._fsdp_wrapped_module._orig_mod.mlp.gate_proj.weight",
        "model.layers.0._checkpoint_wrapped_module.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate_proj.base_layer.weight",
        "base_model.model." + NAME,
        "module._orig_mod.base_model.model.model.layers.0.mlp.gate_proj.base_layer.weight",
    ],
)
def test_wrappers_are_stripped(wrapped):
    assert canonical_name(wrapped) == NAME


@pytest.mark.parametrize(
    "plain",
    [
        NAME,
        "model.norm.weight",
        "model.module.weight",  # `module` is a wrapper at the front only
        "model.layers.0.database_layer.weight",  # whole components only
        "model.my_orig_mod.weight",
        "submodule.weight",
    ],
)
def test_other_names_are_left_alone(plain):
    assert canonical_name(plain) == plain


@settings(deadline=None)
@given(st.lists(st.sampled_from(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]), max_size=4))
def test_any_nesting_gives_the_canonical_name_and_stripping_is_idempotent(wrappers):
    name = canonical_name(".".join([*wrappers, NAME]))
    assert name == NAME
    assert canonical_name(name) == name


def test_a_replicated_model_publishes_what_the_plain_model_publishes():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    plain = bf16_checkpoint(model.named_parameters())
    again = bf16_checkpoint(torch.nn.DataParallel(model).named_parameters())
    assert list(again) == list(plain)
    assert all(torch.equal(again[name], plain[name]) for name in plain)


# ---- cast


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_cast_is_the_one_of_torch_and_the_input_is_untouched(dtype):
    tensor = torch.nn.Parameter(random(5, 7, dtype=dtype).t())  # not contiguous, with a gradient
    before = tensor.detach().clone()
    out = bf16_checkpoint([("w.weight", tensor)])["w.weight"]
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    assert not out.requires_grad
    assert torch.equal(out, before.to(torch.bfloat16))
    assert torch.equal(tensor, before)
    assert tensor.requires_grad


def test_cast_rounds_to_nearest_with_ties_to_even():
    # bf16 keeps 7 bits of the mantissa: 1 + 2^-8 lies halfway between 1 and 1 + 2^-7, 1 + 3 * 2^-8 halfway further up.
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    out = bf16_checkpoint([("w", ties)])["w"]
    assert out.tolist() == [1.0, 1 + 2**-6]


# ---- one tensor, one name


def test_a_tied_head_is_kept_once_under_its_first_name():
    embedding = random(6, 4)
    out = bf16_checkpoint([("model.embed_tokens.weight", embedding), ("lm_head.weight", embedding)])
    assert list(out) == ["model.embed_tokens.weight"]


def test_an_untied_head_of_equal_values_is_kept():
    embedding = random(6, 4)
    out = bf16_checkpoint([("model.embed_tokens.weight", embedding), ("lm_head.weight", embedding.clone())])
    assert list(out) == ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize("size", [8, 64, 128, 256])
def test_tensors_that_exist_only_while_they_are_read_are_all_kept(size):
    # Freed memory is handed out again at the same address: an address alone does not make two tensors one.
    source = {f"layer{i}.weight": torch.full((size, size), float(i), dtype=torch.bfloat16) for i in range(16)}
    out = bf16_checkpoint((name, tensor.float()) for name, tensor in source.items())
    assert list(out) == list(source)
    assert all(torch.equal(out[name], source[name]) for name in source)


def test_empty_tensors_are_never_taken_for_one_another():
    assert list(bf16_checkpoint([("a", torch.empty(0)), ("b", torch.empty(0))])) == ["a", "b"]


def test_two_tensors_with_one_canonical_name_are_refused():
    with pytest.raises(SnapshotError, match=r"'a\.weight'"):
        bf16_checkpoint([("a.weight", random(2, 2)), ("_orig_mod.a.weight", random(2, 2))])


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "base_model.model.model.embed_tokens.lora_embedding_B.default",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight",
        "base_model.model.lm_head.modules_to_save.default.weight",
    ],
)
def test_unmerged_adapters_are_refused_by_name(name):
    with pytest.raises(SnapshotError, match="merge the adapter") as error:
        bf16_checkpoint([("base_model.model.model.norm.weight", random(4)), (name, random(4, 4))])
    assert name in str(error.value)


# ---- non-finite values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("count", [1, 3])
def test_nonfinite_values_are_refused_with_name_and_count(value, count):
    bad = random(8, 8)
    bad.view(-1)[5 : 5 + count] = value
    with pytest.raises(SnapshotError, match=f"{count} non-finite values in 'b.weight'") as error:
        bf16_checkpoint([("a.weight", random(8, 8)), ("module.b.weight", bad)])
    assert "\n" not in str(error.value)


def test_infinities_that_would_cancel_in_a_sum_are_found():
    with pytest.raises(SnapshotError, match="2 non-finite"):
        bf16_checkpoint([("a", torch.tensor([float("inf"), -float("inf")]))])


def test_a_value_that_overflows_in_the_cast_is_refused():
    with pytest.raises(SnapshotError, match="1 non-finite"):
        bf16_checkpoint([("a", torch.tensor([3.4e38, 1.0]))])  # the largest finite bf16 is 3.39e38


def test_large_finite_values_pass():
    largest = torch.finfo(torch.bfloat16).max
    out = bf16_checkpoint([("a", torch.full((100,), largest))])  # their sum overflows, they do not
    assert torch.equal(out["a"], torch.full((100,), largest, dtype=torch.bfloat16))
