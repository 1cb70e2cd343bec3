"""Rollouts on disk: what a correction needs, and what a reader of its output wants beside it.

A dump is a file or a folder of files. `.parquet` holds one row per completion, its per-token columns as lists without
padding; `.safetensors` and `.npz` hold padded (B, T) arrays. Dumps of other frameworks are read as they are when
their arrays go by one of the names in `ALIASES`; two log-probs and a mask are enough.

Axes: B sequences, T completion tokens (padded).
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError

ALIASES: dict[str, tuple[str, ...]] = {
    "logprobs": ("learner_logprobs", "trainer_logprobs", "per_token_logps"),
    "old_logprobs": ("old_log_probs", "old_log_prob", "old_per_token_logps", "train_log_probs", "prev_logprobs"),
    "sampler_logprobs": (
        "rollout_log_probs",
        "rollout_log_prob",
        "rollout_logprobs",
        "sampling_per_token_logps",
        "generation_logprobs",
        "inference_logprobs",
        "infer_logprobs",
    ),
    "mask": ("response_mask", "completion_mask", "loss_mask", "loss_masks", "action_mask", "token_mask"),
    "token_ids": ("responses", "completion_ids", "input_ids"),
    "reward": ("rewards", "scores"),
    "advantage": ("advantages",),
}
"""Names under which other frameworks keep the same arrays."""

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
    """Write one batch as `.parquet` or `.safetensors`; the file appears whole or not at all.

    Raises:
        ConfigError: another suffix.
    """
    path = Path(path)
    writers = {".parquet": _write_parquet, ".safetensors": _write_safetensors}
    if path.suffix not in writers:
        raise ConfigError(f"cannot write rollouts as {path.name}: name it .parquet or .safetensors")
    partial = path.with_name(f".{path.name}.partial")
    writers[path.suffix](partial, rollouts)
    partial.replace(path)


def read_rollouts(path: str | os.PathLike[str], *, batch: int = 512) -> Iterator[Rollouts]:
    """Batches of at most `batch` completions, files in order of name; parquet is read batch by batch.

    Raises:
        ConfigError: nothing readable there, or a file lacks log-probs or mask; the message lists what it has.
    """
    for file in dump_files(path):
        if file.suffix == ".parquet":
            yield from _read_parquet(file, batch)
            continue
        arrays = _named(_load_arrays(file), file)
        rows = len(arrays["mask"])
        for start in range(0, rows, batch):
            yield _rollouts({name: x[start : start + batch] for name, x in arrays.items()}, file)


def dump_files(path: str | os.PathLike[str]) -> list[Path]:
    """Files of a dump, ordered by name.

    Raises:
        ConfigError: there is none.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(p for p in path.glob("*") if not p.name.startswith("."))
    files = [p for p in files if p.suffix in (".parquet", ".safetensors", ".npz")]
    if not files:
        raise ConfigError(f"no rollouts at {path}: give a .parquet, .safetensors or .npz file, or a folder of them")
    return files


def _present(rollouts: Rollouts) -> dict[str, Tensor]:
    values = {f.name: getattr(rollouts, f.name) for f in fields(rollouts) if f.name != "scheme"}
    return {name: value.detach().cpu().contiguous() for name, value in values.items() if value is not None}


def _write_safetensors(path: Path, rollouts: Rollouts) -> None:
    from safetensors.torch import save_file

    schemes = {"scheme": "\n".join(rollouts.scheme)} if rollouts.scheme else None
    save_file(_present(rollouts), str(path), metadata=schemes)


def _write_parquet(path: Path, rollouts: Rollouts) -> None:
    import pyarrow
    import pyarrow.parquet

    tensors = _present(rollouts)
    mask = tensors["mask"]
    # A row keeps the span from its first to its last completion token: padding of either side goes, holes stay.
    position = torch.arange(mask.shape[1])
    first = torch.where(mask, position, mask.shape[1]).amin(-1) if mask.numel() else torch.zeros(len(mask))
    span = (position >= first[:, None]) & mask.flip(1).cummax(1).values.flip(1) if mask.numel() else mask
    offsets = np.concatenate([[0], span.sum(-1).cumsum(0).numpy()]).astype(np.int32)
    columns = {}
    for name, tensor in tensors.items():
        if name in _PER_TOKEN:
            values = tensor[span]
            values = values if name in ("mask", "token_ids") else values.float()
            columns[name] = pyarrow.ListArray.from_arrays(offsets, pyarrow.array(values.numpy()))
        else:
            columns[name] = pyarrow.array(tensor.numpy())
    if rollouts.scheme is not None:
        columns["scheme"] = pyarrow.array(rollouts.scheme)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _read_parquet(path: Path, batch: int) -> Iterator[Rollouts]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    names = _names(file.schema_arrow.names, path)
    for record in file.iter_batches(batch_size=batch, columns=[*names]):
        arrays: dict[str, np.ndarray] = {}
        for column, name in names.items():
            values = record.column(column)
            arrays[name] = _padded(values) if name in _PER_TOKEN else values.to_numpy(zero_copy_only=False)
        yield _rollouts(arrays, path)


def _padded(lists) -> np.ndarray:
    """(B, T) from an Arrow list array, zeros on the right."""
    lengths = np.diff(lists.offsets.to_numpy())
    out = np.zeros((len(lengths), int(lengths.max(initial=0))), dtype=lists.type.value_type.to_pandas_dtype())
    out[np.arange(out.shape[1]) < lengths[:, None]] = lists.flatten().to_numpy(zero_copy_only=False)
    return out


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        schemes = (file.metadata() or {}).get("scheme")
    arrays = {name: (x.float() if x.is_floating_point() else x).numpy() for name, x in tensors.items()}
    return arrays | ({"scheme": np.array(schemes.split("\n"))} if schemes else {})


def _names(found: list[str], path: Path) -> dict[str, str]:
    """Column of the file to field of `Rollouts`, for the columns that are understood."""
    known = {f.name: f.name for f in fields(Rollouts)} | {a: name for name, many in ALIASES.items() for a in many}
    names = {column: known[column] for column in found if column in known}
    missing = {"sampler_logprobs", "mask"} - set(names.values())
    if missing or not {"old_logprobs", "logprobs"} & set(names.values()):
        raise ConfigError(
            f"{path} lacks {', '.join(sorted(missing)) or 'old_logprobs or logprobs'}; it has {', '.join(found)}: "
            "rename arrays to these names"
        )
    return names


def _named(arrays: Mapping[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    return {name: arrays[column] for column, name in _names([*arrays], path).items()}


def _rollouts(arrays: dict[str, np.ndarray], path: Path) -> Rollouts:
    mask = arrays["mask"]
    if mask.dtype != bool and not np.isin(mask, (0, 1)).all():
        raise ConfigError(f"{path}: mask holds other values than 0 and 1: write the completion mask, not weights")
    scheme = arrays.pop("scheme", None)
    tensors = {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()} | {
        "mask": torch.from_numpy(mask.astype(bool))
    }
    return Rollouts(**tensors, scheme=None if scheme is None else tuple(str(s) for s in scheme))
