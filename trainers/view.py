"""What the parts of the trainer may know of it. All else, TRL's own attributes above all, is out of their reach."""

from typing import Any, Protocol

from rlq.bridge import Correction, Reducer
from rlq.formats.schemes import Scheme

from .options import QuantGRPOConfig


class Learner(Protocol):
    """The trainer, as publishing, sampling and observing see it."""

    args: QuantGRPOConfig
    """The settings."""
    accelerator: Any
    """`accelerate.Accelerator`: ranks and devices."""
    model: Any
    """The model as it is trained, with accelerate's wrappers if it has any."""
    correction: Correction
    """What the bridge does from the next batch on; the guard may replace it."""
    reducer: Reducer | None
    """How the ranks' statistics combine; None in one process."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion."""

    @property
    def policy(self) -> Any:
        """The model without wrappers."""
        ...

    @property
    def version(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def completion_limit(self) -> int:
        """Longest completion in tokens."""
        ...

    @property
    def in_training(self) -> bool:
        """True in a training step, False in an evaluation."""
        ...

    @property
    def rollout_versions(self) -> list[int]:
        """Versions that sampled the batch taken last, one per completion of all ranks, in rank order."""
        ...

    def first_prompts(self, count: int) -> list[list[int]]:
        """Token ids of the first prompts of the training set."""
        ...

    def upcoming_prompts(self) -> list[list[list[int]]]:
        """Prompt ids of the next `async_steps` generation batches on this rank; fewer at the end of an epoch or run."""
        ...

    def log_rlq(self, metrics: dict[str, float]) -> None:
        """Add values, equal on every rank, to the next log entry under `rlq/`."""
        ...

    def change_scheme(self, scheme: Scheme) -> None:
        """Sample under another scheme from the next publish on."""
        ...
