"""Run every benchmark, one after the other, and write the table into docs/log.md."""

import argparse
import datetime
import json
import subprocess
import sys

from support.common import RESULTS, ROOT

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
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def table() -> str:
    """All results as one Markdown table."""
    lines = ["| benchmark | what | measured | goal | |", "|---|---|---|---|---|"]
    for name in BENCHMARKS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            for row in result["rows"]:
                mark = {True: "ok", False: "**missed**", None: ""}[row["ok"]]
                what = row["what"].replace("|", r"\|")
                lines.append(f"| {name} | {what} | {row['value']:.4g} | {row['goal']} | {mark} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help=f"benchmarks to run, of {', '.join(BENCHMARKS)}; default all")
    names = parser.parse_args().only or list(BENCHMARKS)
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, *BENCHMARKS[name].split()], cwd=ROOT / "benchmarks").returncode:
            failed.append(name)
    log = ROOT / "docs/log.md"
    head, rest = log.read_text().split(BEGIN)
    tail = rest.split(END)[1]
    stamp = f"Written by `make bench` on {datetime.date.today()}."
    log.write_text(f"{head}{BEGIN}\n{stamp}\n\n{table()}\n{END}{tail}")
    print(f"failed: {', '.join(failed)}" if failed else "written to docs/log.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
