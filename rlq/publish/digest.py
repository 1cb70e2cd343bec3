"""The digest of a snapshot: SHA-256 over names, specs and bytes."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch

from .types import TensorSpec

PIECE = 1 << 26
"""Bytes that are copied from a device at once to be hashed."""


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as flat uint8, on its own device."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous tensor as flat uint8: a view of a CPU tensor, a copy of one that lives on another device."""
    return flat_bytes(tensor).cpu().numpy()


def tensor_digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over sorted names, specs and bytes; independent of the order in which tensors were sent."""
    return combined_digest({name: own_digest(name, tensor) for name, tensor in tensors.items()})


def own_digest(name: str, tensor: torch.Tensor) -> bytes:
    """One tensor's part of `tensor_digest`: its name and spec as text, then SHA-256 of its bytes."""
    hashed = hashlib.sha256()
    for piece in flat_bytes(tensor).split(PIECE):
        hashed.update(as_bytes(piece).data)
    return digest_entry(name, TensorSpec.of(tensor), hashed.digest())


def digest_entry(name: str, spec: TensorSpec, sha256: bytes) -> bytes:
    """`own_digest` of a tensor whose bytes were hashed piece by piece."""
    return f"{name} {spec.dtype} {list(spec.shape)} ".encode() + sha256


def combined_digest(own: Mapping[str, bytes]) -> str:
    """`tensor_digest` from the parts of all tensors, which need not be in memory together."""
    return hashlib.sha256(b"".join(own[name] for name in sorted(own))).hexdigest()
