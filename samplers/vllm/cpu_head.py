"""The head on a CPU: a product with a packed copy of its weight, of which a delta overwrites only what it changes.

oneDNN, which multiplies here, wants a large matrix in blocks that suit its loops. Where an element lies in that copy is
the sum of something that depends on its row and something that depends on its column, so a patch to the weight is one
to the copy as well; packing anew would take as much memory as the weight.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlq.publish.delta import flat_integers

BATCH = 32
"""Rows of the input that the blocks suit best; vLLM's choice."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Of an input, the weight and a bias."""


class PackedProduct:
    """`x @ weight.T + bias` on the CPU with a packed copy of the weight, bit for bit what vLLM's own product gives.

    Args:
        weight: float32 (rows, columns).
    """

    def __init__(self, weight: torch.Tensor):
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH)
        self._offsets = _offsets(tuple(weight.shape))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply; vLLM passes the weight, which is not read."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    @property
    def integers(self) -> np.ndarray:
        """The copy as it lies in memory, flat uint32; writing to it changes the product."""
        return _memory(self._packed)

    def places(self, where: np.ndarray) -> np.ndarray | None:
        """Positions in `integers` of flat positions in the weight; None if the copy's layout follows no rule."""
        if self._offsets is None:
            return None
        by_row, by_column = self._offsets
        row, column = np.divmod(where, len(by_column))
        return by_row[row] + by_column[column]


def repack(model: Any) -> None:
    """Give a model on the CPU the product with its head's weight as it is now.

    An embedding that is the head's weight as well loses the packed copy that vLLM makes of it and never uses.
    """
    head = head_of(model)
    if head is None:
        return
    for module in model.modules():
        if module is not head and hasattr(module, "cpu_linear") and module.weight is head.weight:
            del module.cpu_linear
    head.cpu_linear = None  # first, so that there is room
    head.cpu_linear = new_product(head, head.weight.data)


def head_of(model: Any) -> Any | None:
    """The head, if it lies on the CPU, where vLLM calls its `cpu_linear`."""
    head = getattr(model, "lm_head", None)
    return head if hasattr(head, "cpu_linear") else None


def new_product(head: Any, weight: torch.Tensor) -> Product:
    """The product with a weight of the head: ours, or vLLM's for what torch does not pack."""
    if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return PackedProduct(weight)
    stand_in: Any = torch.nn.Module()
    stand_in.weight = torch.nn.Parameter(weight, requires_grad=False)
    head.quant_method.process_weights_after_loading(stand_in)
    del stand_in.weight  # vLLM leaves a cycle behind, which would keep the weight until Python looks for cycles
    return stand_in.cpu_linear


@functools.cache
def _offsets(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray] | None:
    """What a row and a column add to the place of an element, int64, found by packing matrices that tell."""
    rows, columns = shape
    probe = torch.zeros(shape)
    found = []
    for line in (probe[:, 0], probe[0]):
        line.copy_(torch.arange(1, len(line) + 1))
        packed = torch.ops.mkldnn._reorder_linear_weight(probe, BATCH)
        memory = _memory(packed).view(np.float32)
        at = np.flatnonzero(memory)
        offsets = np.empty(len(line), np.int64)
        offsets[memory[at].astype(np.int64) - 1] = at
        found.append(offsets)
        line.zero_()
    by_row, by_column = found[0], found[1] - found[0][0]
    wanted = flat_integers(probe).reshape(shape)
    wanted[:] = np.arange(columns, dtype=np.uint32)  # any bits: packing copies
    wanted *= np.uint32(0x9E3779B1)
    wanted += np.arange(rows, dtype=np.uint32)[:, None]
    memory = _memory(torch.ops.mkldnn._reorder_linear_weight(probe, BATCH))
    inside = by_row.min() + by_column.min() >= 0 and by_row.max() + by_column.max() < memory.size
    agree = inside and all((memory[base + by_column] == row).all() for base, row in zip(by_row, wanted, strict=True))
    return (by_row, by_column) if agree else None


def _memory(packed: torch.Tensor) -> np.ndarray:
    """What a tensor in oneDNN's own layout holds, as uint32, without a copy."""
    size = torch.ops.mkldnn._nbytes(packed) // 4
    cells = (ctypes.c_uint32 * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    cells.owner = packed  # type: ignore[attr-defined]  # lives as long as whoever writes to it
    return np.frombuffer(cells, np.uint32)
