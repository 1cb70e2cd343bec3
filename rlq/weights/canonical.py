"""From a learner's parameters to the published bf16 checkpoint: canonical names, explicit cast, tied heads once."""

import math
import re
from collections.abc import Iterable

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


def bf16_checkpoint(
    named_tensors: Iterable[tuple[str, torch.Tensor]], *, check: bool = True
) -> dict[str, torch.Tensor]:
    """Cast a learner's parameters to the bf16 checkpoint that samplers are quantized from.

    A learner usually holds fp32 masters; casting here, once, makes "the policy at version v" one well-defined set of
    bf16 values on both sides. A tensor that appears under two names (a tied head) is kept under the first.

    Args:
        named_tensors: `model.named_parameters()` or the items of a gathered state dict; any device and float dtype.
        check: look for non-finite values; False for who does so while reading the tensors anyway.

    Returns:
        Contiguous bf16 CPU tensors by canonical name; storage may be shared with a bf16 CPU input.

    Raises:
        SnapshotError: unmerged adapters, two tensors with one canonical name, or a non-finite value.
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
        out[name] = tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
    if check:
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
