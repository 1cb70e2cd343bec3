"""Quantizers: pure functions from a tensor and a scheme to codes and scales."""

from .dispatch import fake_quantize, largest_magnitude, quantize, quantize_activations
from .tensor import QuantizedTensor

__all__ = ["QuantizedTensor", "fake_quantize", "largest_magnitude", "quantize", "quantize_activations"]
