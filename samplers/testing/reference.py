"""A transformers sampler with the same arithmetic: slow, readable, the parity reference of the vLLM engine."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlq.emulate.model import emulate, load_snapshot
from rlq.emulate.probe import ScoreCheck, teacher_forced
from rlq.emulate.scores import log_distribution, token_logprobs
from rlq.errors import SamplerError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot, check_specs, snapshot
from rlq.recipes.statistics import Statistics
from rlq.types import InstallReport, Request, Rollout, Sampling
from rlq.weights.hooks import attentions, linears


class TransformersSampler:
    """Samples with a transformers model in fp32, one completion after the other; scores with the same weights.

    Args:
        model_config: `config.json` of the learner's model, as a dict.
        scheme: model scheme.
    """

    def __init__(self, model_config: dict, scheme: Scheme):
        self.config = CONFIG_MAPPING[model_config["model_type"]].from_dict(
            {k: v for k, v in model_config.items() if k != "quantization_config"}
        )
        self.change_scheme(scheme)

    def change_scheme(self, scheme: Scheme) -> None:
        """Build the model anew for `scheme`; it serves nothing until the next install."""
        self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval().requires_grad_(False)
        self.scheme = scheme
        self.proof: dict[str, float] = {}
        self.version: int | None = None
        self._interrupted: int | None = None
        # Only names and shapes matter here, so any calibration does, and no recipe changes them.
        statistics = Statistics(
            dict.fromkeys(linears(self.model), 1.0), dict.fromkeys(attentions(self.model), (1.0, 1.0))
        )
        self.specs = snapshot(self.model.named_parameters(), replace(scheme, recipe=()), 0, statistics).specs
        emulate(self.model, scheme)

    def ship(self, snap: Snapshot) -> None:
        """Nothing to send in one process."""

    @torch.no_grad()
    def install(self, snap: Snapshot, probe: ScoreCheck | None = None) -> InstallReport:
        """Serve `snap`; see `rlq.types.Sampler`."""
        if snap.scheme != self.scheme:
            raise SnapshotError(
                f"snapshot is '{snap.scheme}', this sampler serves '{self.scheme}'; start one per scheme"
            )
        check_specs(snap.specs, self.specs)
        start = time.perf_counter()
        load_snapshot(self.model, snap)
        self.version, self._interrupted = snap.version, None
        self.proof = (
            {} if probe is None else {"sync/canary_nats": probe.check(teacher_forced(self.model, probe.prompts))}
        )
        seconds = time.perf_counter() - start
        return InstallReport(
            snap.version, snap.digest, len(snap.tensors), ship_s=0.0, install_s=seconds, pause_s=seconds
        )

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Rollout]:
        """Sample; see `rlq.types.Sampler`."""
        if self.version != version:
            raise SamplerError(
                f"asked for version {version}, serving {self.version}; install the current snapshot first"
            )
        rollouts: list[Rollout] = []
        for request in requests:
            if self._interrupted == version:
                break
            rollouts += [self._sample(request, sampling, request.seed + i) for i in range(request.num_samples)]
        return rollouts

    def interrupt(self, version: int) -> None:
        """See `rlq.types.Sampler`; takes effect between two requests."""
        self._interrupted = version

    def _sample(self, request: Request, sampling: Sampling, seed: int) -> Rollout:
        generator = torch.Generator().manual_seed(seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        step_input, cache = torch.tensor([request.prompt_ids]), None
        while len(tokens) < sampling.max_tokens and (not tokens or tokens[-1] not in sampling.stop_token_ids):
            out = self.model(input_ids=step_input, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            log_p = log_distribution(out.logits[0, -1], sampling.temperature)
            token = int(torch.multinomial(log_p.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(log_p[token]))
            step_input = torch.tensor([[token]])
        reason = "stop" if tokens[-1] in sampling.stop_token_ids else "length"
        assert self.version is not None
        return Rollout(
            request.prompt_ids,
            np.array(tokens, np.int64),
            np.array(logprobs, np.float32),
            reason,
            self.version,
            self.scheme.name,
            sampling.temperature,
            seed,
        )

    @torch.no_grad()
    def score(self, rollout: Rollout) -> torch.Tensor:
        """Log-probs (T,) in nats of a rollout's tokens under the served weights, teacher-forced."""
        ids = torch.tensor([*rollout.prompt_ids, *rollout.token_ids.tolist()])[None]
        start = len(rollout.prompt_ids) - 1
        logits = self.model(input_ids=ids).logits[0, start:-1]
        return token_logprobs(logits, ids[0, start + 1 :], rollout.temperature)

    def close(self) -> None:
        """Nothing to release."""
