"""How statistics of a batch combine over the ranks that share it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Reducer(Protocol):
    """How 1-D float64 tensors combine over the ranks that share a batch; every rank makes the same calls."""

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over ranks."""
        ...


@dataclass(frozen=True)
class DistributedReducer:
    """Reduce over a `torch.distributed` process group."""

    group: torch.distributed.ProcessGroup | None = None
    """Ranks that share the batch; None is the default group."""

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks."""
        values = values.clone()
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.SUM, self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over ranks."""
        values = values.clone()
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, self.group)
        return values
