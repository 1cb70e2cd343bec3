"""Quantizer kernels for CPUs (numba), bit-identical to the reference."""
