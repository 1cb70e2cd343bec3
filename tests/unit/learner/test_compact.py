"""Skipping padding and sharing prompts changes no hidden state of a real token and no gradient."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainers.forward import compact
from trainers.forward.compact import compact_forward, length_buckets

WIDTH = 4  # columns of prompts in `batch`


@pytest.fixture(autouse=True)
def every_pass_is_worth_it(monkeypatch):
    monkeypatch.setattr(compact, "WORTH_A_PASS", 1)


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def batch() -> dict[str, torch.Tensor]:
    """Two prompts, padded left, for four rows each; completions of 1 to 8 tokens, padded right, in mixed order."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 20, (8, 12), generator=generator)
    prompts = torch.randint(1, 20, (2, WIDTH), generator=generator)
    mask = torch.zeros(8, 12, dtype=torch.long)
    for row, (prompt, length) in enumerate([(0, 8), (1, 1), (0, 3), (1, 5), (1, 1), (0, 2), (0, 4), (1, 7)]):
        ids[row, :WIDTH] = prompts[prompt]
        mask[row, 1 + prompt : WIDTH + length] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def hidden(model, inputs) -> torch.Tensor:
    out = model.base_model(**inputs, use_cache=False).last_hidden_state
    return torch.where(inputs["attention_mask"][..., None].bool(), out, 0.0)


def computed(model) -> list[int]:
    """Collects the tokens that each call of the first layer computes."""
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0] * args[0].shape[1]))
    return seen


@pytest.mark.parametrize("width", [None, 0, WIDTH])
@pytest.mark.parametrize("buckets", [1, 2, 3, 8, 50])
def test_hidden_states_and_gradients_stay(model, buckets, width):
    inputs, plain = batch(), copy.deepcopy(model)
    compact_forward(model, buckets, None if width is None else lambda: width)
    # A fixed random direction per token: their plain sum of squares would be constant under the last norm.
    weights = torch.randn(8, 12, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for each in (plain, model):
        (hidden(each, inputs) * weights).sum().backward()
    torch.testing.assert_close(hidden(model, inputs), hidden(plain, inputs), rtol=0, atol=1e-12)
    for (name, a), (_, b) in zip(model.base_model.named_parameters(), plain.base_model.named_parameters(), strict=True):
        # Llama's norms compute in float32 whatever the model's dtype: adding up before them or after differs by that.
        assert b.grad.norm() > 0, name
        assert (a.grad - b.grad).norm() < 1e-6 * b.grad.norm(), name


def test_without_sharing_a_group_per_row_computes_exactly_the_real_tokens(model):
    seen, inputs = computed(model), batch()
    compact_forward(model, 8, lambda: 0)
    hidden(model, inputs)
    assert sum(seen) == inputs["attention_mask"].sum()


@pytest.mark.parametrize(("worth", "passes"), [(1, 8), (20, 2), (1000, 1)])
def test_small_batches_make_fewer_passes(model, monkeypatch, worth, passes):
    monkeypatch.setattr(compact, "WORTH_A_PASS", worth)
    seen, inputs = computed(model), batch()
    assert 40 <= inputs["attention_mask"].sum() < 60
    compact_forward(model, 8, lambda: 0)
    hidden(model, inputs)
    assert len(seen) == passes


def test_a_shared_prompt_is_computed_once(model):
    seen, inputs = computed(model), batch()
    compact_forward(model, 8, lambda: WIDTH)
    hidden(model, inputs)
    completions = int(inputs["attention_mask"][:, WIDTH:].sum())
    assert sum(seen) == 2 * (WIDTH - 1) + completions  # the left-most column is padding in both prompts


def test_prompts_that_differ_are_not_shared(model):
    seen, inputs = computed(model), batch()
    inputs["input_ids"][:, WIDTH - 1] = torch.arange(1, 9)
    compact_forward(model, 1, lambda: WIDTH)
    hidden(model, inputs)
    assert seen == [8 * 11]


def test_gradient_checkpointing_shares_nothing_and_stays_right(model):
    inputs, plain = batch(), copy.deepcopy(model)
    compact_forward(model, 2, lambda: WIDTH)
    model.gradient_checkpointing_enable()
    model.train()
    torch.testing.assert_close(hidden(model, inputs), hidden(plain, inputs), rtol=0, atol=1e-12)


def test_a_scored_batch_is_not_computed_again(model):
    """Scored without gradients, then learned from in another order: one forward pass, the same gradients."""
    inputs, plain = batch(), copy.deepcopy(model)
    compact_forward(model, 2, lambda: WIDTH, score_once=True)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    shuffled = {name: tensor[order] for name, tensor in inputs.items()}
    weights = torch.randn(8, 12, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for each in (plain, model):
        with torch.no_grad():
            score = hidden(each, inputs)
        assert not score.requires_grad
        seen = computed(each)
        learned = hidden(each, shuffled)
        (learned * weights).sum().backward()
        assert bool(seen) == (each is plain)
        torch.testing.assert_close(learned.detach(), score[order], rtol=0, atol=1e-12)
    for (name, a), (_, b) in zip(model.base_model.named_parameters(), plain.base_model.named_parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 1e-6 * b.grad.norm(), name
    assert hidden(model, shuffled).requires_grad
    assert seen, "a second pass over the same rows is computed"


@pytest.mark.parametrize("what", ["ids", "mask", "shape", "evaluation"])
def test_other_rows_are_computed(model, what):
    inputs = batch()
    compact_forward(model, 2, lambda: WIDTH, score_once=True)
    model.train(what != "evaluation")
    with torch.no_grad():
        hidden(model, inputs)
    if what == "shape":
        inputs = {name: tensor[:4] for name, tensor in inputs.items()}
    elif what != "evaluation":
        inputs["input_ids" if what == "ids" else "attention_mask"][0, 6] ^= 1
    seen, plain = computed(model), copy.deepcopy(model)
    compact_forward(plain, 1, None)
    torch.testing.assert_close(hidden(model, inputs), hidden(plain, inputs), rtol=0, atol=1e-12)
    assert seen


def test_a_copy_computes_with_its_own_weights(model):
    compact_forward(model, 2, lambda: WIDTH)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.embed_tokens.weight.zero_()
    assert hidden(twin, batch()).abs().max() == 0 < hidden(model, batch()).abs().max()


def test_generation_is_untouched(model):
    inputs = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    before = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    compact_forward(model, 2, lambda: 2)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), before)


def test_empty_rows_and_batches_split():
    mask = torch.tensor([[0, 0, 0], [0, 1, 1]])
    assert [(rows.tolist(), first, last) for rows, first, last in length_buckets(mask, 2)] == [([0], 0, 1), ([1], 1, 3)]
