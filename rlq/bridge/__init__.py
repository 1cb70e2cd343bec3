"""The bridge between the distribution that samples and the distribution that learns.

``correct`` turns two log-probs and a mask into weights, kept tokens and metrics; ``Correction`` says how.
"""

from .core import BridgeOutput, correct
from .correction import Correction
from .histogram import QUANTILE_RESOLUTION
from .metrics import METRIC_NAMES, BridgeSums
from .ratio import MAX_LOG_RATIO, LogRatio
from .reduce import DistributedReducer, Reducer
from .registry import register_correction
from .rules import RejectRule

__all__ = [
    "MAX_LOG_RATIO",
    "METRIC_NAMES",
    "QUANTILE_RESOLUTION",
    "BridgeOutput",
    "BridgeSums",
    "Correction",
    "DistributedReducer",
    "LogRatio",
    "Reducer",
    "RejectRule",
    "correct",
    "register_correction",
]
