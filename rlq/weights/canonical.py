"""From a learner's parameters to the published bf16 checkpoint: canonical names, explicit cast, tied heads once."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from ..errors import SnapshotError
from ..quantize import largest_magnitude

# What torch.compile, DDP, FSDP, activation checkpointing and PEFT put into parameter names.
WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|^module|base_layer|^base_model\.model)\."
)
ADAPTERS = re.compile(r"\.(lora_[A-Za-z_]+|modules_to_save)\.")


def canonical_name(name: str) -> str:
    """Strip wrapper prefixes: `module._orig_mod.model.norm.weight` becomes `model.norm.weight`."""
    previous = None
    while previous != name:
        previous, name = name, WRAPPERS.sub("", name)
    return name


class Bf16(Mapping[str, torch.Tensor]):
    """A learner's tensors in bf16 by canonical name, cast when they are read, on the device on which they live.

    Reading returns a new tensor each time, so that nothing that is published shares memory with the learner.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes by name, without a cast."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name].detach()
        return tensor.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def bf16_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Bf16:
    """The bf16 checkpoint that samplers are quantized from, tensor by tensor.

    A learner usually holds fp32 masters; casting makes "the policy at version v" one well-defined set of bf16 values
    on both sides. A tensor that appears under two names (a tied head) is kept under the first.

    Args:
        named_tensors: `model.named_parameters()` or the items of a gathered state dict; any device and float dtype.

    Raises:
        SnapshotError: unmerged adapters, or two tensors with one canonical name.
    """
    out: dict[str, torch.Tensor] = {}
    seen: dict[tuple, torch.Tensor] = {}  # held, so that no address is handed out twice while names are compared
    for raw, tensor in named_tensors:
        if ADAPTERS.search(raw):
            raise SnapshotError(f"adapter tensor {raw!r} cannot be published; merge the adapter into the model first")
        name = canonical_name(raw)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen[key] = tensor
        if name in out:
            raise SnapshotError(
                f"two tensors are called {name!r} once wrappers are stripped; publish one model at a time"
            )
        out[name] = tensor
    return Bf16(out)


def bf16_checkpoint(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """`bf16_tensors`, all of them at once; raises SnapshotError for a value that is not finite, too."""
    out = dict(bf16_tensors(named_tensors))
    check_finite(out)
    return out


def check_finite(tensors: dict[str, torch.Tensor]) -> None:
    """Raise SnapshotError naming the first tensor that holds NaN or infinity, and how many."""
    for name, tensor in tensors.items():
        if not math.isfinite(largest_magnitude(tensor).item()):
            count = int((~torch.isfinite(tensor)).sum())
            raise SnapshotError(
                f"{count} non-finite values in {name!r}; the checkpoint is refused, samplers keep the last good version"
            )
