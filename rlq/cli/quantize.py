"""`rlq quantize`: write a quantized checkpoint and print the error of every weight."""

import argparse
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..errors import ConfigError
from ..formats.modules import parse_per_layer
from ..formats.schemes import PRESETS, Scheme
from ..publish.convert import QuantizedWeight, quantize_checkpoint
from ..recipes.base import needs
from .outcome import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `rlq quantize`."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="checkpoint directory: config.json and safetensors")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write; must not exist or be empty")
    parser.add_argument("--scheme", required=True, metavar="NAME", help="one of " + ", ".join(PRESETS))
    parser.add_argument(
        "--ignore", action="append", metavar="PATTERN", help="module to keep in bf16, besides the default"
    )
    parser.add_argument(
        "--per-layer", action="append", default=[], metavar="PATTERN=SCHEME", help="another scheme for matching modules"
    )
    parser.add_argument(
        "--recipe", action="append", default=[], metavar="NAME", help="what is done to weights besides rounding"
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="texts, one a line, for static activation scales"
    )


def run(args: argparse.Namespace) -> Outcome:
    """Quantize, print the table of errors, and fail on anything that is not a clean result."""
    scheme = _scheme(args)
    if scheme.weights is None and not scheme.per_layer:
        raise ConfigError(f"scheme {scheme.name!r} quantizes nothing; copy the directory instead")
    rows, totals = quantize_checkpoint(args.model, args.out, scheme, args.calibration)
    _print(rows, totals)
    return Outcome(
        {**totals, "out": str(args.out), "scheme": scheme.to_dict(), "weights": [asdict(row) for row in rows]}
    )


def _scheme(args: argparse.Namespace) -> Scheme:
    per_layer = parse_per_layer(args.per_layer, "--per-layer")
    scheme = Scheme.preset(args.scheme, per_layer=per_layer)
    ignore = [*scheme.ignore, *(args.ignore or [])]
    static = scheme.static or (args.calibration is not None and scheme.name == "nvfp4")
    scheme = Scheme.preset(args.scheme, ignore=ignore, per_layer=per_layer, static=static, recipe=args.recipe)
    if args.calibration is not None and not needs(scheme):
        raise ConfigError(f"scheme {scheme.name!r} has no static scales to calibrate; leave --calibration out")
    return scheme


def _print(rows: list[QuantizedWeight], totals: dict) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("weight", "scheme", "SQNR dB", "max error", "saturated", "to zero"):
        table.add_column(column, justify="left" if column in ("weight", "scheme") else "right")
    for row in rows:
        q = row.quality
        cells = (f"{q.sqnr_db:.1f}", f"{q.max_error:.2e}", f"{q.saturated_frac:.3%}", f"{q.zero_frac:.3%}")
        table.add_row(row.name, row.scheme, *cells)
    Console(width=140).print(table)
    for text, kind in (("whole model", ""), ("quantized weights", "quantized_")):
        before, after = totals[f"{kind}bytes_before"], totals[f"{kind}bytes_after"]
        print(f"{text}: {before / 1e6:.1f} MB in bf16, {after / 1e6:.1f} MB quantized ({after / before:.1%})")
    for note in totals["notes"]:
        print(note)
