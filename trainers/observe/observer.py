"""What a run looks at besides training: dumps, breakdowns, shadow estimators, gap attribution and the guard.

Everything here reads the batch that the score seam has just corrected; nothing changes it. Only the guard acts, on what
comes after: the correction, the samplers' scheme, or the end of the run.

Axes: B completions on this rank, T completion tokens (padded).
"""

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from rlq.bridge import (
    DEFAULT_RULES,
    BridgeOutput,
    Correction,
    Guard,
    GuardRule,
    Rollouts,
    bias_audit,
    breakdown,
    gap_attribution,
    log_ratio_histogram,
    shadow,
    shadow_metrics,
    tightened,
    worst_tokens,
    write_rollouts,
)
from rlq.errors import ConfigError
from rlq.formats.schemes import Scheme

from ..twin import differentiable_score, quantized_copy, score, without_worst_modules
from ..view import Learner

logger = logging.getLogger(__name__)

PROMOTED_FRACTION = 0.1  # of the quantized modules, per `promote_layers`


@dataclass(frozen=True)
class ObserveConfig:
    """What to look at and how often; 0 is never."""

    dump_every: int = field(
        default=0, metadata={"help": "Write rollouts/step-N.parquet every N steps, for rlq replay."}
    )
    breakdown_every: int = field(
        default=0, metadata={"help": "Write breakdown.jsonl and worst_tokens.jsonl every N steps (and wandb tables)."}
    )
    shadow_corrections: list[str] | None = field(
        default=None, metadata={"help": "Presets to evaluate beside the one that trains, such as trl/token_truncate."}
    )
    shadow_every: int = field(default=10, metadata={"help": "Evaluate them every N steps."})
    shadow_parameters: str | None = field(
        default=None,
        metadata={
            "help": "Pattern of the parameters whose policy gradients are compared; default: the final norm's weight."
        },
    )
    gap_every: int = field(
        default=0, metadata={"help": "Attribute the gap to quantization, engine, staleness every N."}
    )
    observe_sequences: int = field(default=64, metadata={"help": "Completions that shadows and attribution look at."})
    guard: str = field(default="warn", metadata={"help": "off, warn, or act (tighten, promote, fall back, stop)."})

    guard_rules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Instead of the default rules: metric:above|below:limit:patience:action+action, "
            "such as sampler_kl_k3:above:0.005:3:warn+fallback_bf16."
        },
    )

    def __post_init__(self) -> None:
        if self.guard not in ("off", "warn", "act"):
            raise ConfigError(f"guard={self.guard!r} is not one of off, warn, act")
        self.shadows()
        self.rules()

    def rules(self) -> tuple[GuardRule, ...]:
        """The guard's rules; with `guard: warn` their only action is a warning."""
        rules = DEFAULT_RULES if self.guard_rules is None else tuple(_rule(text) for text in self.guard_rules)
        return rules if self.guard == "act" else tuple(dataclasses.replace(r, actions=("warn",)) for r in rules)

    def shadows(self) -> dict[str, Correction]:
        """Name to correction; ConfigError for an unknown preset."""
        return {name: Correction.preset(name) for name in self.shadow_corrections or ()}


class RewardTap:
    """A reward function that remembers what it returned, for dumps and the bias audit."""

    def __init__(self, function: Callable[..., Sequence[float | None]]):
        functools.update_wrapper(self, function)
        self.function = function
        self.values: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[float | None]:
        """Call and remember."""
        result = self.function(*args, **kwargs)
        self.values = [float("nan") if value is None else float(value) for value in result]
        return result


@dataclass(frozen=True)
class ScoredBatch:
    """A generation batch after the bridge."""

    out: dict[str, Any]
    """TRL's tensors: prompt_ids, completion_ids, their masks, advantages."""
    learner: torch.Tensor
    """(B, T) `old_logprobs`."""
    sampler: torch.Tensor
    """(B, T) `sampler_logprobs`."""
    mask: torch.Tensor
    """(B, T) bool."""
    bridge: BridgeOutput
    """What the bridge made of them."""


class Observer(TrainerCallback):
    """Looks at every scored batch.

    Args:
        learner: whose batches.
        config: what to look at.
        scheme: what the samplers serve at first.
        run_dir: where tables and dumps go.
        taps: the reward functions.
    """

    def __init__(
        self,
        learner: Learner,
        config: ObserveConfig,
        scheme: Scheme,
        run_dir: Path,
        taps: Sequence[RewardTap],
    ):
        if config.gap_every and learner.args.async_steps:
            raise ConfigError(
                "gap_every needs the learner at the sampled version, which is gone with async_steps; set 0"
            )
        self.learner, self.config, self.scheme, self.run_dir, self.taps = learner, config, scheme, run_dir, taps
        self.shadows = config.shadows()
        self.guard = Guard(rules=config.rules())
        self.guard_state = self.guard.start()
        self.stopped: str | None = None  # why the guard ended the run
        self._gap: tuple[ScoredBatch, torch.Tensor] | None = None
        self._shadow_slice()  # a pattern that matches nothing is refused now

    @property
    def is_main(self) -> bool:
        """True on the rank that writes."""
        return self.learner.accelerator.is_main_process

    def scored(self, batch: ScoredBatch) -> None:
        """Called by the score seam in training."""
        step = self.learner.version
        metrics = batch.bridge.metrics
        if self.shadows and _due(step, self.config.shadow_every):
            self._shadow(batch)
        if _due(step, self.config.breakdown_every):
            self._breakdown(batch, step)
        if _due(step, self.config.dump_every):
            self._dump(batch, step)
        if _due(step, self.config.gap_every):
            few = self._slice(batch)
            model = quantized_copy(self.learner, self.scheme, step)
            self._gap = few, score(model, few.out, self.learner.args.temperature)[0]
        if self.config.guard != "off":
            self._guard(metrics, step)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Attribution is taken where the learner stands when it learns, so that staleness is what the loss saw."""
        if self._gap is None:
            return
        (few, quantized), self._gap = self._gap, None
        now, _ = score(self.learner.model, few.out, self.learner.args.temperature)
        gap = gap_attribution(now, few.learner, quantized, few.sampler, few.mask, reduce=self.learner.reducer)
        self.learner.log_rlq(gap.metrics())

    def on_step_end(self, args, state, control, **kwargs):
        """Carry out a stop: save, then end."""
        if self.stopped:
            control.should_save = control.should_training_stop = True
        return control

    def _slice(self, batch: ScoredBatch) -> ScoredBatch:
        count = self.config.observe_sequences
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        out = {name: batch.out[name][:count] for name in names}
        return ScoredBatch(out, batch.learner[:count], batch.sampler[:count], batch.mask[:count], batch.bridge)

    def _shadow(self, batch: ScoredBatch) -> None:
        few = self._slice(batch)
        parameters = self._shadow_slice()
        with torch.enable_grad():
            log_p, _ = differentiable_score(self.learner.model, few.out, self.learner.args.temperature)

        def gradient(coefficients: torch.Tensor) -> torch.Tensor:
            parts = torch.autograd.grad(log_p, parameters, coefficients.to(log_p.dtype), retain_graph=True)
            return torch.cat([part.flatten() for part in parts])

        estimates = shadow(
            few.learner,
            few.sampler,
            few.mask,
            self.shadows,
            active=self.learner.correction,
            advantages=few.out["advantages"],
            gradient=gradient,
            reduce=self.learner.reducer,
        )
        self.learner.log_rlq(shadow_metrics(estimates))

    def _shadow_slice(self) -> list[torch.nn.Parameter]:
        """The parameters that shadow gradients are taken of."""
        named = list(self.learner.policy.named_parameters())
        pattern = self.config.shadow_parameters
        if pattern is None:
            return [parameter for _, parameter in named if parameter.ndim == 1][-1:]
        found = [parameter for name, parameter in named if re.search(pattern, name)]
        if not found:
            raise ConfigError(f"shadow_parameters {pattern!r} matches no parameter; names look like {named[-1][0]!r}")
        return found

    def _rewards(self) -> torch.Tensor:
        return torch.tensor([tap.values for tap in self.taps], dtype=torch.float64).nansum(0)

    def _breakdown(self, batch: ScoredBatch, step: int) -> None:
        advantages = batch.out["advantages"]
        _, entropy = score(self.learner.model, batch.out, self.learner.args.temperature)
        tables = breakdown(
            batch.bridge, batch.sampler, entropy=entropy, advantages=advantages, reduce=self.learner.reducer
        )
        assert self.learner.args.num_generations is not None
        groups = torch.arange(len(advantages)) // self.learner.args.num_generations
        rewards = self._rewards().to(advantages.device)
        audit = bias_audit(batch.bridge, rewards, advantages=advantages, groups=groups.to(advantages.device))
        self.learner.log_rlq(audit.metrics())
        if self.is_main:
            rows = [row for table in tables.values() for row in table.rows()]
            _append(self.run_dir / "breakdown.jsonl", [{"step": step, **row} for row in rows])
            worst = worst_tokens(batch.bridge, batch.learner, batch.sampler, batch.out["completion_ids"])
            _append(self.run_dir / "worst_tokens.jsonl", [{"step": step, **dataclasses.asdict(w)} for w in worst])
            counts, edges = log_ratio_histogram(batch.bridge.sums)
            _wandb_log_breakdown(rows, counts, edges, step)

    def _dump(self, batch: ScoredBatch, step: int) -> None:
        count, rank = len(batch.mask), self.learner.accelerator.process_index
        versions = self.learner.rollout_versions[rank * count : (rank + 1) * count]
        rollouts = Rollouts(
            sampler_logprobs=batch.sampler.cpu(),
            mask=batch.mask.cpu(),
            old_logprobs=batch.learner.cpu(),
            token_ids=batch.out["completion_ids"].cpu(),
            reward=self._rewards(),
            advantage=batch.out["advantages"].cpu(),
            version=torch.tensor(versions),
            step=torch.full((count,), step),
            scheme=(self.scheme.name,) * count,
        )
        folder = self.run_dir / "rollouts"
        folder.mkdir(exist_ok=True)
        write_rollouts(folder / f"step-{step:06d}-rank-{rank}.parquet", rollouts)

    def _guard(self, metrics: dict[str, float], step: int) -> None:
        self.guard_state, decisions = self.guard.step(self.guard_state, metrics, step)
        for decision in decisions:
            if self.is_main:
                logger.warning("guard: %s", decision.message)
                _append(self.run_dir / "guard.jsonl", [decision.record()])
                _wandb_alert(decision.message)
            self._act(decision.action, decision.message)

    def _act(self, action: str, message: str) -> None:
        learner = self.learner
        if action == "tighten":
            learner.correction = tightened(learner.correction)
        elif action == "promote_layers" and self.scheme.weights is not None:
            self._switch(without_worst_modules(learner, self.scheme, PROMOTED_FRACTION))
        elif action == "fallback_bf16" and self.scheme.weights is not None:
            self._switch(Scheme.preset("bf16"))
        elif action == "stop":
            self.stopped = message

    def _switch(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.learner.change_scheme(scheme)


def _rule(text: str) -> GuardRule:
    parts = text.split(":")
    if len(parts) != 5:
        raise ConfigError(f"guard_rules {text!r}: write metric:above|below:limit:patience:action+action")
    metric, when, limit, patience, actions = parts
    try:
        numbers = float(limit), int(patience)
    except ValueError:
        raise ConfigError(f"guard_rules {text!r}: limit and patience must be numbers") from None
    return GuardRule(metric, numbers[0], tuple(actions.split("+")), when, numbers[1])  # type: ignore[arg-type]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _wandb_log_breakdown(rows: list[dict[str, Any]], counts: list[float], edges: list[float], step: int) -> None:
    import wandb

    if wandb.run is not None and rows:
        columns = list(rows[0])
        table = wandb.Table(columns=[*columns], data=[[row[c] for c in columns] for row in rows])
        histogram = wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))
        wandb.run.log({"train/rlq/breakdown": table, "train/rlq/log_ratio": histogram, "train/global_step": step})


def _wandb_alert(message: str) -> None:
    import wandb

    if wandb.run is not None:
        wandb.run.alert(title="rlq guard", text=message)
