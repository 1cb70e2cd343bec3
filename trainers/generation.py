"""The generation seam: an object with the two methods that GRPOTrainer calls on its vLLM client.

Axes: B completions on this rank, T completion tokens, R completions on all ranks.
"""

import hashlib
import time
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list, gather_object

from rlq.errors import RlqError, SamplerError
from rlq.publish import snapshot
from rlq.types import Request, Rollout, Sampler, Sampling

if TYPE_CHECKING:
    from .grpo import QuantGRPOTrainer


class SamplerGeneration:
    """Publishes the learner's weights to `samplers` and samples from them.

    All ranks enter both methods; rank 0 alone owns the samplers, so that they see one batch and one version.

    Args:
        trainer: the trainer that calls.
        samplers: an engine or a pool; None on ranks other than 0.
    """

    def __init__(self, trainer: "QuantGRPOTrainer", samplers: Sampler | None):
        self.trainer = trainer
        self.samplers = samplers
        self.version: int | None = None
        # Generate calls at this version, training and evaluation apart; part of the seeds. Apart, because an evaluation
        # between two steps is not repeated when a run resumes there.
        self.calls: Counter[bool] = Counter()

    @property
    def _is_main(self) -> bool:
        return self.trainer.accelerator.is_main_process

    def sync_weights(self) -> None:
        """Publish the learner's current weights as version `state.global_step`."""
        version = self.trainer.state.global_step
        named = self._named_tensors()
        self._on_main(lambda: self._publish(named, version))
        self.version, self.calls = version, Counter()

    def _named_tensors(self):
        accelerator = self.trainer.accelerator
        model = accelerator.unwrap_model(self.trainer.model)
        if accelerator.num_processes == 1:
            return model.named_parameters()
        state = accelerator.get_state_dict(self.trainer.model)  # collective: gathers shards
        tied = set(getattr(model, "all_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
        return [(name, tensor) for name, tensor in state.items() if name not in tied]

    def _publish(self, named, version: int) -> None:
        start = time.perf_counter()
        assert self.samplers is not None
        snap = snapshot(named, self.samplers.scheme, version)
        quantize_s = time.perf_counter() - start
        report = self.samplers.install(snap)
        if report.digest != snap.digest:
            raise SamplerError(
                f"version {version} was published as {snap.digest[:12]} and reads back as {report.digest[:12]}"
            )
        self.trainer.log_rlq(
            {
                "sync/bytes": float(snap.nbytes),
                "sync/quantize_s": quantize_s,
                "sync/ship_s": report.ship_s,
                "sync/install_s": report.install_s,
                "sync/pause_s": report.pause_s,
            }
        )

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Sample one completion per entry of `prompts`, in which each prompt stands `num_generations` times in a row.

        Returns:
            Prompt ids [B][P], completion ids [B][T], sampler log-probs [B][T][1] and their token ids [B][T][1].
        """
        if images is not None:
            raise SamplerError("image prompts are not supported by rlq's samplers; train on text")
        rank, size = self.trainer.accelerator.process_index, len(prompts)
        everyone = gather_object(prompts)  # [R] prompts in rank order
        rollouts = self._on_main(lambda: self._sample(everyone))[rank * size : (rank + 1) * size]
        self.calls[self.trainer.in_training] += 1
        return (
            [list(r.prompt_ids) for r in rollouts],
            [list(r.token_ids) for r in rollouts],
            [[[value] for value in r.logprobs] for r in rollouts],
            [[[token] for token in r.token_ids] for r in rollouts],
        )

    def _sample(self, prompts: list[list[int]]) -> list[Rollout]:
        trainer, version = self.trainer, self.version
        assert self.samplers is not None
        assert version is not None
        training = trainer.in_training
        base = request_seed(trainer.args.seed, version, self.calls[training], training=training)
        requests = group_requests(prompts, base)
        sampling = Sampling(trainer.args.temperature, trainer.completion_limit, trainer.stop_token_ids)
        start = time.perf_counter()
        rollouts = self.samplers.generate(requests, sampling, version)
        seconds = time.perf_counter() - start
        check_rollouts(rollouts, prompts, version, self.samplers.scheme.name, sampling.temperature)
        tokens = sum(len(r.token_ids) for r in rollouts)
        trainer.log_rlq({"rollout/tokens_per_s": tokens / seconds, "time/generate_s": seconds})
        return rollouts

    def _on_main(self, work) -> Any:
        """Run `work` on rank 0; hand its result, or its rlq error, to every rank, so that no rank is left waiting."""
        if self.trainer.accelerator.num_processes == 1:
            return work()
        payload: list[Any] = [None]
        if self._is_main:
            try:
                payload = [work()]
            except RlqError as error:
                payload = [error]
        broadcast_object_list(payload)
        if isinstance(payload[0], RlqError):
            raise payload[0]
        return payload[0]


def request_seed(run_seed: int, version: int, call: int, *, training: bool) -> int:
    """Base of a batch's seeds, below 2^62: a hash, so that runs, steps, calls and evaluation never share a stream."""
    text = f"{run_seed} {version} {call} {'train' if training else 'eval'}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def group_requests(prompts: list[list[int]], base: int) -> list[Request]:
    """One request per run of equal prompts. Sample j of the batch, counted over all of it, gets seed `base + j`."""
    requests, position = [], 0
    for prompt, run in groupby(prompts):
        count = len(list(run))
        requests.append(Request(tuple(prompt), count, base + position))
        position += count
    return requests


def check_rollouts(
    rollouts: list[Rollout], prompts: list[list[int]], version: int, scheme: str, temperature: float
) -> None:
    """Let nothing into the loss that is missing, answers another prompt, or comes from another version or scheme."""
    if len(rollouts) != len(prompts):
        raise SamplerError(
            f"{len(prompts)} completions were requested, {len(rollouts)} came back; groups are all or nothing"
        )
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        if list(rollout.prompt_ids) != list(prompt):
            raise SamplerError(
                "a rollout answers another prompt than the one at its place; the sampler must keep the order"
            )
        if rollout.temperature != temperature:
            raise SamplerError(f"a rollout was sampled at temperature {rollout.temperature}, expected {temperature}")
        if (rollout.version, rollout.scheme) != (version, scheme):
            raise SamplerError(
                f"a rollout comes from version {rollout.version} ({rollout.scheme}), expected {version} ({scheme}); "
                "stale rollouts never reach the loss"
            )
