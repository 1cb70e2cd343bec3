"""Quantizers: pure functions from a tensor and a scheme to codes and scales."""

from .dispatch import largest_magnitude, quantize_activations
from .tensor import QuantizedTensor, fake_quantize, quantize

__all__ = ["QuantizedTensor", "fake_quantize", "largest_magnitude", "quantize", "quantize_activations"]
