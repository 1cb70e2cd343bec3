"""Resumable checkpoints: complete only when their marker, written last and renamed into place, says so."""

import json
import logging
import re
from pathlib import Path

from transformers import TrainerCallback

from rlq.errors import ConfigError
from rlq.files import write_renamed

logger = logging.getLogger(__name__)

MARKER = "rlq_checkpoint.json"


class CheckpointMarker(TrainerCallback):
    """Marks each checkpoint complete, with the size of every file in it."""

    def on_save(self, args, state, control, **kwargs):
        """Runs after transformers has written the checkpoint."""
        if state.is_world_process_zero:
            mark_complete(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}", version=state.global_step)


def mark_complete(checkpoint: Path, version: int) -> None:
    """Write the marker."""
    sizes = {str(p.relative_to(checkpoint)): p.stat().st_size for p in sorted(checkpoint.rglob("*")) if p.is_file()}
    sizes.pop(MARKER, None)
    write_renamed(checkpoint / MARKER, (json.dumps({"version": version, "files": sizes}, indent=2) + "\n").encode())


def fault(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be resumed from, or None if it can."""
    if not (checkpoint / MARKER).is_file():
        return f"has no {MARKER}, its writing was interrupted"
    files = json.loads((checkpoint / MARKER).read_text())["files"]
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            return f"file {name} is missing or has another size"
    return None


def resolve_resume(request: str | None, directory: Path) -> Path | None:
    """Turn `--resume_from_checkpoint` into a complete checkpoint.

    Args:
        request: None or "false" to start anew, "true" for the newest complete checkpoint in `directory`, or a path.
        directory: the run's checkpoint directory.

    Raises:
        ConfigError: nothing to resume from, or the named checkpoint is incomplete.
    """
    if request is None or str(request).lower() in ("", "false"):
        return None
    if str(request).lower() != "true":
        reason = fault(Path(request))
        if reason is not None:
            raise ConfigError(f"cannot resume from {request}: it {reason}; name an older checkpoint")
        return Path(request).resolve()
    found = {int(m[1]): p for p in directory.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))}
    for step in sorted(found, reverse=True):
        reason = fault(found[step])
        if reason is None:
            return found[step]
        logger.warning("skipping %s: it %s", found[step].name, reason)
    raise ConfigError(f"no complete checkpoint in {directory}; start without --resume_from_checkpoint")
