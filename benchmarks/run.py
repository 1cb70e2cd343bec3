"""Run every benchmark, one after the other, and write the tables into docs/results.md."""

import argparse
import datetime
import json
import subprocess
import sys

from support.common import RESULTS, ROOT, write_block

BENCHMARKS = {
    "bridge": "bridge.py",
    "quantize": "quantize.py",
    "sampler": "sampler.py",
    "sync": "sync.py",
    "delta": "delta.py",
    "step": "step.py",
    "overlap": "step.py --overlap",
    "runs": "runs.py",
    "kill": "kill.py",
    "publish": "publish.py",
    "share": "share.py",
}


def tables() -> list[str]:
    """The lines of one Markdown table per benchmark."""
    lines = []
    for name in BENCHMARKS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            lines += ["", f"### {name}", "", "| what | measured | goal | |", "|---|---|---|---|"]
            for row in json.loads(path.read_text())["rows"]:
                mark = {True: "ok", False: "**missed**", None: ""}[row["ok"]]
                what = row["what"].replace("|", r"\|")
                lines.append(f"| {what} | {row['value']:.4g} | {row['goal']} | {mark} |")
    return [*lines, ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help=f"benchmarks to run, of {', '.join(BENCHMARKS)}; default all")
    names = parser.parse_args().only or list(BENCHMARKS)
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, *BENCHMARKS[name].split()], cwd=ROOT / "benchmarks").returncode:
            failed.append(name)
    write_block("results.md", "bench", [f"Written by `make bench` on {datetime.date.today()}.", *tables()])
    print(f"failed: {', '.join(failed)}" if failed else "written to docs/results.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
