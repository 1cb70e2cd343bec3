"""The generation seam: an object with the two methods that GRPOTrainer calls on its vLLM client.

Installs and generate calls run one after the other on a thread of their own, in the order in which they were asked for.
With `async_steps: 0` the trainer waits for each of them. With k > 0 the prompts of the next k generation batches are
handed over right after an install, and a batch is taken when training reaches it: k generations old, and no older.
With `async_in_flight: abort` a new version does not wait for the batches before it: what is not complete by then is
sampled again, by the new version.

Axes: B completions on this rank, T completion tokens, R completions on all ranks.
"""

import hashlib
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from accelerate.utils import gather_object

from rlq.emulate.probe import ScoreCheck
from rlq.errors import SamplerError
from rlq.formats.schemes import Scheme
from rlq.types import Request, Rollout, Sampler, Sampling

from ..publish.publisher import Publisher, Shipped, Weights
from ..ranks import on_main
from ..view import Learner


@dataclass(eq=False)
class Batch:
    """What the samplers have been asked for, on rank 0, and what they have answered so far."""

    requests: list[Request]
    """One per prompt of all ranks."""
    sampling: Sampling
    answers: dict[int, list[Rollout]] = field(default_factory=dict)
    """Seed of a request to its completions, all of them and from one version."""
    seconds: float = 0.0
    """Spent sampling."""
    done: Future = field(default_factory=Future)
    """(rollouts of all ranks, seconds, what the samplers proved)."""

    def missing(self) -> list[Request]:
        """Requests without an answer."""
        return [request for request in self.requests if request.seed not in self.answers]


@dataclass(frozen=True)
class Ordered:
    """A batch that the samplers have been asked for."""

    prompts: list[list[int]]
    """Prompt ids of this rank, one entry per completion."""
    batch: Batch | None
    """None on ranks other than 0."""


class SamplerGeneration:
    """Publishes the learner's weights to `samplers` and samples from them.

    All ranks enter both methods; rank 0 alone owns the samplers, so that they see one batch and one version.

    Args:
        learner: whose weights, settings and prompts these are.
        samplers: an engine or a pool; None on ranks other than 0.
    """

    def __init__(self, learner: Learner, samplers: Sampler | None):
        self.learner = learner
        self.publisher = Publisher(learner, samplers)
        self.version: int | None = None
        """Version published last."""
        self.rollout_versions: list[int] = []
        """Versions that sampled the batch taken last, one per completion of all ranks, in rank order."""
        self.prompt_width = 0
        """Columns of prompts in the batch taken last, as TRL pads them."""
        # Calls since the last publish, counted per mode (a resumed run does not repeat an evaluation); feeds
        # `request_seed`.
        self.calls: Counter[bool] = Counter()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rlq-samplers")
        self._install: Future | None = None
        self._ahead: deque[Ordered] = deque()
        self._first = False
        # What follows belongs to the worker's thread.
        self._served = -1
        self._cut_short: list[Batch] = []  # to go on after the next install
        self._again: list[Batch] = []  # to go on now

    @property
    def _samplers(self) -> Sampler:
        assert self.publisher.samplers is not None, "rank 0 has samplers"
        return self.publisher.samplers

    def begin_batch(self) -> None:
        """The next call asks for the first turn of a generation batch that may have been asked for ahead."""
        self._first = True

    def sync_weights(self) -> None:
        """Publish the learner's current weights as version `state.global_step`."""
        weights = self.publisher.collect()
        on_main(self.learner.accelerator, lambda: self._publish(weights))
        self.version, self.calls = weights.version, Counter()

    def _publish(self, weights: Weights) -> None:
        """Quantize now, while the learner stands still; install behind what the samplers are busy with."""
        self._finish_install()  # one version under way bounds what is held in memory
        shipped = self.publisher.ship(weights)
        if self._aborts and self.version not in (None, weights.version):
            self._samplers.interrupt(self.version)
        self._install = self._worker.submit(self._installed, shipped, self.publisher.canary.probe(shipped.snap))
        if not self.learner.args.async_steps:
            self._finish_install()

    def _installed(self, shipped: Shipped, probe: ScoreCheck | None) -> dict[str, float]:
        try:
            metrics = self.publisher.install(shipped, probe)
        except Exception as error:
            for batch in self._cut_short:  # the learner may be waiting for them
                batch.done.set_exception(error)
            raise
        self._served = shipped.snap.version
        self._again, self._cut_short = self._again + self._cut_short, []
        if self._again:
            self._worker.submit(self._sample_rest)
        return metrics

    def _finish_install(self) -> None:
        if self._install is not None:
            install, self._install = self._install, None
            self.learner.log_rlq(install.result())

    def change_scheme(self, scheme: Scheme) -> None:
        """Serve another scheme from the next publish on; batches that were asked for before keep theirs."""
        if self.publisher.samplers is not None:
            self._worker.submit(self._samplers.change_scheme, scheme).result()

    def close(self) -> None:
        """Forget what was asked for ahead; waits for what is being sampled, so that the samplers can be closed."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self.publisher.canary.close()

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Sample one completion per entry of `prompts`, in which each prompt stands `num_generations` times in a row.

        Returns:
            Prompt ids [B][P], completion ids [B][T], sampler log-probs [B][T][1] and their token ids [B][T][1].
        """
        if images is not None:
            raise SamplerError("image prompts are not supported by rlq's samplers; train on text")
        # The first batch of an epoch, evaluations and the later turns of a conversation are sampled now.
        first, self._first = self._first, False
        taken = self._ahead.popleft() if first and self._ahead else self._order(prompts)
        if taken.prompts != prompts:
            raise SamplerError("TRL asks for other prompts than it announced; set async_steps to 0 and report this")
        if first:
            for upcoming in self.learner.upcoming_prompts()[len(self._ahead) :]:
                self._ahead.append(self._order(upcoming))
        rank, size = self.learner.accelerator.process_index, len(prompts)
        everyone = on_main(self.learner.accelerator, lambda: self._take(taken))
        rollouts = everyone[rank * size : (rank + 1) * size]
        self.rollout_versions, self.prompt_width = [r.version for r in everyone], max(map(len, prompts))
        return (
            [list(r.prompt_ids) for r in rollouts],
            [r.token_ids.tolist() for r in rollouts],
            [r.logprobs[:, None].tolist() for r in rollouts],
            [r.token_ids[:, None].tolist() for r in rollouts],
        )

    def _order(self, prompts: list[list[int]]) -> Ordered:
        """Ask the samplers for a batch, to be sampled by the version published last."""
        learner, version, training = self.learner, self.version, self.learner.in_training
        assert version is not None
        everyone = gather_object(prompts)  # [R] prompts in rank order
        base = request_seed(learner.args.seed, version, self.calls[training], training=training)
        self.calls[training] += 1
        sampling = Sampling(learner.args.temperature, learner.completion_limit, learner.stop_token_ids)
        if self.publisher.samplers is None:
            return Ordered(prompts, None)
        batch = Batch(group_requests(everyone, base), sampling)
        self._worker.submit(self._sample, batch)
        return Ordered(prompts, batch)

    @property
    def _aborts(self) -> bool:
        return self.learner.args.async_steps > 0 and self.learner.args.async_in_flight == "abort"

    def _sample(self, batch: Batch) -> None:
        self._sample_rest()  # it was asked for before
        self._sample_missing(batch)

    def _sample_rest(self) -> None:
        batches, self._again = self._again, []
        for batch in batches:
            self._sample_missing(batch)

    def _sample_missing(self, batch: Batch) -> None:
        """Ask the samplers for what has no answer yet; in `batch.done` once nothing is missing."""
        missing, version, start = batch.missing(), self._served, time.perf_counter()
        try:
            rollouts = self._samplers.generate(missing, batch.sampling, version)
            if self._aborts:
                seeds = {rollout.seed for rollout in rollouts}
                missing = [request for request in missing if request.seed in seeds]
            prompts = [list(request.prompt_ids) for request in missing for _ in range(request.num_samples)]
            check_rollouts(rollouts, prompts, version, self._samplers.scheme.name, batch.sampling.temperature)
        except Exception as error:  # raised again where the batch is waited for
            batch.done.set_exception(error)
            return
        batch.seconds += time.perf_counter() - start
        for request in missing:
            batch.answers[request.seed], rollouts = rollouts[: request.num_samples], rollouts[request.num_samples :]
        if batch.missing():
            self._cut_short.append(batch)
        else:
            everyone = [rollout for request in batch.requests for rollout in batch.answers[request.seed]]
            batch.done.set_result((everyone, batch.seconds, dict(self._samplers.proof)))

    def _take(self, ordered: Ordered) -> list[Rollout]:
        assert ordered.batch is not None
        start = time.perf_counter()
        if self._install is not None and self._install.done():
            self._finish_install()  # its error says more than that of the batch behind it
        rollouts, seconds, proof = ordered.batch.done.result()
        waited = time.perf_counter() - start
        self.publisher.canary.log(wait=not self.learner.args.async_steps)
        tokens = sum(len(r.token_ids) for r in rollouts)
        self.learner.log_rlq(
            {"rollout/tokens_per_s": tokens / seconds, "time/generate_s": seconds, "time/wait_s": waited} | proof
        )
        return rollouts


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
