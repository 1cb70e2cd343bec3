"""How a scale follows from the largest magnitude of its tile; numbers, because compiled kernels compare them.

FP32 is amax / max_finite per tile. WHOLE is the same for a whole tensor, given from outside. E8M0_BLOCKS is a power of
two per block (OCP MX 1.0), E4M3_BLOCKS an E4M3 number per block under a scale of the whole tensor (NVFP4).
"""

from ..formats.schemes import TensorScheme

FP32, E8M0_BLOCKS, E4M3_BLOCKS, WHOLE = range(4)


def scale_rule(scheme: TensorScheme) -> int:
    """The rule of a tensor scheme."""
    block = scheme.block_format
    if block is not None:
        return E4M3_BLOCKS if block.tensor_scale else E8M0_BLOCKS
    return WHOLE if scheme.granularity == "tensor" else FP32
