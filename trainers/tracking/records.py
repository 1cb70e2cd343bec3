"""JSONL files of a run: one JSON object per line, appended as it happens."""

import json
import math
from pathlib import Path
from typing import Any

from rlq.files import write_renamed

FILE = "metrics.jsonl"


def append(path: Path, *records: dict[str, Any]) -> None:
    """Append records; a non-finite number becomes null, which every JSON reader accepts."""
    with path.open("a") as file:
        for record in records:
            clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            file.write(json.dumps(clean) + "\n")


def load(path: Path) -> list[dict[str, Any]]:
    """Read all records; a last line that a crash cut short is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def truncate_after(path: Path, step: int) -> None:
    """Drop records beyond `step`, which a resumed run is about to write again."""
    if path.exists():
        kept = [json.dumps(r) + "\n" for r in load(path) if r["step"] <= step]
        write_renamed(path, "".join(kept).encode())
