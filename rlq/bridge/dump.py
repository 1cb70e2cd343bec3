"""Rollouts on disk: what a correction needs, and what a reader of its output wants beside it.

A dump is a `.parquet` file or a folder of them. A row is a completion; its per-token columns are lists without padding.

Axes: B sequences, T completion tokens (padded).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..files import write_renamed

_PER_TOKEN = ("logprobs", "old_logprobs", "sampler_logprobs", "mask", "token_ids")


@dataclass(frozen=True)
class Rollouts:
    """A batch of rollouts as a dump holds it."""

    sampler_logprobs: Tensor
    """(B, T) log-probs under what sampled."""
    mask: Tensor
    """(B, T) bool, completion tokens."""
    old_logprobs: Tensor | None = None
    """(B, T) learner at the sampled version."""
    logprobs: Tensor | None = None
    """(B, T) learner now."""
    token_ids: Tensor | None = None
    """(B, T) integer completion ids."""
    reward: Tensor | None = None
    """(B,)."""
    advantage: Tensor | None = None
    """(B,)."""
    version: Tensor | None = None
    """(B,) integer, version of the weights that sampled."""
    step: Tensor | None = None
    """(B,) integer, training step."""
    scheme: tuple[str, ...] | None = None
    """B names, the sampler's scheme."""

    def __post_init__(self) -> None:
        if self.old_logprobs is None and self.logprobs is None:
            raise ConfigError("rollouts have no learner log-probs: give old_logprobs, logprobs, or both")

    def learner(self, which: str | None = None) -> Tensor:
        """The learner's log-probs: `old_logprobs` or `logprobs` as asked, else the first of them that is there.

        Raises:
            ConfigError: the dump lacks the one asked for.
        """
        found = getattr(self, which) if which else (self.logprobs if self.old_logprobs is None else self.old_logprobs)
        if found is None:
            raise ConfigError(f"the dump has no {which}: leave the choice out to use what it has")
        return found


def write_rollouts(path: str | os.PathLike[str], rollouts: Rollouts) -> None:
    """Write one batch as `.parquet`; the file appears whole or not at all.

    Raises:
        ConfigError: another suffix.
    """
    import pyarrow
    import pyarrow.parquet

    path = Path(path)
    if path.suffix != ".parquet":
        raise ConfigError(f"cannot write rollouts as {path.name}: name it .parquet")
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(_columns(rollouts)), sink)
    write_renamed(path, memoryview(sink.getvalue()))


def read_rollouts(path: str | os.PathLike[str], *, batch: int = 512) -> Iterator[Rollouts]:
    """Batches of at most `batch` completions, files in order of name, read batch by batch.

    Raises:
        ConfigError: nothing readable there, or a file lacks log-probs or mask; the message lists what it has.
    """
    for file in dump_files(path):
        yield from _read(file, batch)


def dump_files(path: str | os.PathLike[str]) -> list[Path]:
    """Files of a dump, ordered by name.

    Raises:
        ConfigError: there is none.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(p for p in path.glob("*.parquet") if not p.name.startswith("."))
    if not files or files[0].suffix != ".parquet":
        raise ConfigError(f"no rollouts at {path}: give a .parquet file, or a folder of them")
    return files


def _columns(rollouts: Rollouts) -> dict:
    """Arrow arrays, one entry per completion."""
    import pyarrow

    values = {f.name: getattr(rollouts, f.name) for f in fields(rollouts) if f.name != "scheme"}
    tensors = {name: value.detach().cpu().contiguous() for name, value in values.items() if value is not None}
    mask = tensors["mask"]
    # A row keeps the span from its first to its last completion token: padding of either side goes, holes stay.
    position = torch.arange(mask.shape[1])
    first = torch.where(mask, position, mask.shape[1]).amin(-1) if mask.numel() else torch.zeros(len(mask))
    span = (position >= first[:, None]) & mask.flip(1).cummax(1).values.flip(1) if mask.numel() else mask
    offsets = np.concatenate([[0], span.sum(-1).cumsum(0).numpy()]).astype(np.int32)
    columns = {}
    for name, tensor in tensors.items():
        if name in _PER_TOKEN:
            flat = tensor[span] if name in ("mask", "token_ids") else tensor[span].float()
            columns[name] = pyarrow.ListArray.from_arrays(offsets, pyarrow.array(flat.numpy()))
        else:
            columns[name] = pyarrow.array(tensor.numpy())
    if rollouts.scheme is not None:
        columns["scheme"] = pyarrow.array(rollouts.scheme)
    return columns


def _read(path: Path, batch: int) -> Iterator[Rollouts]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    names = _names(file.schema_arrow.names, path)
    for record in file.iter_batches(batch_size=batch, columns=names):
        arrays: dict[str, np.ndarray] = {}
        for name in names:
            values = record.column(name)
            arrays[name] = _padded(values) if name in _PER_TOKEN else values.to_numpy(zero_copy_only=False)
        yield _rollouts(arrays, path)


def _padded(lists) -> np.ndarray:
    """(B, T) from an Arrow list array, zeros on the right."""
    lengths = np.diff(lists.offsets.to_numpy())
    out = np.zeros((len(lengths), int(lengths.max(initial=0))), dtype=lists.type.value_type.to_pandas_dtype())
    out[np.arange(out.shape[1]) < lengths[:, None]] = lists.flatten().to_numpy(zero_copy_only=False)
    return out


def _names(found: list[str], path: Path) -> list[str]:
    """The columns of a file that are fields of `Rollouts`."""
    names = [f.name for f in fields(Rollouts) if f.name in found]
    missing = {"sampler_logprobs", "mask"} - set(names)
    if missing or not {"old_logprobs", "logprobs"} & set(names):
        raise ConfigError(
            f"{path} lacks {', '.join(sorted(missing)) or 'old_logprobs or logprobs'}; it has {', '.join(found)}: "
            "rename columns to these names"
        )
    return names


def _rollouts(arrays: dict[str, np.ndarray], path: Path) -> Rollouts:
    mask = arrays["mask"]
    if mask.dtype != bool and not np.isin(mask, (0, 1)).all():
        raise ConfigError(f"{path}: mask holds other values than 0 and 1: write the completion mask, not weights")
    scheme = arrays.pop("scheme", None)
    tensors = {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()} | {
        "mask": torch.from_numpy(mask.astype(bool))
    }
    return Rollouts(**tensors, scheme=None if scheme is None else tuple(str(s) for s in scheme))
