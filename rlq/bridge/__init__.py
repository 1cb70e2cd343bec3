"""The bridge between the distribution that samples and the distribution that learns.

`correct` turns two log-probs and a mask into weights, kept tokens and metrics; `Correction` says how. The rest
looks at the same tensors: breakdowns, shadow estimators, gap attribution, and a guard that acts on the metrics.
"""

from .correct import BridgeOutput, correct, correct_all
from .correction.correction import Correction
from .correction.options import BridgeConfig
from .correction.presets import CORRECTIONS, Preset
from .correction.rules import RejectRule
from .diagnostics.breakdown import BinnedTable, WorstToken, breakdown, log_ratio_histogram, worst_tokens
from .diagnostics.gap import GapAttribution, gap_attribution
from .diagnostics.selection_bias import BiasAudit, bias_audit
from .diagnostics.shadow import ShadowEstimate, shadow, shadow_metrics
from .dump import Rollouts, read_rollouts, write_rollouts
from .guard import DEFAULT_RULES, Decision, Guard, GuardRule, RuleState, tightened
from .metrics.histogram import QUANTILE_RESOLUTION
from .metrics.sums import METRIC_NAMES, BridgeSums
from .ratio import MAX_LOG_RATIO, LogRatio
from .reduce import DistributedReducer, Reducer

__all__ = [
    "CORRECTIONS",
    "DEFAULT_RULES",
    "MAX_LOG_RATIO",
    "METRIC_NAMES",
    "QUANTILE_RESOLUTION",
    "BiasAudit",
    "BinnedTable",
    "BridgeConfig",
    "BridgeOutput",
    "BridgeSums",
    "Correction",
    "Decision",
    "DistributedReducer",
    "GapAttribution",
    "Guard",
    "GuardRule",
    "LogRatio",
    "Preset",
    "Reducer",
    "RejectRule",
    "Rollouts",
    "RuleState",
    "ShadowEstimate",
    "WorstToken",
    "bias_audit",
    "breakdown",
    "correct",
    "correct_all",
    "gap_attribution",
    "log_ratio_histogram",
    "read_rollouts",
    "shadow",
    "shadow_metrics",
    "tightened",
    "worst_tokens",
    "write_rollouts",
]
