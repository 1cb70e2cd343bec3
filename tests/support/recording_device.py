"""A pretended accelerator on a CPU: tensors report another device, and every copy to the host is recorded."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

DEVICE = torch.device("meta")  # the one other device type that every build of torch knows


class OnDevice(torch.Tensor):
    """Holds CPU data and says that it lives on `DEVICE`; numpy and the host cannot see it without a copy."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        tensor.inner = inner
        return tensor

    def data_ptr(self) -> int:
        """Address of the data, which tells tied tensors."""
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of a RecordingDevice")


@dataclass(frozen=True)
class Copy:
    """One copy to the host."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class RecordingDevice(TorchDispatchMode):
    """Computes what is on the device with CPU kernels, and keeps the devices apart."""

    copies: list[Copy] = field(default_factory=list)
    """Copies to the host, single numbers left out."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        found: list[OnDevice] = []
        tree_map_only(OnDevice, found.append, (args, kwargs))
        wanted = kwargs.get("device")
        here = bool(found) if wanted is None else torch.device(wanted).type == DEVICE.type
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], OnDevice) and found:
            self._record(found[0])
        plain_args, plain_kwargs = tree_map_only(OnDevice, lambda t: t.inner, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if found and not here:
            self._record(found[0])
            out = out.clone() if isinstance(out, torch.Tensor) else out
        return tree_map(self._wrap, out) if here else out

    def _record(self, tensor: OnDevice) -> None:
        if tensor.numel() > 1:
            self.copies.append(Copy(tensor.dtype, tuple(tensor.shape)))

    @staticmethod
    def _wrap(value: Any) -> Any:
        return OnDevice(value) if type(value) is torch.Tensor else value
