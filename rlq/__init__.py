"""rlq: quantize the policy, publish it to samplers, and correct for the difference.

`import rlq` loads torch and nothing of ray, vllm, trl or transformers.
"""

from .bridge import Correction, correct
from .errors import ConfigError, RlqError, SamplerError, SnapshotError
from .formats.schemes import Scheme, TensorScheme
from .publish import delta
from .quantize import QuantizedTensor, fake_quantize, quantize

__all__ = [
    "ConfigError",
    "Correction",
    "QuantizedTensor",
    "RlqError",
    "SamplerError",
    "Scheme",
    "SnapshotError",
    "TensorScheme",
    "correct",
    "delta",
    "fake_quantize",
    "quantize",
]
