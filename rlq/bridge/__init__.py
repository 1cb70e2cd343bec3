"""The bridge between the distribution that samples and the distribution that learns.

``correct`` turns two log-probs and a mask into weights, kept tokens and metrics; ``Correction`` says how.
"""

from .core import BridgeOutput, correct
from .correction import Correction
from .metrics import METRIC_NAMES, QUANTILE_RESOLUTION, BridgeSums, DistributedReducer, Reducer
from .ratio import MAX_LOG_RATIO

__all__ = [
    "MAX_LOG_RATIO",
    "METRIC_NAMES",
    "QUANTILE_RESOLUTION",
    "BridgeOutput",
    "BridgeSums",
    "Correction",
    "DistributedReducer",
    "Reducer",
    "correct",
]
