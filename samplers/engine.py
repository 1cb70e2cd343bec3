"""One vLLM engine behind the `Sampler` protocol: install published weights, sample token ids with their log-probs."""

import functools
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from rlq import delta
from rlq.checkpoint import check_finite
from rlq.errors import ConfigError, SamplerError, SnapshotError
from rlq.interop import quantization_config
from rlq.publish import Snapshot, TensorSpec, check_specs, tensor_digest
from rlq.schemes import Scheme
from rlq.types import InstallReport, Request, Rollout, Sampling

from .options import EngineOptions

# Tokens per KV block on a CPU. Only whole blocks are shared, and looking for them costs a third of a tiny model's time,
# so engines whose context holds less than two of them do without.
KV_BLOCK = 128
# Read by vLLM and torch when they are imported, so they are set before.
CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process instead of three, and weights need no second transport
    "TORCHDYNAMO_DISABLE": "1",  # the first request would otherwise compile a kernel for seconds
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # an engine gets its configuration and weights from the learner, never from a hub
}


class VllmSampler:
    """A vLLM engine that starts empty, serves what was installed last, and refuses what it was not asked for.

    One per process: vLLM's CPU worker changes process-wide state. Requests and weights come through method calls; the
    model's files are not needed, only its configuration.

    Args:
        model_config: `config.json` of the learner's model, as a dict.
        options: engine settings.
        scheme: model scheme; snapshots of another one are refused.
    """

    def __init__(self, model_config: dict, options: EngineOptions, scheme: Scheme):
        os.environ.update({k: v for k, v in CPU_ENVIRONMENT.items() if k not in os.environ})
        # torch tells vLLM's custom operators that triton is missing, which on a CPU it always is.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
        from vllm import LLM

        from . import plugin, storage

        plugin.register()
        self.scheme = scheme
        self.options = options
        self.version: int | None = None
        self.broken: str | None = None
        with tempfile.TemporaryDirectory(prefix="rlq-model-") as directory:
            # The learner's quantization, if any, is not the sampler's.
            config = {k: v for k, v in model_config.items() if k != "quantization_config"}
            (Path(directory) / "config.json").write_text(json.dumps(config))
            self.llm = LLM(
                model=directory,
                load_format="dummy",
                skip_tokenizer_init=True,
                hf_overrides={"quantization_config": _method_config(scheme, options)},
                dtype=options.dtype,  # type: ignore[arg-type]  # a name that vLLM checks
                max_model_len=options.max_model_len,
                max_num_seqs=options.max_num_seqs,
                kv_cache_memory_bytes=options.kv_cache_bytes,
                enforce_eager=options.enforce_eager,
                enable_prefix_caching=options.max_model_len >= 2 * KV_BLOCK,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # the model's own sampling defaults must not leak into rollouts
                disable_log_stats=True,
            )
        self._digest = ""  # of the served version
        self._in_place: bool = self._on_model(storage.placeable)
        self.specs: dict[str, TensorSpec] = self._on_model(storage.expected_specs)

    def _on_model(self, function):
        return self.llm.apply_model(function)[0]

    def install(self, snap: Snapshot) -> InstallReport:
        """Replace the served weights by `snap`.

        Everything that can be checked is checked before the engine is touched. Then the tensors are written over the
        old ones where the engine's storage has the published layout, and loaded through vLLM's layer-wise reload
        elsewhere; the head is refreshed, the prefix cache is emptied and the tensors are read back.

        Raises:
            SnapshotError: the snapshot does not fit; the engine still serves the previous version.
            SamplerError: the reload itself failed; the engine is unusable and must be rebuilt.
        """
        if snap.scheme != self.scheme:
            raise SnapshotError(
                f"snapshot is {snap.scheme.name!r}, this sampler serves {self.scheme.name!r}; start one per scheme"
            )
        check_specs(snap.specs, self.specs)
        check_finite({n: t for n, t in snap.tensors.items() if t.dtype in (torch.bfloat16, torch.float32)})
        self._require_usable()
        return self._change(snap.version, snap.digest, snap.tensors.items(), len(snap.tensors))

    def update(self, blob: bytes) -> InstallReport:
        """Turn the served version into the next one by a delta, see `rlq.delta`; one tensor at a time.

        Raises:
            SnapshotError: the delta is damaged or has another base; the engine still serves the previous version.
            SamplerError: the result is not the published version; the engine is unusable and must be rebuilt.
        """
        from . import storage

        self._require_usable()
        info = delta.inspect(blob)
        if info.scheme != self.scheme:
            raise SnapshotError(f"delta is for {info.scheme.name!r}, this sampler serves {self.scheme.name!r}")
        known: dict[str, storage.Slot] = self._on_model(storage.slots)
        changes = delta.changes({name: slot.read for name, slot in known.items()}, self.version, self._digest, blob)
        if not self._in_place:
            held = {name: slot.read() for name, slot in known.items()}
            changes = iter((held | dict(changes)).items())
        return self._change(info.version, info.digest, changes, len(known))

    def _change(
        self, version: int, digest: str, tensors: Iterable[tuple[str, torch.Tensor]], count: int
    ) -> InstallReport:
        from . import storage

        start = time.perf_counter()
        self.broken = f"an install of version {version} did not finish"
        self.version = None
        if self._in_place:
            self._on_model(functools.partial(storage.place, tensors=tensors))
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
        self._on_model(_refresh_head)
        if not self.llm.reset_prefix_cache():
            raise SamplerError("vLLM refused to reset its prefix cache; finish running requests before an install")
        found = self.digest()
        if found != digest:
            raise SamplerError(f"version {version} reads back as {found[:12]}, not {digest[:12]}; rebuild the engine")
        self.version, self.broken, self._digest = version, None, digest
        seconds = time.perf_counter() - start
        return InstallReport(version, digest, count, ship_s=0.0, install_s=seconds, pause_s=seconds)

    def switch(self, scheme: Scheme) -> None:
        """An engine serves one scheme for life; a pool replaces its engines."""
        raise SamplerError(f"a single engine cannot switch to {scheme.name!r}; use a SamplerPool")

    def digest(self) -> str:
        """Digest of the tensors that the engine holds now."""
        from . import storage

        return tensor_digest(self._on_model(storage.wire_tensors))

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Rollout]:
        """Sample; see `rlq.types.Sampler`.

        Raises:
            SamplerError: another version than `version` is served, or the engine returned something unusable.
            ConfigError: a prompt leaves no room in the engine's context.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._require_usable()
        if self.version != version:
            raise SamplerError(
                f"asked for version {version}, serving {self.version}; install the current snapshot first"
            )
        longest = max(len(request.prompt_ids) for request in requests)
        if longest >= self.options.max_model_len:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room in a context of {self.options.max_model_len}; "
                "raise sampler_max_model_len or shorten the prompt"
            )
        params = [
            SamplingParams(
                n=request.num_samples,
                seed=request.seed,
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for request in requests
        ]
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        rollouts = []
        for request, output in zip(requests, outputs, strict=True):
            for sample in sorted(output.outputs, key=lambda o: o.index):
                rollouts.append(self._rollout(request, sample, sampling, version))
        return rollouts

    def _rollout(self, request: Request, sample, sampling: Sampling, version: int) -> Rollout:
        token_ids = tuple(sample.token_ids)
        if tuple(sample.logprobs.token_ids) != token_ids:
            raise SamplerError(
                "the engine's log-probs belong to other tokens than it sampled; this vLLM is not supported"
            )
        return Rollout(
            prompt_ids=request.prompt_ids,
            token_ids=token_ids,
            logprobs=tuple(sample.logprobs.logprobs),
            finish_reason=sample.finish_reason,
            version=version,
            scheme=self.scheme.name,
            temperature=sampling.temperature,
            seed=request.seed + sample.index,
        )

    def _require_usable(self) -> None:
        if self.broken is not None:
            raise SamplerError(f"this engine is unusable ({self.broken}); rebuild the actor")

    def close(self) -> None:
        """Drop the engine; its process should end afterwards."""
        del self.llm


def _method_config(scheme: Scheme, options: EngineOptions) -> dict:
    if options.arithmetic == "kernel" and scheme.weights is not None:
        return quantization_config(scheme, scheme.ignore)
    return {"quant_method": "rlq", "scheme": scheme.to_dict()}


def _refresh_head(model: torch.nn.Module) -> None:
    """Re-run the head's post-processing: on a CPU a head computes with a packed copy, which goes stale."""
    head = getattr(model, "lm_head", None)
    if head is not None and next(model.parameters()).device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)
