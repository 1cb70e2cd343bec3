"""`rlq formats`: the number formats and schemes as tables that a reader can hold against the OCP specifications."""

import argparse
import math

import torch
from rich.console import Console
from rich.table import Table

from ..formats.elements import BLOCKS, ELEMENTS, Format
from ..formats.schemes import GRANULARITIES, PRESETS, TensorScheme
from .outcome import Outcome

MATRIX = torch.Size((4096, 4096))
SHOWN = ("fp8.tensor", "fp8.channel", "fp8.block128x128", "int8.channel", "int4.group128", "int4.group32", *BLOCKS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`rlq formats` has no options of its own."""


def run(args: argparse.Namespace) -> Outcome:
    """Print element formats, what scales cost, and presets."""
    elements = [_element(element) for element in ELEMENTS.values()]
    schemes = [overhead(TensorScheme.parse(name)) for name in SHOWN]
    presets = [
        {"preset": name, "weights": str(s.weights or "bf16"), "activations": str(s.activations or "-")}
        for name, s in PRESETS.items()
    ]
    _print("element formats", elements)
    _print(f"scales of a {MATRIX[0]} x {MATRIX[1]} weight", schemes)
    _print("presets (granularities: " + ", ".join(GRANULARITIES) + ")", presets)
    return Outcome({"elements": elements, "schemes": schemes, "presets": presets})


def overhead(scheme: TensorScheme, shape: torch.Size = MATRIX) -> dict:
    """What the scales of a weight cost: bytes, share of the codes, and bits per weight in all."""
    block = scheme.block_format
    scale_bits = 32 if block is None else ELEMENTS[block.scale].bits
    scales = math.prod(scheme.scale_shape(shape))
    scale_bytes = scales * scale_bits // 8 + (4 if block is not None and block.tensor_scale else 0)
    code_bytes = shape.numel() * scheme.element.bits // 8
    return {
        "scheme": str(scheme),
        "scale": "fp32" if block is None else ELEMENTS[block.scale].standard,
        "code bytes": code_bytes,
        "scale bytes": scale_bytes,
        "overhead": f"{scale_bytes / code_bytes:.4%}",
        "bits per weight": round((code_bytes + scale_bytes) * 8 / shape.numel(), 4),
    }


def _element(element: Format) -> dict:
    """One row; powers of two are written as such, because that is how the specifications write them."""
    layout = "two's complement" if element.kind == "int" and not element.bias else "offset binary"
    if element.kind == "float":
        layout = f"S{int(element.signed)} E{element.exponent_bits} M{element.mantissa_bits}, bias {element.bias}"
    return {
        "format": element.name,
        "standard": element.standard,
        "bits": element.bits,
        "layout": layout,
        "largest": _power(element.max_finite),
        "smallest normal": _power(element.min_normal),
        "smallest": _power(element.min_positive),
        "ulp at 1": _power(element.ulp_at_one),
        "NaN": " ".join(f"{code:#04x}" for code in element.nan_codes) or "-",
        "infinity": " ".join(f"{code:#04x}" for code in element.inf_codes) or "-",
    }


def _power(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and abs(exponent - 1) > 2 else f"{value:g}"


def _print(title: str, rows: list[dict]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row.values()))
    Console(width=140).print(table)
    print()
