"""The canary's reference: fixed prompts of the training set, scored by the learner as it was published."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from rlq.emulate.model import load_snapshot
from rlq.emulate.probe import Probe, teacher_forced
from rlq.formats.schemes import Scheme
from rlq.publish import Snapshot

from ..twin import empty_twin
from ..view import Learner
from .prompts import first_prompts

LONGEST = 64
"""Tokens of a prompt that are scored."""
NUDGE = 1e-6
"""Relative change of the embeddings, about what another order of summation makes of an fp32 sum."""
NOISES = 3.0
"""Tolerance in multiples of the noise measured on the nudged copy."""
NOISE_EVERY = 10
"""Versions between two measurements of the noise; it is also measured when a copy is made."""


class Canary:
    """Scores `canary_prompts` prompts with a dequantized copy of every published version.

    Rounding activations makes a deep model chaotic: where a sum falls next to a rounding boundary, its last bit decides
    about a step of the format, and layers amplify that. Two exact engines then differ by far more than their sums do,
    so the tolerance grows by what a nudge of the copy's embeddings does to its own scores.

    Args:
        learner: whose prompts, settings and model these are; the copy lives on the CPU, in fp32.
    """

    def __init__(self, learner: Learner):
        self.learner = learner
        self._prompts: tuple[tuple[int, ...], ...] = ()
        self._twin: tuple[Scheme, Any] | None = None
        self._noise: float | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rlq-canary")
        self._scoring: Future | None = None

    def probe(self, snap: Snapshot) -> "PendingProbe | None":
        """Begin to score what an engine that serves `snap` has to answer, beside shipping and sampling.

        None if no canary is asked for, or if all prompts have one token.
        """
        self.log(wait=True)  # there is one copy
        args = self.learner.args
        if not args.canary_prompts:
            return None
        # Tokenizing and building a model use state that belongs to the learner's thread.
        if not self._prompts:
            prompts = first_prompts(self.learner, args.canary_prompts, LONGEST)
            self._prompts = tuple(tuple(prompt) for prompt in prompts if len(prompt) > 1)
        if not self._prompts:
            return None
        if self._twin is None or self._twin[0] != snap.scheme:
            self._twin, self._noise = (snap.scheme, empty_twin(self.learner.policy.config, snap.scheme)), None
        self._scoring = self._worker.submit(self._score, self._twin[1], snap)
        return PendingProbe(self._prompts, self._scoring)

    def _score(self, twin: Any, snap: Snapshot) -> tuple[Probe, dict[str, float]]:
        start = time.perf_counter()
        load_snapshot(twin, snap)
        scores = tuple(teacher_forced(twin, self._prompts))
        due = snap.version % NOISE_EVERY == 0
        if due or self._noise is None:
            nudge(twin.get_input_embeddings().weight)  # until the next version is loaded
            exact = Probe(self._prompts, scores, float("inf"))
            self._noise = exact.check(teacher_forced(twin, self._prompts))
        metrics = {"time/canary_s": time.perf_counter() - start}
        if due:  # what a resumed run measures besides is no part of the records
            metrics["sync/canary_noise_nats"] = self._noise
        return Probe(self._prompts, scores, self.learner.args.canary_tolerance + NOISES * self._noise), metrics

    def log(self, *, wait: bool) -> None:
        """Log the scoring begun last, once; without `wait` only if it is done. Raises what it raised."""
        if self._scoring is not None and (wait or self._scoring.done()):
            scoring, self._scoring = self._scoring, None
            self.learner.log_rlq(scoring.result()[1])

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(wait=True)


@dataclass(frozen=True)
class PendingProbe:
    """A probe whose prompts are known and whose scores may still be computed."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    scoring: Future
    """(probe, metrics)."""

    def scored(self) -> Probe:
        """Wait for the scores.

        Raises:
            RuntimeError: computing them failed, which is no fault of a sampler.
        """
        try:
            return self.scoring.result()[0]
        except Exception as error:
            raise RuntimeError(f"the learner's copy could not score the canary's prompts: {error}") from error

    def check(self, scores: Sequence[tuple[float, ...]]) -> float:
        """As `Probe.check`, once the scores are there."""
        return self.scored().check(scores)


@torch.no_grad()
def nudge(weight: torch.Tensor) -> None:
    """Change every element by up to `NUDGE` of itself, the same way every time."""
    generator = torch.Generator().manual_seed(0)
    weight.mul_(1 + NUDGE * (2 * torch.rand(weight.shape, generator=generator) - 1))
