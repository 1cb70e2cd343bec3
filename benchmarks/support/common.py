"""Shared by the benchmarks: interleaved medians, the load they ran under, and the result file."""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs/models/sort_digits"
RESULTS = ROOT / "benchmarks/results"


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 2) -> dict[str, float]:
    """Run each side once per round, in turn, and return the median of what each returned (seconds, say)."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(warmup + rounds):
        for name, side in sides.items():
            value = side()
            if round_ >= warmup:
                values[name].append(value)
    return {name: statistics.median(v) for name, v in values.items()}


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(name: str, rows: list[dict[str, Any]]) -> None:
    """Print rows (`what`, `value`, `goal`, `ok`); keep them and the load in benchmarks/results/<name>.json."""
    load = os.getloadavg()[0]
    for row in rows:
        mark = "" if row.get("ok") is None else ("ok  " if row["ok"] else "MISS")
        print(f"{mark:4} {row['what']}: {row['value']:.4g}" + (f"  (goal {row['goal']})" if row.get("goal") else ""))
    print(f"     load average {load:.1f} on {os.cpu_count()} cores")
    RESULTS.mkdir(exist_ok=True)
    payload = {"benchmark": name, "load_average": load, "cores": os.cpu_count(), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(payload, indent=2) + "\n")


def row(what: str, value: float, goal: str = "", ok: bool | None = None) -> dict[str, Any]:
    """One line of a report."""
    return {"what": what, "value": float(value), "goal": goal, "ok": None if ok is None else bool(ok)}


def write_block(page: str, name: str, lines: list[str]) -> None:
    """Replace what stands between the markers `<!-- name:begin -->` and `<!-- name:end -->` of a page of docs/."""
    path = ROOT / "docs" / page
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, rest = path.read_text().split(begin)
    path.write_text("\n".join([head + begin, *lines, end + rest.split(end)[1]]))
