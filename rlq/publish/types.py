"""What is published: tensors with their specs, a version, a scheme and a digest."""

from dataclasses import dataclass

import numpy as np
import torch

from ..errors import SnapshotError
from ..formats.schemes import Scheme


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must look like to be installed."""

    dtype: str
    """torch dtype without the `torch.` prefix."""
    shape: tuple[int, ...]
    """Full, unsharded shape."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """Spec of an existing tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@dataclass(frozen=True)
class Snapshot:
    """One version of the policy as samplers serve it."""

    tensors: dict[str, torch.Tensor]
    """Wire tensors by compressed-tensors name, grouped by layer; contiguous, on any device."""
    version: int
    """Learner step that the weights come from."""
    scheme: Scheme
    """How the weights were quantized."""
    digest: str
    """`tensor_digest` of `tensors`: equal digests mean equal names, shapes, dtypes and bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all wire tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Name to spec, in wire order."""
        return {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class PackedSnapshot:
    """A snapshot as one flat buffer, so that a shared-memory store hands it to many readers without a copy."""

    header: dict
    """Version, scheme, digest, and per tensor its name, dtype, shape, offset and length in bytes."""
    buffer: np.ndarray
    """uint8; read-only on the receiving side."""


def check_specs(sent: dict[str, TensorSpec], expected: dict[str, TensorSpec]) -> None:
    """Refuse a snapshot whose names, dtypes or shapes differ from what a sampler holds; the message names tensors.

    Raises:
        SnapshotError: something is missing, unexpected or misshapen, or nothing was sent.
    """
    missing = [name for name in expected if name not in sent]
    unexpected = [name for name in sent if name not in expected]
    wrong = [
        f"{name} is {sent[name]}, not {spec}" for name, spec in expected.items() if name in sent and sent[name] != spec
    ]
    faults = [("missing", missing), ("unexpected", unexpected), ("misshapen", wrong)]
    text = "; ".join(f"{len(names)} {kind}: {', '.join(names[:3])}" for kind, names in faults if names)
    if text:
        raise SnapshotError(f"snapshot refused, {text}; publish exactly the tensors of the sampler's model")
