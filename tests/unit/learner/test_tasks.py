"""The embedded task: data, reward, tokenizer, and the shipped checkpoint measured by an independent sampler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainers.tasks import (
    CHARACTERS,
    DATASETS,
    EOS_TOKEN,
    PAD_TOKEN,
    REWARDS,
    VOCABULARY,
    char_tokenizer,
    exact_match,
    sort_digits_dataset,
)

CHECKPOINT = Path(__file__).resolve().parents[3] / "configs" / "models" / "sort_digits"
TOKENIZER = char_tokenizer()


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)


# ---- data set


def test_dataset_is_a_function_of_its_seed():
    rows = sort_digits_dataset(50, seed=3).to_list()
    assert rows == sort_digits_dataset(50, seed=3).to_list()
    assert rows[:20] == sort_digits_dataset(20, seed=3).to_list()
    assert rows != sort_digits_dataset(50, seed=4).to_list()


@pytest.mark.parametrize("num_digits", [1, 6, 9])
def test_answer_is_the_ordered_prompt(num_digits):
    data = sort_digits_dataset(200, seed=0, num_digits=num_digits)
    assert data.column_names == ["prompt", "answer"]
    for row in data.to_list():
        digits, end = row["prompt"][:-1], row["prompt"][-1]
        assert end == "="
        assert len(digits) == num_digits
        assert [int(c) for c in row["answer"]] == sorted(int(c) for c in digits)


def test_digits_are_uniform_and_repeat():
    text = "".join(sort_digits_dataset(2000, seed=0)["answer"])
    # 12,000 draws: the count of one digit has mean 1200 and standard deviation sqrt(12000 * .1 * .9) = 33.
    assert all(abs(text.count(str(d)) - 1200) < 5 * 33 for d in range(10))


def test_registries_name_the_functions():
    assert DATASETS["sort_digits"] is sort_digits_dataset
    # TRL logs a reward under its function's name.
    assert all(function.__name__ == name for name, function in REWARDS.items())


# ---- reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("012358", 1.0),
        ("012358<eos>", 1.0),
        ("012358<eos><pad><pad>", 1.0),
        ("012385", 0.0),
        ("0123588", 0.0),
        ("01235", 0.0),
        (" 012358", 0.0),
        ("012<eos>358", 0.0),
        ("", 0.0),
        ("<eos>", 0.0),
    ],
)
def test_reward_is_the_same_for_text_and_conversation(completion, reward):
    answer = ["012358"]
    assert exact_match([completion], answer=answer) == [reward]
    conversation = [{"role": "assistant", "content": completion}]
    assert exact_match(completions=[conversation], answer=answer) == [reward]


def test_reward_pairs_completions_with_answers_and_ignores_other_columns():
    rewards = exact_match(prompts=["21=", "43="], completions=["12", "12"], answer=["12", "34"], trainer_state=None)
    assert rewards == [1.0, 0.0]
    with pytest.raises(ValueError, match="shorter"):
        exact_match(["12", "34"], answer=["12"])


# ---- tokenizer


@settings(deadline=None)
@given(st.text(alphabet=CHARACTERS))
def test_tokenizer_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


@settings(deadline=None)
@given(st.text())
def test_one_token_per_character_and_unknown_ones_are_visible(text):
    tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(text, split_special_tokens=True))
    assert tokens == [c if c in VOCABULARY else "<unk>" for c in text]


def test_special_tokens():
    ids = [TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id]
    assert len(set(ids)) == 3
    assert TOKENIZER.bos_token_id is None
    assert TOKENIZER.encode("12" + EOS_TOKEN)[-1] == TOKENIZER.eos_token_id
    padded = TOKENIZER(["12", "1"], padding=True).input_ids
    assert TOKENIZER.convert_ids_to_tokens(padded[1]) == [PAD_TOKEN, "1"]


def test_shipped_tokenizer_is_the_one_in_the_code(tokenizer):
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab() == VOCABULARY
    assert tokenizer.padding_side == "left"
    for text in (CHARACTERS, "a\n\nb", " 1 , 2 .", "528310=012358<eos>"):
        assert tokenizer.encode(text) == TOKENIZER.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == TOKENIZER.decode(TOKENIZER.encode(text))


# ---- shipped checkpoint


def test_checkpoint_is_small():
    assert sum(f.stat().st_size for f in CHECKPOINT.iterdir()) < 5e6


def test_checkpoint_is_bf16_and_complete(model):
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (the file is not a mapping)
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert set(stored) == set(model.state_dict())
    assert model.num_parameters() == sum(t.numel() for t in stored.values()) <= 1_500_000


def test_checkpoint_config_and_tokenizer_agree(model, tokenizer):
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["head_dim"] >= 32
    assert config["vocab_size"] == len(tokenizer)
    for ids in (config, json.loads((CHECKPOINT / "generation_config.json").read_text())):
        assert (ids["eos_token_id"], ids["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert not {"temperature", "top_k", "top_p", "min_p", "do_sample", "repetition_penalty"} & set(ids)


@torch.no_grad()
def complete(model, tokenizer, prompts, pick):
    """Texts up to end-of-sequence; `pick` maps next-token probabilities (batch, vocabulary) to ids (batch, 1)."""
    ids = torch.tensor(tokenizer(prompts).input_ids)
    start = ids.shape[1]
    for _ in range(start + 1):
        ids = torch.cat([ids, pick(model(ids).logits[:, -1].softmax(-1))], dim=1)
    return [text.split(EOS_TOKEN)[0] for text in tokenizer.batch_decode(ids[:, start:])]


def test_checkpoint_leaves_grpo_something_to_sharpen(model, tokenizer):
    data = sort_digits_dataset(512, seed=20_000)
    generator = torch.Generator().manual_seed(0)
    samples = complete(model, tokenizer, data["prompt"][:], lambda p: p.multinomial(1, generator=generator))
    greedy = complete(model, tokenizer, data["prompt"][:], lambda p: p.argmax(-1, keepdim=True))
    sampled_accuracy = sum(exact_match(samples, data["answer"])) / len(data)
    greedy_accuracy = sum(exact_match(greedy, data["answer"])) / len(data)
    # The standard error over 512 prompts is sqrt(.28 * .72 / 512) = 0.02.
    assert 0.15 <= sampled_accuracy <= 0.45
    assert greedy_accuracy >= 2 * sampled_accuracy
