"""Serves a checkpoint directory with vLLM alone, no plugin of rlq.

    python own_loader_worker.py DIR [DTYPE]

Prints tokens, log-probs, schemes, and the kernels that the layers hold.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from samplers.vllm.kernel_plan import running_kernels

    dtype: Any = sys.argv[2] if len(sys.argv) > 2 else "float32"
    llm = LLM(
        model=sys.argv[1], dtype=dtype, enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_model_len=32,
        max_num_seqs=16, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    prompts = [[3 + (i * k) % 10 for k in range(1, 7)] + [44] for i in range(1, 17)]
    params = SamplingParams(max_tokens=7, temperature=1.0, seed=0, logprobs=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (sample,) = output.outputs
        assert sample.logprobs is not None
        steps: list = list(sample.logprobs)
        found = [step[token].logprob for token, step in zip(sample.token_ids, steps, strict=True)]
        rows.append({"prompt": prompt, "tokens": list(sample.token_ids), "logprobs": found})
    schemes = llm.apply_model(lambda m: sorted({type(x.scheme).__name__ for x in m.modules() if hasattr(x, "scheme")}))
    kernels = llm.apply_model(running_kernels)
    print(json.dumps({"rows": rows, "schemes": schemes[0], "kernels": kernels[0]}), flush=True)


if __name__ == "__main__":
    main()
