"""The digest of a snapshot: SHA-256 over names, specs and bytes."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch

from .types import TensorSpec


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """View a contiguous CPU tensor as flat uint8, without a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def tensor_digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over sorted names, specs and bytes; independent of the order in which tensors were sent."""
    return combined_digest({name: own_digest(name, tensor) for name, tensor in tensors.items()})


def own_digest(name: str, tensor: torch.Tensor) -> bytes:
    """One tensor's part of `tensor_digest`: its name and spec as text, then SHA-256 of its bytes."""
    return digest_entry(name, TensorSpec.of(tensor), hashlib.sha256(as_bytes(tensor).data).digest())


def digest_entry(name: str, spec: TensorSpec, sha256: bytes) -> bytes:
    """`own_digest` of a tensor whose bytes were hashed piece by piece."""
    return f"{name} {spec.dtype} {list(spec.shape)} ".encode() + sha256


def combined_digest(own: Mapping[str, bytes]) -> str:
    """`tensor_digest` of the tensors whose parts are given, for whoever cannot hold them all."""
    return hashlib.sha256(b"".join(own[name] for name in sorted(own))).hexdigest()
