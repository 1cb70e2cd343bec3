"""A checkpoint directory of safetensors shards, read one tensor at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ..errors import SnapshotError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointFiles(Mapping[str, torch.Tensor]):
    """Tensors by name; reading one maps its shard and copies nothing else.

    Args:
        directory: holds `model.safetensors`, or shards and their index.

    Raises:
        SnapshotError: no weights, a shard that is missing or unreadable, or an index that disagrees with the shards.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.shards: dict[str, list[str]] = {}
        """Names per shard file, in the order of the file."""
        self.shapes: dict[str, torch.Size] = {}
        """Shape by name, for all shards in order."""
        self.dtypes: dict[str, str] = {}
        """Type by name as safetensors spells it, such as `BF16`."""
        self._shard_of: dict[str, str] = {}
        claimed = _index(directory)
        for shard in dict.fromkeys(claimed.values()) if claimed else [SINGLE]:
            self._read_header(shard)
        lies = [name for name, shard in claimed.items() if self._shard_of.get(name) != shard]
        extra = [name for name in self._shard_of if claimed and name not in claimed]
        if lies or extra:
            text = (
                f"{INDEX} places {lies[0]!r} in {claimed[lies[0]]}" if lies else f"{INDEX} does not list {extra[0]!r}"
            )
            raise SnapshotError(
                f"{directory}: {text}, the shards disagree ({len(lies) + len(extra)} names); download again"
            )

    def _read_header(self, shard: str) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.directory / shard
        if not path.is_file():
            raise SnapshotError(f"{path} is missing; the checkpoint is incomplete, download it again")
        try:
            with safe_open(path, framework="pt") as file:
                self.shards[shard] = list(file.keys())
                for name in self.shards[shard]:
                    part = file.get_slice(name)
                    self.shapes[name], self.dtypes[name] = torch.Size(part.get_shape()), part.get_dtype()
                    self._shard_of[name] = shard
        except SafetensorError as error:
            raise SnapshotError(f"{path} cannot be read ({error}); download it again") from None

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self.directory / self._shard_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _index(directory: Path) -> dict[str, str]:
    """Shard file by tensor name; empty for a checkpoint in one file."""
    path = directory / INDEX
    if not path.is_file():
        if not (directory / SINGLE).is_file():
            raise SnapshotError(f"{directory} holds neither {SINGLE} nor {INDEX}; name a checkpoint in safetensors")
        return {}
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise SnapshotError(f"{path} is no index of shards; download it again") from None
