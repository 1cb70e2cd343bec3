"""The sampler: throughput of the emulated FP8 engine over unquantized vLLM, and its agreement with the learner.

Both engines live in Ray actors of one thread and take turns, so that they see the same machine.
"""

import os
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")

import ray
import torch
from support.common import MODEL, interleave, report, row
from transformers import AutoConfig, AutoModelForCausalLM

from rlq.formats.schemes import Scheme
from rlq.publish import snapshot
from rlq.types import Request, Sampling
from samplers.options import SamplerConfig
from samplers.pool.pool import SamplerPool
from samplers.testing.reference import TransformersSampler
from samplers.vllm import engine
from samplers.vllm import slots as storage

SAMPLING = Sampling(temperature=1.0, max_tokens=24, stop_token_ids=())
ROUNDS = 15


class StockVllm(engine.VllmSampler):
    """vLLM without any quantization method, on the same settings; it keeps its dummy weights."""

    def __init__(self, *args, **kwargs):
        engine._method_config = lambda scheme, options: None  # type: ignore[assignment]
        storage.expected_specs = lambda model: {}
        super().__init__(*args, **kwargs)
        self.version = 0


def requests() -> list[Request]:
    digits = torch.randint(3, 13, (16, 6), generator=torch.Generator().manual_seed(0)).tolist()
    return [Request((*row, 44), 8, 1000 * i) for i, row in enumerate(digits)]


def pool(scheme: str, factory=engine.VllmSampler) -> SamplerPool:
    config = SamplerConfig(sampler_scheme=scheme, num_samplers=1, sampler_max_model_len=32)
    args = (AutoConfig.from_pretrained(MODEL).to_dict(), config.engine())
    return SamplerPool(factory, args, config.scheme(), config.pool())


def generate(pool: SamplerPool) -> float:
    """Seconds per generated token, measured inside the actor."""
    answer: Any = ray.get(pool.fleet.members[0].actor.generate.remote(requests(), SAMPLING, 0, ()))
    return answer.seconds / sum(len(r.token_ids) for r in answer.rollouts)


def gap(pool: SamplerPool, reference: TransformersSampler) -> float:
    """Mean |reference log-prob - sampler log-prob| over the tokens of 128 rollouts."""
    stop = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=(1,))
    rollouts = pool.generate(requests(), stop, 0)
    return float(torch.cat([(reference.score(r) - torch.tensor(r.logprobs)).abs() for r in rollouts]).mean())


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():  # move the masters off the bf16 grid, as training does
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
    pools = {name: pool(name) for name in ("fp8", "bf16")}
    for each in pools.values():
        each.install(snapshot(model.named_parameters(), each.scheme, 0))
    stock = pool("bf16", StockVllm)
    ray.get(stock.fleet.members[0].actor.where.remote())
    sides = {name: (lambda p=p: generate(p)) for name, p in (*pools.items(), ("vllm", stock))}
    times = interleave(sides, ROUNDS)
    references = {}
    for name in pools:
        references[name] = TransformersSampler(model.config.to_dict(), Scheme.preset(name))
        references[name].install(snapshot(model.named_parameters(), references[name].scheme, 0))
    masters = TransformersSampler(model.config.to_dict(), Scheme.preset("bf16"))
    masters.model.load_state_dict(model.state_dict())
    ratio = times["vllm"] / times["fp8"]
    identity, fp8 = gap(pools["bf16"], references["bf16"]), gap(pools["fp8"], references["fp8"])
    report(
        "sampler",
        [
            row("throughput, fp8 emulated over unquantized vLLM", ratio, ">= 0.75", ratio >= 0.75),
            row("throughput, bf16 through rlq's plugin over unquantized vLLM", times["vllm"] / times["bf16"]),
            row("unquantized vLLM, tokens per second and thread", 1 / times["vllm"]),
            row("identity against bf16-rounded learner, mean |log ratio|", identity, "<= 1e-4", identity <= 1e-4),
            row("identity against the fp32 masters, mean |log ratio|", gap(pools["bf16"], masters)),
            row("fp8 against the fake-quantized learner, mean |log ratio|", fp8, "<= 1e-3", fp8 <= 1e-3),
        ],
    )


if __name__ == "__main__":
    main()
