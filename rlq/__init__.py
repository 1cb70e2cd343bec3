"""rlq: quantize the policy, publish it to samplers, and correct for the difference.

`import rlq` loads torch and nothing of ray, vllm, trl or transformers.
"""

from .bridge import Correction, correct
from .errors import ConfigError, RlqError, SamplerError, SnapshotError
from .quantize import QuantizedTensor, fake_quantize, quantize
from .schemes import Scheme, TensorScheme

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
    "fake_quantize",
    "quantize",
]
