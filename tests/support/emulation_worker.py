"""One vLLM engine in a process of its own: every version that it is given is served bit for bit, and sampled from.

    python emulation_worker.py SCHEME [OPTIONS_JSON]

Prints one JSON object. An engine changes process-wide state, so each scheme gets a process.
"""

import json
import sys
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rlq.errors import SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, delta, own_digest, snapshot, tensor_digest
from rlq.recipes.statistics import Statistics
from rlq.types import Request, Rollout, Sampling
from rlq.weights.hooks import attentions, linears
from samplers.options import EngineOptions
from samplers.testing.reference import TransformersSampler
from samplers.vllm.engine import VllmSampler
from samplers.vllm.slots import touched
from samplers.vllm.staging import heads, prepare, repack

# Biases on q/k/v, a tied head, grouped heads, and sizes that are no multiples of 32 or 128, so that blocks end inside
# fused shards and rows.
CONFIG = Qwen2Config(
    vocab_size=73,
    hidden_size=160,
    intermediate_size=208,
    num_hidden_layers=2,
    num_attention_heads=5,
    num_key_value_heads=1,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
RELOADS = 10


def model(seed: int, config: Any = CONFIG):
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
            elif parameter.ndim == 2:
                parameter.mul_(4)
    return policy


def on_model(engine: VllmSampler, function: Any) -> Any:
    return engine.llm.apply_model(function)[0]


def statistics(policy: Any, amax: float = 3.0) -> Statistics:
    """What calibration might find, for schemes with static scales."""
    return Statistics(dict.fromkeys(linears(policy), amax), dict.fromkeys(attentions(policy), (amax, amax)))


def couples_batch(scheme: Scheme) -> bool:
    return not scheme.static and scheme.activations is not None and scheme.activations.granularity == "tensor"


@torch.no_grad()
def stepwise_score(reference: TransformersSampler, rollout: Rollout) -> torch.Tensor:
    """Log-probs with the inputs that an engine sees: the prompt at once, then one token after the other."""
    step, cache, found = torch.tensor([rollout.prompt_ids]), None, []
    for token in rollout.token_ids.tolist():
        out = reference.model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(torch.log_softmax(out.logits[0, -1], -1)[token])
        step = torch.tensor([[token]])
    return torch.stack(found)


@torch.no_grad()
def deltas_leave_what_a_whole_version_does(engine: VllmSampler, policy: Any, base: Snapshot) -> bool:
    """Twenty versions as deltas, then the last one whole: every parameter, derived ones too, has to be the same."""
    last = base
    for version in range(RELOADS, RELOADS + 20):
        for parameter in policy.parameters():
            # Matrices change everywhere or in a few places of a few rows; so do embeddings, which are the head's too.
            few = version % 2 and parameter.ndim == 2
            changed = parameter[[3, 17, 30], 5:25] if few else parameter
            changed = changed + torch.randn(changed.shape) * 1e-4 * version
            if few:
                parameter[[3, 17, 30], 5:25] = changed
            else:
                parameter.copy_(changed)
        now = snapshot(policy.named_parameters(), base.scheme, version, statistics(policy, 3.0 + version // 2))
        engine.commit(engine.stage(delta.open_delta(delta.encode(last, now))))
        last = now

    def held() -> dict[str, bytes]:
        parameters = on_model(engine, lambda m: {n: own_digest(n, p.data.clone()) for n, p in m.named_parameters()})
        x = torch.eye(CONFIG.hidden_size)
        logits = on_model(engine, lambda m: m.lm_head.cpu_linear(x, m.lm_head.weight, None))
        return parameters | {"head's product": logits.numpy().tobytes()}

    after, scores = held(), engine.score([tuple(range(3, 60))])
    engine.install(last)
    return after == held() and engine.digest() == last.digest and scores == engine.score([tuple(range(3, 60))])


@torch.no_grad()
def two_tensors_of_a_module_are_staged() -> bool:
    """One changes in a few places, the other throughout, in both orders; what is written is what was published."""
    found = []
    for sparse, dense in (("norm.weight", "norm.bias"), ("norm.bias", "norm.weight")):
        served = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(64)})
        scheme = Scheme.preset("bf16")
        old = snapshot(served.named_parameters(), scheme, 0)
        moved = {name: tensor.clone() for name, tensor in served.named_parameters()}
        moved[sparse][5] += 1
        moved[dense] += torch.rand(64) + 1
        new = snapshot(moved.items(), scheme, 1)
        steps = list(prepare(served, delta.open_delta(delta.encode(old, new))))
        digests = {name: digest for _, own in steps for name, digest in own.items()}
        for writes, _ in steps:
            for write in writes:
                write.apply()
        found.append(digests == {name: own_digest(name, tensor) for name, tensor in new.tensors.items()})
        found.append(snapshot(served.named_parameters(), scheme, 1).digest == new.digest)
    return all(found)


@torch.no_grad()
def an_embedding_that_is_the_head_follows() -> bool:
    """In a model without a head of its own, whole versions and deltas reach what the logits are computed with."""
    with set_current_vllm_config(VllmConfig()):
        embedding: Any = VocabParallelEmbedding(64, 32, params_dtype=torch.float32)
    embedding.weight.data.zero_()
    embedding.quant_method.process_weights_after_loading(embedding)
    served, scheme = torch.nn.ModuleDict({"embed_tokens": embedding}), Scheme.preset("bf16")
    repack(served)
    x, found, last = torch.eye(32), [], None
    for version in range(3):
        weight = torch.randn(64, 32) if last is None else last.tensors["embed_tokens.weight"].float()
        weight[version, version] += 1
        now = snapshot([("embed_tokens.weight", weight)], scheme, version)
        change = now if last is None else delta.open_delta(delta.encode(last, now))
        for writes, _ in prepare(served, change):
            for write in writes:
                write.apply()
        expected = now.tensors["embed_tokens.weight"].float()
        product: Any = embedding.cpu_linear
        found += [
            torch.equal(embedding.weight.data, expected),
            torch.equal(product(x, embedding.weight, None), expected.T),
        ]
        last = now
    return heads(served) == [embedding] and all(found)


@torch.no_grad()
def touched_modules_are_whole(engine: VllmSampler, snaps: list[Snapshot]) -> bool:
    """Both shards of a fused layer, of which one changes, and nothing else."""
    old, up = snaps[0], "model.layers.1.mlp.up_proj."
    tensors = {name: t.flip(0) if name.startswith(up) else t for name, t in old.tensors.items()}
    new = Snapshot(tensors, 1, old.scheme, tensor_digest(tensors))
    engine.install(old)
    found = on_model(engine, partial(touched, version=delta.open_delta(delta.encode(old, new))))
    fused = [name for name in tensors if name.startswith((up, up.replace("up", "gate")))]
    return sorted(found) == sorted(fused) and all(torch.equal(found[name], tensors[name]) for name in found)


@torch.no_grad()
def heads_multiply_alike(engine: VllmSampler) -> bool:
    """The head's product is what vLLM would have packed, bit for bit."""

    def check(model: Any) -> bool:
        head, stand_in = model.lm_head, torch.nn.Module()
        stand_in.weight = torch.nn.Parameter(head.weight.data, requires_grad=False)
        head.quant_method.process_weights_after_loading(stand_in)
        x = torch.randn(5, CONFIG.hidden_size)
        ours: Any = head.cpu_linear
        theirs: Any = stand_in.cpu_linear
        return torch.equal(ours(x, head.weight, None), theirs(x, head.weight, None))

    return on_model(engine, check)


def refuses_an_outdated_stage(engine: VllmSampler, snaps: list[Snapshot]) -> bool:
    """What was prepared beside one version must not be written over another."""
    outdated = engine.stage(snaps[0])
    engine.install(snaps[1])
    try:
        engine.commit(outdated)
    except SnapshotError:
        return engine.version == snaps[1].version and engine.digest() == snaps[1].digest
    return False


def main() -> None:
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    scheme = Scheme.preset(sys.argv[1], **options)
    policies = [model(seed) for seed in range(2)]
    engine = VllmSampler(CONFIG.to_dict(), scheme=scheme, options=EngineOptions(max_model_len=64))
    snaps = [snapshot(p.named_parameters(), scheme, v, statistics(p)) for v, p in enumerate(policies)]
    digests = []
    for reload in range(RELOADS):
        digests.append(engine.install(snaps[reload % 2]).digest == snaps[reload % 2].digest)
    version = (RELOADS - 1) % 2
    requests = [Request(tuple(range(3 + i, 9 + i)), 4, 100 * i) for i in range(8)]
    # One scale for all tokens of a batch makes a completion depend on the others, so they are sampled one by one.
    batches = [[Request(r.prompt_ids, 1, r.seed)] for r in requests] if couples_batch(scheme) else [requests]
    rollouts = [r for batch in batches for r in engine.generate(batch, Sampling(1.0, 24, (1,)), version)]
    reference = TransformersSampler(CONFIG.to_dict(), scheme=scheme)
    reference.install(snaps[version])
    score = stepwise_score if couples_batch(scheme) else TransformersSampler.score
    gaps = torch.cat([(score(reference, r) - torch.tensor(r.logprobs)).abs() for r in rollouts])
    plain = TransformersSampler(CONFIG.to_dict(), scheme=Scheme.preset("bf16"))
    plain.install(snapshot(policies[version].named_parameters(), plain.scheme, version))
    deltas = deltas_leave_what_a_whole_version_does(engine, policies[version], snaps[version])
    staged = two_tensors_of_a_module_are_staged() and heads_multiply_alike(engine)
    staged = staged and an_embedding_that_is_the_head_follows()
    staged = staged and touched_modules_are_whole(engine, snaps)
    kl = torch.cat([torch.tensor(r.logprobs) - plain.score(r) for r in rollouts])
    print(
        json.dumps(
            {
                "digests": digests,
                "deltas": deltas,
                "staged": staged,
                "outdated": refuses_an_outdated_stage(engine, snaps),
                "tokens": len(gaps),
                "gap_mean": float(gaps.mean()),
                "gap_median": float(gaps.median()),
                "gap_max": float(gaps.max()),
                "k1": float(kl.mean()),
                "changed": float(kl.abs().mean()),
            }
        )
    )


if __name__ == "__main__":
    main()
