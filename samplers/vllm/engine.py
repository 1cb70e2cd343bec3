"""One vLLM engine behind the `Sampler` protocol: install published weights, sample token ids with their log-probs."""

import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlq.emulate.probe import ScoreCheck
from rlq.errors import ConfigError, SamplerError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, delta
from rlq.types import InstallReport, Request, Rollout, Sampling
from rlq.weights.canonical import check_finite
from rlq.weights.compressed_tensors import RLQ_METHOD, quantization_config

from ..options import EngineOptions

if TYPE_CHECKING:  # vLLM reads its environment when it is imported
    from .install import Switch

# Tokens per KV block on a CPU. Only whole blocks are shared, and looking for them costs a third of a tiny model's time,
# so engines whose context holds less than two of them do without.
KV_BLOCK = 128
# Read by vLLM and torch when they are imported, so they are set before.
CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process instead of three, and weights need no second transport
    "TORCHDYNAMO_DISABLE": "1",  # the first request would otherwise compile a kernel for seconds
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several ranks would all be bound to the same cores
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # an engine gets its configuration and weights from the learner, never from a hub
}


@dataclass(frozen=True)
class Staged:
    """A version that an engine has checked and can switch to."""

    version: int
    digest: str
    commits: int
    """Switches that the engine had made when this was prepared; it is worth nothing after another one."""
    switch: "Switch"


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

        from . import kernel_plan, plugin
        from .install import installer_for

        plugin.register()
        reason = ""
        if options.arithmetic == "auto":
            chosen, reason = _arithmetic(scheme, options)
            options = replace(options, arithmetic=chosen)
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
                tensor_parallel_size=options.tensor_parallel,
                distributed_executor_backend="mp" if options.tensor_parallel > 1 else None,
            )
        self.proof: dict[str, float] = {}
        self._digest = ""  # of the served version
        self._commits = 0
        self._interrupted: int | None = None  # version whose sampling ends early
        line = kernel_plan.describe(self.llm.apply_model(kernel_plan.running_kernels)[0], scheme)
        self.runs = f"{line}; {reason}" if reason else line
        self.installer = installer_for(self.llm, options.tensor_parallel)
        # Calls to several processes must not cross; in one process reading back runs beside requests.
        self._alone = Lock() if options.tensor_parallel > 1 else nullcontext()

    def ship(self, snap: Snapshot) -> None:
        """Nothing to send in one process."""

    def install(self, snap: Snapshot, probe: ScoreCheck | None = None) -> InstallReport:
        """Serve `snap`: `stage`, `commit`, the tensors read back, and the probe scored.

        Raises:
            SnapshotError: the snapshot does not fit; the engine still serves the previous version.
            SamplerError: the switch itself failed; the engine is unusable and must be rebuilt.
        """
        start = time.perf_counter()
        report = self.commit(self.stage(snap))
        found = self.digest()
        if found != snap.digest:
            self.broken = f"version {snap.version} reads back as {found[:12]}, not {snap.digest[:12]}"
            self._require_usable()
        self.proof = {"sync/proven_samplers": 1.0}
        if probe is not None:
            self.proof["sync/canary_nats"] = probe.check(self.score(probe.prompts))
        return replace(report, install_s=time.perf_counter() - start)

    def stage(self, version: Snapshot | delta.Delta) -> Staged:
        """Check a version and prepare the switch to it; may run in another thread while the engine generates.

        Everything that can be checked is checked here, before the engine is touched.

        Raises:
            SnapshotError: it does not fit, is damaged, or is a delta to another version than the served one.
            SamplerError: the engine is unusable.
        """
        self._require_usable()
        if isinstance(version, Snapshot):
            check_finite({n: t for n, t in version.tensors.items() if t.dtype in (torch.bfloat16, torch.float32)})
            info = version
        else:
            version.check_base(self.version, self._digest)
            info = version.info
        if info.scheme != self.scheme:
            raise SnapshotError(
                f"version {info.version} is '{info.scheme}', this sampler serves '{self.scheme}'; start one per scheme"
            )
        return Staged(info.version, info.digest, self._commits, self.installer.stage(version))

    def commit(self, staged: Staged) -> InstallReport:
        """Switch to a staged version: the engine stands still from here to the end, and no longer.

        Raises:
            SnapshotError: another version was committed since this one was staged.
            SamplerError: the switch failed half-way; the engine is unusable and must be rebuilt.
        """
        self._require_usable()
        if staged.commits != self._commits:
            raise SnapshotError(f"version {staged.version} was staged before the last switch; stage it again")
        start = time.perf_counter()
        self.broken = f"a switch to version {staged.version} did not finish"
        self.version = None
        self._interrupted = None
        self._commits += 1
        with self._alone:
            staged.switch()
        if not self.llm.reset_prefix_cache():
            raise SamplerError("vLLM refused to reset its prefix cache; finish running requests before an install")
        self.version = staged.version
        self.broken = None
        self._digest = staged.digest
        seconds = time.perf_counter() - start
        return InstallReport(
            staged.version, staged.digest, self.installer.count, ship_s=0.0, install_s=seconds, pause_s=seconds
        )

    def change_scheme(self, scheme: Scheme) -> None:
        """An engine serves one scheme for life; a pool replaces its engines."""
        raise SamplerError(f"a single engine cannot change to {scheme.name!r}; use a SamplerPool")

    def digest(self) -> str:
        """Digest of the tensors that the engine holds now."""
        with self._alone:
            return self.installer.digest()

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
        rollouts = []
        with self._alone:
            outputs = self._finished(prompts, params, version)
        for index, output in sorted(outputs.items()):
            for sample in sorted(output.outputs, key=lambda o: o.index):
                rollouts.append(self._rollout(requests[index], sample, sampling, version))
        return rollouts

    def _finished(self, prompts: list, params: list, version: int) -> dict[int, Any]:
        """`LLM.generate`, which can be interrupted: a request's place to its output, once all its samples are there."""
        ids = self.llm.enqueue(prompts, params, use_tqdm=False)
        first, engine = int(ids[0].split("-")[0]), self.llm.llm_engine
        finished = {}
        while engine.has_unfinished_requests():
            if self._interrupted == version:
                engine.abort_request(ids, internal=True)  # those that are finished are not known any more
                break
            found = [output for output in engine.step() if output.finished]
            finished |= {int(output.request_id) - first: output for output in found}
        return finished

    def interrupt(self, version: int) -> None:
        """See `rlq.types.Sampler`."""
        self._interrupted = version

    def score(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Log-probs in nats, at temperature 1, of every token of each prompt but its first; see `rlq.emulate.probe`."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self._require_usable()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        with self._alone:
            outputs = self.llm.generate(inputs, params, use_tqdm=False)
        scores = []
        for prompt, output in zip(prompts, outputs, strict=True):
            found: Any = output.prompt_logprobs  # one dict per token, None for the first
            scores.append(tuple(at[token].logprob for token, at in zip(prompt[1:], found[1:], strict=True)))
        return scores

    def _rollout(self, request: Request, sample, sampling: Sampling, version: int) -> Rollout:
        token_ids = list(sample.token_ids)
        if sample.logprobs.token_ids != token_ids:
            raise SamplerError(
                "the engine's log-probs belong to other tokens than it sampled; this vLLM is not supported"
            )
        return Rollout(
            prompt_ids=request.prompt_ids,
            token_ids=np.array(token_ids, np.int64),
            logprobs=np.array(sample.logprobs.logprobs, np.float32),  # as vLLM computed them
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
        self.installer.close()
        if self.options.tensor_parallel > 1:
            self.llm.llm_engine.engine_core.shutdown()  # its processes, and what they share
        del self.llm


def _arithmetic(scheme: Scheme, options: EngineOptions) -> tuple[str, str]:
    """What `auto` stands for, and why; vLLM's kernels multiply 16-bit inputs."""
    from .kernel_plan import arithmetic

    if options.dtype == "float32":
        return "emulated", "vLLM's kernels need a sampler_dtype of 16 bits"
    return arithmetic(scheme, torch.cuda.get_device_capability() if torch.cuda.is_available() else None)


def _method_config(scheme: Scheme, options: EngineOptions) -> dict:
    if options.arithmetic == "kernel" and scheme.weights is not None:
        return quantization_config(scheme, scheme.ignore)
    return {"quant_method": RLQ_METHOD, "scheme": scheme.to_dict()}
