"""Three GRPO steps with FP8 rollouts: python docs/example.py, from the repository's root."""

import random
import sys

import ray
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from samplers import SamplerConfig, SamplerPool
from trainers import QuantGRPOConfig, QuantGRPOTrainer

MODEL = "configs/models/sort_digits"  # a 0.8 M-parameter model that sorts digits: "528310=" -> "012358"


def reward(completions, answer, **columns):
    return [float(text.removesuffix("<eos>") == right) for text, right in zip(completions, answer, strict=True)]


digits = ["".join(random.Random(i).choices("0123456789", k=6)) for i in range(512)]
data = Dataset.from_dict({"prompt": [d + "=" for d in digits], "answer": ["".join(sorted(d)) for d in digits]})

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
args = QuantGRPOConfig(
    output_dir="runs/example",
    max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 3,
    learning_rate=5e-4,
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=8,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    logging_steps=1,
    disable_tqdm=True,
    save_strategy="no",
    report_to="none",
)

ray.init()
pool = SamplerPool.vllm(model.config.to_dict(), SamplerConfig(sampler_scheme="fp8", sampler_max_model_len=32))
try:
    trainer = QuantGRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        reward_funcs=reward,
        train_dataset=data,
        args=args,
        samplers=pool,
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"step {entry['step']}: reward {entry['reward']:.2f}, k3 {entry['rlq/sampler_kl_k3']:.1e}")
finally:
    pool.close()
    ray.shutdown()
