#!/usr/bin/env python3
"""Pre-train the embedded model on sorting digits, and stop while it is still right only about every third time.

Clean steps teach the task. Noisy steps, in which answer digits are replaced at random, then widen the distribution
again: sampling at temperature 1 fails often while the most likely answer stays mostly right, which is what GRPO needs.
Takes one to two minutes on one CPU core. Equal seeds give equal weights on equal hardware and library versions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from trainers.tasks import EOS_TOKEN, PAD_TOKEN, VOCABULARY, char_tokenizer, exact_match, sort_digits_dataset

BATCH_SIZE = 64
LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
MAX_GRAD_NORM = 1.0
HELD_OUT_ROWS = 2048
TARGET_ACCURACY = (0.2, 0.4)


def build_model() -> LlamaForCausalLM:
    """A Llama of about 0.8 M parameters in fp32; head_dim 32 is the least that vLLM's CPU attention takes."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS_TOKEN],
        pad_token_id=VOCABULARY[PAD_TOKEN],
    )
    model = LlamaForCausalLM(config)
    # Ids only: a sampling default saved here could leak into the engines that read the checkpoint.
    model.generation_config = GenerationConfig(eos_token_id=VOCABULARY[EOS_TOKEN], pad_token_id=VOCABULARY[PAD_TOKEN])
    return model


def replace_digits(ids_BT: torch.Tensor, digit_ids: torch.Tensor, start: int, noise: float) -> torch.Tensor:
    """Replace each digit from position `start` on, with probability `noise`, by a uniformly drawn one.

    Args:
        ids_BT: token ids (batch, length), int64; the last position holds end-of-sequence and stays.
        digit_ids: ids of the ten digits, (10,), int64.
    """
    drawn = digit_ids[torch.randint(len(digit_ids), ids_BT.shape)]
    replace = torch.rand(ids_BT.shape) < noise
    replace[:, :start] = False
    replace[:, -1] = False
    return torch.where(replace, drawn, ids_BT)


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Dataset, *, clean_steps: int, noise: float
) -> None:
    """One pass over `data` in order, loss on the answer and its `<eos>` only; noisy after `clean_steps`."""
    texts = [prompt + answer + EOS_TOKEN for prompt, answer in zip(data["prompt"], data["answer"], strict=True)]
    ids_NT = torch.tensor(tokenizer(texts).input_ids)
    prompt_length = len(data[0]["prompt"])
    digit_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))

    model.train()
    for step, ids_BT in enumerate(ids_NT.split(BATCH_SIZE), start=1):
        if step > clean_steps:
            ids_BT = replace_digits(ids_BT, digit_ids, prompt_length, noise)
        labels_BT = ids_BT.clone()
        labels_BT[:, :prompt_length] = -100  # the index that cross-entropy ignores
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Dataset, *, do_sample: bool) -> float:
    """Share of right answers, greedy or sampled at temperature 1 over the whole vocabulary until end-of-sequence."""
    model.eval()
    inputs = tokenizer(list(data["prompt"]), return_tensors="pt")
    length = inputs.input_ids.shape[1]  # of the prompt (digits, "=") and of a right completion (digits, <eos>)
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
    # pyright cannot match transformers' model classes to the protocol that its `generate` is annotated with.
    generate = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    output = generate(**inputs, do_sample=do_sample, max_new_tokens=length, **sampling)
    rewards = exact_match(tokenizer.batch_decode(output[:, length:], skip_special_tokens=True), data["answer"])
    return sum(rewards) / len(rewards)


def report(label: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Dataset) -> float:
    """Print both accuracies and return the sampled one."""
    sampled = accuracy(model, tokenizer, data, do_sample=True)
    greedy = accuracy(model, tokenizer, data, do_sample=False)
    print(f"{label}: accuracy at T=1 {sampled:.3f}, greedy {greedy:.3f} on {len(data)} held-out prompts", flush=True)
    return sampled


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pre-train the embedded model on sorting digits.")
    parser.add_argument(
        "--out", type=Path, default=REPO / "configs" / "models" / "sort_digits", help="folder of the checkpoint"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data, noise and evaluation")
    parser.add_argument("--clean-steps", type=int, default=250, help="optimizer steps on right answers")
    parser.add_argument("--noisy-steps", type=int, default=80, help="optimizer steps on noisy answers, after those")
    parser.add_argument("--noise", type=float, default=0.2, help="probability that an answer digit is replaced")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)  # sums in a fixed order
    torch.manual_seed(args.seed)

    tokenizer = char_tokenizer()
    model = build_model()
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    data = sort_digits_dataset((args.clean_steps + args.noisy_steps) * BATCH_SIZE, seed=args.seed)
    train(model, tokenizer, data, clean_steps=args.clean_steps, noise=args.noise)

    seen = set(data["prompt"])
    held_out = sort_digits_dataset(HELD_OUT_ROWS, seed=args.seed + 1).filter(lambda row: row["prompt"] not in seen)
    report("fp32 weights", model, tokenizer, held_out)
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    # What counts is what others will load: the rounded weights, here computed with in fp32.
    reloaded = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    sampled = report("saved checkpoint", reloaded, AutoTokenizer.from_pretrained(args.out), held_out)
    print(f"checkpoint={args.out.resolve()}")
    low, high = TARGET_ACCURACY
    if not low <= sampled <= high:
        print(f"accuracy {sampled:.3f} is outside [{low}, {high}]: change --noisy-steps or --noise", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
