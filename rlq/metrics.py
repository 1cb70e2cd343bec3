"""The catalogue of metrics: what each name means, what is healthy, and where it is shown.

Data only. The bridge's names, the guard's rules, wandb's summaries, the curves, the closing table, the progress lines
and the tables of docs/metrics.md are filters over `METRICS`: a new metric is one row. `python -m rlq.metrics` rewrites
docs/metrics.md.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics:begin -->", "<!-- metrics:end -->"

SECTIONS = {
    "trl": "TRL's own, where rlq shows them",
    "mismatch": "How far apart sampler and learner are (before correction)",
    "correction": "What the correction did",
    "counts": "Counts",
    "sampling": "Sampling",
    "publishing": "Publishing",
    "time": "Where the time goes",
    "observe": "Diagnostics that are off by default",
}
"""Section of the page to its heading; `trl` rows have no `rlq/` prefix."""

BRIDGE = ("mismatch", "correction", "counts")
"""Sections whose metrics the bridge computes."""


@dataclass(frozen=True)
class Panel:
    """One plot of `curves.png`."""

    unit: str
    """Label of the y axis."""
    scale: Literal["linear", "log"] = "linear"
    from_zero: bool = False
    """Whether the y axis begins at 0."""


PANELS = {
    "reward": Panel("mean reward"),
    "sampler KL (k3)": Panel("nats per token", "log"),
    "clipped or dropped": Panel("fraction of tokens", from_zero=True),
    "effective sample size": Panel("fraction"),
    "version lag": Panel("optimizer steps", from_zero=True),
    "step time": Panel("seconds", "log"),
}
"""Title to panel, in the order of the figure."""


@dataclass(frozen=True)
class Limit:
    """One default rule of the guard; the bad side is the one that `Metric.direction` names."""

    value: float
    actions: tuple[str, ...]
    patience: int = 5
    """Bad steps before an action."""
    recover: float | None = None
    """The metric is good again on the other side of this; None as in `GuardRule`."""


@dataclass(frozen=True)
class Metric:
    """What is known of one metric."""

    name: str
    """Without the `rlq/` prefix; `*` stands for a part that varies."""
    section: str
    """Key of `SECTIONS`."""
    unit: str
    meaning: str
    healthy: str = ""
    advice: str = ""
    """What to do, or what it says, if the value is not healthy."""
    direction: Literal["lower", "higher", ""] = ""
    """Which values are better; empty where neither are."""
    row: tuple[int, str] | None = None
    """Place and label in the closing table."""
    progress: tuple[str, str] | None = None
    """Label in the progress lines, and the launcher's format specification."""
    panel: str = ""
    """Title of the panel that draws it."""
    summary: str = ""
    """Summaries in wandb's run table."""
    limits: tuple[Limit, ...] = ()
    """The guard's default rules on it."""

    @property
    def key(self) -> str:
        """Name in a record of metrics.jsonl."""
        return self.name if self.section == "trl" else f"rlq/{self.name}"


_ROWS = (
    Metric(
        "reward", "trl", "reward", "mean reward of the batch", direction="higher",
        row=(1, "reward"), progress=("reward", ".3f"), panel="reward", summary="max,last",
    ),
    Metric("step_time", "trl", "s", "seconds of a whole step", "", "", "lower", (12, "step (s)"), panel="step time"),
    Metric(
        "sampler_kl_k1", "mismatch", "nats/token", "mean(-ell)", "near 0, either sign",
        "a bias: wrong temperature, other weights", summary="max,last",
    ),
    Metric("sampler_kl_k2", "mismatch", "nats/token", "mean(ell^2 / 2)", "as k3", "as k3", "lower"),
    Metric(
        "sampler_kl_k3", "mismatch", "nats/token", "mean(rho - 1 - ell), an estimate of KL(sampler to learner)",
        "FP8: below 1e-3 for a small model, up to 1e-2 for a deep one",
        "above 1e-2: keep sensitive layers in bf16 (`sampler_ignore`)", "lower",
        row=(3, "sampler KL k3 (nats/token)"), progress=("k3", ".1e"), panel="sampler KL (k3)", summary="max,last",
        limits=(
            Limit(0.01, ("warn", "tighten", "promote_layers", "fallback_bf16"), recover=0.005),
            Limit(0.1, ("fallback_bf16", "stop"), patience=2, recover=0.01),
        ),
    ),
    Metric(
        "logratio_abs_mean", "mismatch", "nats", "mean of abs(ell)", "below 0.01 for FP8 and a small model",
        "as k3", "lower", row=(4, "mean |log ratio|"),
    ),
    Metric(
        "logratio_abs_max", "mismatch", "nats", "max of abs(ell)", "",
        "a large max with a small mean is a rounding outlier; the truncation handles it", "lower",
    ),
    Metric(
        "ratio_mean", "mismatch", "1", "mean of rho", "within 1% of 1",
        "a mean off 1 that stays: the two sides do not share a support",
    ),
    Metric("ratio_min", "mismatch", "1", "min of rho"),
    Metric("ratio_max", "mismatch", "1", "max of rho"),
    Metric("ratio_p01", "mismatch", "1", "1st percentile of rho"),
    Metric("ratio_p99", "mismatch", "1", "99th percentile of rho"),
    Metric(
        "ess_token", "mismatch", "share", "effective sample size (sum w)^2 / (N sum w^2) of rho", "above 0.9",
        "as k3", "higher",
        row=(7, "effective sample size, tokens"), panel="effective sample size", summary="min,last",
        limits=(
            Limit(0.8, ("warn", "tighten")),
            Limit(0.3, ("fallback_bf16", "stop"), patience=2, recover=0.8),
        ),
    ),
    Metric(
        "ess_seq", "mismatch", "share", "the same of the product of rho per sequence", "above 0.9",
        "a low `ess_seq` alone is length; do not use sequence weights then", "higher",
        row=(8, "effective sample size, sequences"), panel="effective sample size", summary="min,last",
    ),
    Metric("chi2_token", "mismatch", "1", "mean(rho^2) - 1", "near 0", "as ESS", "lower"),
    Metric("chi2_seq", "mismatch", "1", "the same of the product of rho per sequence", "near 0", "as ESS", "lower"),
    Metric(
        "ppl_ratio", "mismatch", "1", "mean over sequences of learner perplexity over sampler perplexity", "1", "as k1",
    ),
    Metric("prob_diff_mean", "mismatch", "1", "mean of abs(p_learner - p_sampler)", "below 0.01", "as k3", "lower"),
    Metric("prob_diff_max", "mismatch", "1", "max of abs(p_learner - p_sampler)", direction="lower"),
    Metric("weight_mean", "correction", "1", "mean of the weights that multiply the loss, dropped tokens as 0"),
    Metric("weight_min", "correction", "1", "least weight of a kept token"),
    Metric("weight_max", "correction", "1", "largest weight of a kept token"),
    Metric(
        "clip_frac_high", "correction", "share", "tokens whose raw ratio lies above the upper bound", "below 0.01",
        "keep sensitive layers in bf16", "lower",
        row=(5, "clipped above (tokens)"), progress=("clip", ".2%"), panel="clipped or dropped", summary="max,last",
        limits=(Limit(0.02, ("warn", "promote_layers")),),
    ),
    Metric(
        "clip_frac_low", "correction", "share", "tokens whose raw ratio lies below the lower bound", direction="lower",
        panel="clipped or dropped", summary="max,last",
    ),
    Metric("mask_frac", "correction", "share", "tokens dropped singly", "", "", "lower", panel="clipped or dropped"),
    Metric("reject_seq_frac", "correction", "share", "sequences rejected", direction="lower"),
    Metric(
        "veto_seq_frac", "correction", "share", "sequences vetoed", direction="lower",
        row=(6, "vetoed (sequences)"), panel="clipped or dropped",
    ),
    Metric(
        "kept_token_frac", "correction", "share", "tokens that stay in the loss, of all unmasked ones", "above 0.8",
        "a milder correction, or a finer format", "higher", summary="min,last",
        limits=(Limit(0.5, ("warn", "stop"), recover=0.8),),
    ),
    Metric("ess_applied", "correction", "share", "effective sample size of the applied weights", direction="higher"),
    Metric(
        "nonfinite_tokens", "counts", "tokens", "tokens without a finite log-prob; they leave loss and denominator",
        "0", "above `max_nonfinite_frac` the run stops", "lower", summary="max",
        limits=(Limit(0.0, ("warn", "stop"), patience=3, recover=0.0),),
    ),
    Metric("tokens", "counts", "tokens", "unmasked tokens with a finite log-prob"),
    Metric("bounded_tokens", "counts", "tokens", "tokens whose log ratio was bounded at +-20 before `exp`", "0"),
    Metric("bounded_seqs", "counts", "sequences", "sequences whose log ratio was bounded at +-20 before `exp`"),
    Metric(
        "rollout/tokens_per_s", "sampling", "tokens/s", "sampled tokens over wall time, all samplers",
        direction="higher", row=(9, "tokens per second"), progress=("tok/s", ",.0f"), summary="min,last",
    ),
    Metric(
        "rollout/accuracy", "sampling", "share", "right answers, if the reward reports them", direction="higher",
        row=(2, "sampling accuracy"), summary="max,last",
    ),
    Metric("time/generate_s", "sampling", "s", "sampling of a batch", direction="lower", panel="step time"),
    Metric(
        "time/wait_s", "sampling", "s",
        "the learner's wait for rollouts; below `time/generate_s` when batches are sampled ahead", direction="lower",
    ),
    Metric("sync/bytes", "publishing", "bytes", "size of the published snapshot", row=(10, "published bytes")),
    Metric("sync/shipped_bytes", "publishing", "bytes", "bytes sent to each sampler, fewer when a delta travels"),
    Metric("sync/tensors", "publishing", "tensors", "tensors installed; a version that lacks one is refused"),
    Metric("sync/quantize_s", "publishing", "s", "cast, check, quantize and digest", direction="lower"),
    Metric(
        "sync/ship_s", "publishing", "s", "until every sampler holds the version, checked and prepared",
        direction="lower",
    ),
    Metric(
        "sync/install_s", "publishing", "s", "until all samplers have switched", direction="lower",
        row=(11, "install (s)"), panel="step time", summary="max,last",
    ),
    Metric("sync/pause_s", "publishing", "s", "how long the slowest engine stood still", direction="lower"),
    Metric(
        "sync/proven_samplers", "publishing", "samplers", "samplers that read back what was published", "all of them",
    ),
    Metric(
        "sync/canary_nats", "publishing", "nats/token",
        "largest mean difference between a sampler's scores of the canary's prompts and the twin's",
        "below `canary_tolerance` and three times `sync/canary_noise_nats` together",
        "the engine does not multiply what was published", "lower",
    ),
    Metric(
        "sync/canary_noise_nats", "publishing", "nats/token",
        "how far the twin moves off its own scores when its embeddings are nudged by 1e-6: what two exact engines may "
        "differ by; measured every tenth version",
    ),
    Metric(
        "sync/version_lag", "publishing", "steps", "optimizer steps between sampling weights and learning weights",
        "0 when every step samples anew, `async_steps` when it samples ahead", "sampling is too slow", "lower",
        panel="version lag", summary="max,last", limits=(Limit(4.0, ("warn", "stop"), patience=2, recover=1.0),),
    ),
    Metric("time/bridge_s", "time", "s", "correction and its metrics", direction="lower"),
    Metric("time/track_s", "time", "s", "records and display, after the optimizer's step", direction="lower"),
    Metric("time/canary_s", "time", "s", "the twin's scores of the canary's prompts", direction="lower"),
    Metric("time/calibrate_s", "time", "s", "collection of the statistics that a scheme needs", direction="lower"),
    Metric("gap/*_logratio", "observe", "nats/token", "part of mean(ell) due to `stale`, `quant` or `engine`"),
    Metric("gap/*", "observe", "nats/token", "part of k3 due to `stale`, `quant` or `engine`; the parts sum to k3"),
    Metric(
        "shadow/*/cosine", "observe", "1", "between another correction's policy gradient and the active one's",
        "near 1",
    ),
    Metric("shadow/*/norm_ratio", "observe", "1", "norm of its policy gradient over that of the active one", "near 1"),
    Metric("shadow/*/weight_mean", "observe", "1", "its `weight_mean`"),
    Metric("shadow/*/ess", "observe", "share", "its `ess_applied`", direction="higher"),
    Metric("shadow/*/clip_frac", "observe", "share", "its `clip_frac_high` and `clip_frac_low` together"),
    Metric("shadow/*/kept_token_frac", "observe", "share", "its `kept_token_frac`", direction="higher"),
    Metric("audit/*_seqs", "observe", "sequences", "sum of the shares `kept` and `dropped` of the sequences"),
    Metric("audit/reward_*", "observe", "reward", "mean reward of what was `kept` and `dropped`", "alike"),
    Metric("audit/length_*", "observe", "tokens", "mean completion length of what was `kept` and `dropped`", "alike"),
    Metric("audit/advantage_*", "observe", "1", "mean advantage of what was `kept` and `dropped`", "alike"),
    Metric("audit/baseline_shift", "observe", "reward", "how far GRPO's baseline would move over the kept", "near 0"),
    Metric("audit/groups_lost_frac", "observe", "share", "groups of which nothing was kept", "0", "", "lower"),
    Metric("audit/group_kept_mean", "observe", "share", "mean over groups of the kept share", "near 1", "", "higher"),
)  # fmt: skip

METRICS = {metric.name: metric for metric in _ROWS}
"""Name without the `rlq/` prefix to its metric, in the order of docs/metrics.md.

Where k3's ranges come from. The default FP8 job measures 3.5e-4 and its bf16 control 3e-6 (docs/results.md), so a small
model is healthy below 1e-3. A deep model has a floor: two exact FP8 engines differ by 0.06 to 0.12 nats per token on 30
layers (docs/log.md), and for log ratios of that mean size, normally distributed, k3 is pi/4 times its square, 3e-3 to
1e-2. The guard therefore warns above 1e-2, and leaves quantization at ten times that."""


def find(name: str) -> Metric | None:
    """The row of a logged metric, by its name without the `rlq/` prefix; None if the catalogue has none."""
    return METRICS.get(name) or next((m for m in _ROWS if fnmatchcase(name, m.name)), None)


def tables() -> str:
    """The tables of docs/metrics.md, one for each section."""
    parts = []
    for section, title in SECTIONS.items():
        rows = [m for m in _ROWS if m.section == section]
        lines = [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.healthy} | {m.advice} |" for m in rows]
        head = [f"## {title}", "", "| name | unit | is | healthy | if not |", "|---|---|---|---|---|"]
        parts.append("\n".join(head + lines))
    return "\n\n".join(parts)


def render(page: str) -> str:
    """The page with its tables written anew between the markers."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
