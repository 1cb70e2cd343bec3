"""Quantizers: pure functions from a tensor and a scheme to codes and scales."""

from .dispatch import quantize_activations
from .reference import fake_quantize, quantize
from .tensor import QuantizedTensor

__all__ = ["QuantizedTensor", "fake_quantize", "quantize", "quantize_activations"]
