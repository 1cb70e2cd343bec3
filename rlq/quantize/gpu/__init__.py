"""Quantizer kernels for GPUs (Triton), bit-identical to the reference."""
