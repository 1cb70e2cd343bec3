"""A snapshot as a checkpoint directory, complete only once its manifest is there."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import SnapshotError
from ..files import write_renamed
from ..formats.schemes import Scheme
from ..weights.compressed_tensors import checkpoint_config, weight_shapes
from .digest import tensor_digest
from .types import Snapshot

MANIFEST = "rlq_manifest.json"


def write_directory(snap: Snapshot, directory: Path, config: dict) -> None:
    """Write a snapshot as a checkpoint that vLLM and transformers load, see `checkpoint_config`.

    The weights come first, the manifest last and renamed into place: a directory without a manifest is incomplete.

    Args:
        snap: the snapshot.
        directory: created if needed.
        config: the model's `config.json`; the quantization config is added to it.
    """

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
