"""What crosses the boundary between learner and samplers, and the `Sampler` protocol that both sides know.

Axes: B completions, T completion tokens, G samples per prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from .emulate.probe import ScoreCheck
from .errors import ConfigError, SamplerError
from .formats.schemes import Scheme
from .publish.types import Snapshot


@dataclass(frozen=True)
class Sampling:
    """How every request of a batch is sampled.

    There is no top-p, top-k, min-p or penalty: they change the sampler's support, so that the ratio to a learner over
    the full vocabulary is biased. Example: `Sampling(temperature=1.0, max_tokens=64, stop_token_ids=(1,))`.
    """

    temperature: float
    """Softmax temperature, greater than 0; log-probs are those of the tempered distribution."""
    max_tokens: int
    """Longest completion in tokens, the end token included."""
    stop_token_ids: tuple[int, ...]
    """Every token id that ends a completion; it is kept as the last token, with its log-prob."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"temperature {self.temperature} gives no ratio; use a value above 0, such as 1.0")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; use at least 1")


@dataclass(frozen=True)
class Request:
    """One prompt to be continued `num_samples` times."""

    prompt_ids: tuple[int, ...]
    """Prompt token ids, without padding."""
    num_samples: int
    """Completions wanted (G)."""
    seed: int
    """Sample i draws from a generator seeded with `seed + i`; unique per run, step and prompt."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled completion and what sampled it."""

    prompt_ids: tuple[int, ...]
    """The request's prompt."""
    token_ids: np.ndarray
    """(T,) int64: sampled ids as the engine drew them, never re-tokenized."""
    logprobs: np.ndarray
    """(T,) float32: `sampler_logprobs`, in nats, of the sampled tokens under the tempered sampler distribution."""
    finish_reason: str
    """`stop` (an end token was drawn) or `length`."""
    version: int
    """Learner step of the weights that sampled it."""
    scheme: str
    """Scheme name of those weights."""
    temperature: float
    """Temperature it was sampled at."""
    seed: int
    """Seed of this completion's generator."""

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.token_ids):
            raise SamplerError(
                f"{len(self.token_ids)} tokens with {len(self.logprobs)} log-probs; the engine must return one each"
            )
        if (self.token_ids.dtype, self.logprobs.dtype) != (np.int64, np.float32):
            raise SamplerError(
                f"token ids are {self.token_ids.dtype}, log-probs {self.logprobs.dtype}, not int64 and float32; "
                "request logprobs=0 from the engine, so that no sampled token comes without its log-prob"
            )

    def __eq__(self, other: object) -> bool:
        """True if every field is equal, arrays element by element."""
        if not isinstance(other, Rollout):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


@dataclass(frozen=True)
class InstallReport:
    """What an install did."""

    version: int
    """Version now served."""
    digest: str
    """Digest of the tensors that were written; compared with the engine's storage before a rollout is returned."""
    num_tensors: int
    """Tensors of the version, each as published."""
    ship_s: float
    """Seconds until every sampler held the version, checked and ready to be switched to; 0 in one process."""
    install_s: float
    """Seconds until every sampler had switched."""
    pause_s: float
    """Seconds during which an engine could not serve (the slowest one of a pool)."""
    shipped_bytes: int = 0
    """Bytes sent to each sampler; 0 in one process."""


class Sampler(Protocol):
    """Anything that serves one version of the policy: an engine, or a pool of engines."""

    scheme: Scheme
    """Model scheme that it serves; snapshots of another one are refused."""

    @property
    def proof(self) -> dict[str, float]:
        """What engines proved since the last install: `sync/proven_samplers` that read back what was published, and the
        largest `sync/canary_nats` among them."""
        ...

    def ship(self, snap: Snapshot) -> None:
        """Begin to send the version that is installed next, if that can be done while another one is served."""
        ...

    def install(self, snap: Snapshot, probe: ScoreCheck | None = None) -> InstallReport:
        """Serve `snap` from now on, or raise and keep serving what was served before.

        No rollout of it is returned before the engine's tensors and its scores of the probe have been compared.
        """
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Rollout]:
        """Return `num_samples` rollouts per request, in request order, all from `version`; SamplerError otherwise.

        After `interrupt(version)` requests may be missing, but each that is there is complete.
        """
        ...

    def interrupt(self, version: int) -> None:
        """Have calls of `generate` for `version` return early, now and until the next install; in any thread.

        What was shipped before is ready to be installed when they do.
        """
        ...

    def change_scheme(self, scheme: Scheme) -> None:
        """Serve another scheme from the next install on, and nothing until then."""
        ...

    def close(self) -> None:
        """Release engines and processes."""
        ...
