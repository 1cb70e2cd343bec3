"""Publish: a bf16 checkpoint becomes a versioned, digested snapshot, ready for a wire or a directory."""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import SnapshotError
from ..files import write_renamed
from ..formats.schemes import Scheme
from ..weights.canonical import bf16_checkpoint
from ..weights.quantize import cache_scales, check_scheme, quantize_weights

ALIGN = 64  # bytes; keeps every tensor of a packed buffer aligned for vector loads
MANIFEST = "rlq_manifest.json"


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
    """Wire tensors by compressed-tensors name, grouped by layer; CPU, contiguous."""
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


def snapshot(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    scheme: Scheme,
    version: int,
    amax: Mapping[str, float] | None = None,
) -> Snapshot:
    """Quantize a learner's parameters into the snapshot that samplers install.

    Args:
        named_tensors: `model.named_parameters()` or the items of a state dict.
        scheme: model scheme.
        version: learner step, at least 0.
        amax: calibrated magnitudes from `rlq.recipes.statistics`, for schemes with static scales of inputs or caches.

    Raises:
        SnapshotError: see `rlq.weights.canonical.bf16_checkpoint`; or the scheme quantizes nothing.
        ConfigError: see `rlq.weights.quantize.check_scheme`; or static scales without their magnitudes.
    """
    named = list(named_tensors)
    live = {tensor.data_ptr() for _, tensor in named}
    weights = bf16_checkpoint(named, check=False)  # quantizing does
    check_scheme(scheme, {name: weight.shape for name, weight in weights.items()})
    tensors: dict[str, torch.Tensor] = {}
    for _, wire in quantize_weights(weights, scheme, amax):
        # What is published as it is must not move with the learner.
        tensors |= {name: t.clone() if t.data_ptr() in live else t for name, t in wire.items()}
    if scheme.calibrated_cache:
        tensors |= cache_scales(scheme, amax or {})
    return Snapshot(tensors, version, scheme, tensor_digest(tensors))


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


def pack(snap: Snapshot) -> PackedSnapshot:
    """Copy a snapshot into one aligned buffer."""
    entries, offset = [], 0
    for name, tensor in snap.tensors.items():
        spec = TensorSpec.of(tensor)
        entries.append(
            {"name": name, "dtype": spec.dtype, "shape": spec.shape, "offset": offset, "nbytes": tensor.nbytes}
        )
        offset += -(-tensor.nbytes // ALIGN) * ALIGN
    buffer = np.empty(offset, dtype=np.uint8)
    for entry, tensor in zip(entries, snap.tensors.values(), strict=True):
        buffer[entry["offset"] : entry["offset"] + entry["nbytes"]] = as_bytes(tensor)
    header = {"version": snap.version, "scheme": snap.scheme.to_dict(), "digest": snap.digest, "tensors": entries}
    return PackedSnapshot(header, buffer)


def unpack(packed: PackedSnapshot) -> Snapshot:
    """View a packed snapshot's tensors without a copy; they must not be written to."""
    header = packed.header
    with warnings.catch_warnings():
        # The store's buffer is read-only and torch has no read-only tensors; nobody writes to these.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(packed.buffer)
    tensors = {
        entry["name"]: flat[entry["offset"] : entry["offset"] + entry["nbytes"]]
        .view(getattr(torch, entry["dtype"]))
        .view(tuple(entry["shape"]))
        for entry in header["tensors"]
    }
    return Snapshot(tensors, header["version"], Scheme.from_dict(header["scheme"]), header["digest"])


def write_directory(snap: Snapshot, directory: Path, config: dict) -> None:
    """Write a snapshot as a checkpoint that vLLM and transformers load, see `checkpoint_config`.

    The weights come first, the manifest last and renamed into place: a directory without a manifest is incomplete.

    Args:
        snap: the snapshot.
        directory: created if needed.
        config: the model's `config.json`; the quantization config is added to it.
    """
    from safetensors.torch import save_file

    from ..weights.compressed_tensors import checkpoint_config, weight_shapes

    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    save_file(snap.tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**config, "dtype": "bfloat16"}
    if snap.scheme.quantizes_weights:
        config["quantization_config"] = checkpoint_config(snap.scheme, weight_shapes(snap.tensors))
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    sizes = {"tensors": len(snap.tensors), "nbytes": snap.nbytes}
    write_manifest(directory, snap.scheme, snap.version, snap.digest, sizes)


def write_manifest(directory: Path, scheme: Scheme, version: int, digest: str, more: dict) -> None:
    """Declare a directory complete."""
    manifest = {"version": version, "scheme": scheme.to_dict(), "digest": digest, **more}
    write_renamed(directory / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def read_directory(directory: Path) -> Snapshot:
    """Read back what `write_directory` or `rlq quantize` wrote.

    Raises:
        SnapshotError: no manifest (an interrupted write), or bytes that differ from the manifest's digest.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (directory / MANIFEST).is_file():
        raise SnapshotError(f"{directory} has no {MANIFEST}: the snapshot is incomplete, write it again")
    manifest = json.loads((directory / MANIFEST).read_text())
    try:
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            tensors |= load_file(file)
        tensors = dict(sorted(tensors.items()))  # a file goes by dtype; receivers like layers in one piece
    except (SafetensorError, OSError) as error:
        raise SnapshotError(f"{directory} cannot be read ({error}); the files were damaged, write it again") from None
    if tensor_digest(tensors) != manifest["digest"]:
        raise SnapshotError(f"{directory} does not match its manifest; the files were damaged, write it again")
    return Snapshot(tensors, manifest["version"], Scheme.from_dict(manifest["scheme"]), manifest["digest"])
