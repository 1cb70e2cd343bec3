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
    device: torch.device | None = None
    """Where the group's backend needs its tensors, such as a GPU for NCCL; None leaves them where they are."""

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks."""
        return self._reduced(values, torch.distributed.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over ranks."""
        return self._reduced(values, torch.distributed.ReduceOp.MAX)

    def _reduced(self, values: Tensor, operation: torch.distributed.ReduceOp.RedOpType) -> Tensor:
        there = values.to(self.device, copy=True)
        torch.distributed.all_reduce(there, operation, self.group)
        return there.to(values.device)
