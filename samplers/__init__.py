"""Samplers: vLLM engines behind one protocol, and a pool of Ray actors that hosts them."""

from .options import SamplerConfig
from .pool.pool import SamplerPool

__all__ = ["SamplerConfig", "SamplerPool"]
