"""A tensor-parallel vLLM engine of two ranks: every version is served bit for bit, and samples what one rank samples.

    python sharded_worker.py SCHEME [OPTIONS_JSON]

Prints one JSON object.
"""

import json
import sys
from dataclasses import replace

import torch
from emulation_worker import model, statistics
from transformers import LlamaConfig

from rlq.errors import SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import delta, snapshot, tensor_digest
from rlq.types import Request, Sampling
from samplers.options import EngineOptions
from samplers.testing.reference import TransformersSampler
from samplers.vllm.engine import VllmSampler

# One head of keys for two ranks, so that both hold it, and a vocabulary that is not divisible.
CONFIG = LlamaConfig(
    vocab_size=73,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
SAMPLING = Sampling(1.0, 16, (1,))
REQUESTS = [Request(tuple(range(3 + i, 9 + i)), 4, 100 * i) for i in range(8)]


def refused(engine: VllmSampler, version) -> str:
    try:
        engine.stage(version)
    except SnapshotError as error:
        return str(error)
    return ""


def spoil(model: torch.nn.Module) -> None:
    """Flip one bit of what the last rank holds; runs there."""
    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() == 1:
        module = model.model.layers[1].mlp.down_proj  # type: ignore[union-attr]
        name = "weight_packed" if hasattr(module, "weight_packed") else "weight"
        module.get_parameter(name).data.view(torch.uint8).view(-1)[5] ^= 1


def main() -> None:
    scheme = Scheme.preset(sys.argv[1], **(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
    policies = [model(seed, CONFIG) for seed in range(2)]
    engine = VllmSampler(CONFIG.to_dict(), scheme=scheme, options=EngineOptions(max_model_len=64, tensor_parallel=2))
    snaps = [snapshot(p.named_parameters(), scheme, v, statistics(p)) for v, p in enumerate(policies)]
    digests = [engine.install(snaps[i % 2]).digest == snaps[i % 2].digest == engine.digest() for i in range(4)]
    rollouts = engine.generate(REQUESTS, SAMPLING, 1)
    reference = TransformersSampler(CONFIG.to_dict(), scheme=scheme)
    reference.install(snaps[1])
    gaps = torch.cat([(reference.score(r) - torch.tensor(r.logprobs)).abs() for r in rollouts])
    short = {name: t[:-1] if name.endswith("embed_tokens.weight") else t for name, t in snaps[0].tensors.items()}
    errors = [
        refused(engine, replace(snaps[0], tensors={n: t for n, t in snaps[0].tensors.items() if "o_proj" not in n})),
        refused(engine, replace(snaps[0], tensors=short, digest=tensor_digest(short))),
        refused(engine, delta.open_delta(delta.encode(snaps[0], snaps[1]))),
    ]
    for old, new in (snaps[::-1], snaps):  # there and back
        engine.commit(engine.stage(delta.open_delta(delta.encode(old, new))))
        digests.append(engine.digest() == new.digest)
    still = engine.generate(REQUESTS, SAMPLING, 1) == rollouts
    engine.llm.apply_model(spoil)
    print(
        json.dumps(
            {
                "digests": digests,
                "tokens": len(gaps),
                "gap_median": float(gaps.median()),
                "gap_mean": float(gaps.mean()),
                "errors": errors,
                "still": still,
                "spoiled": engine.digest(),
            }
        )
    )
    engine.close()


if __name__ == "__main__":
    main()
