"""Prepare a version beside the one that is served, so that switching to it is a few assignments.

Codes are decoded, dequantized and compared module by module while the engine goes on serving. What changed in a few
places is kept as positions and values; what changed in many is kept whole and takes the old tensor's place.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlq.delta import Patch, flat_integers
from rlq.delta_codec import differing
from rlq.publish import own_digest

from .emulated import EmulatedLinearMethod
from .storage import is_padded, slots

SPARSE = 8
"""A tensor is patched if at most one in so many elements changed: a position takes as much as the value."""


@dataclass
class Write:
    """A parameter's next values. Applied, it holds the last ones, so that freeing them is no part of the pause."""

    parameter: torch.nn.Parameter
    """Where they go."""
    values: torch.Tensor
    """All of them."""

    def apply(self) -> None:
        """Make them the engine's."""
        if self.parameter.device.type == "cpu":
            self.parameter.data, self.values = self.values, self.parameter.data
        else:
            self.parameter.data.copy_(self.values)  # captured graphs hold the address


@dataclass(frozen=True)
class Steps:
    """What changes in a parameter on the CPU."""

    parameter: torch.nn.Parameter
    """Where."""
    where: np.ndarray
    """Flat positions, ascending."""
    steps: np.ndarray
    """New minus old there, as the unsigned integers that the elements are stored as."""

    def apply(self) -> None:
        """Make them."""
        flat_integers(self.parameter.data)[self.where] += self.steps


@dataclass
class Packed:
    """The head's next matrix product: on a CPU it computes with a packed copy of the weight, which goes stale."""

    head: torch.nn.Module
    """The head."""
    product: Callable
    """`cpu_linear` of the next version; applied, that of the last."""

    def apply(self) -> None:
        """Make it the engine's."""
        self.head.cpu_linear, self.product = self.product, self.head.cpu_linear  # type: ignore[assignment]


Step = tuple[list[Write | Steps | Packed], dict[str, bytes]]


def prepare(
    model: torch.nn.Module, changes: Iterable[tuple[str, torch.Tensor | Patch]], names: Iterable[str]
) -> Iterator[Step]:
    """Yield, module by module, what to write and the digests of the wire tensors that the writes will leave.

    Args:
        model: vLLM model that is `rlq`'s throughout, see `storage.placeable`; it is read, not changed.
        changes: new wire tensors, or patches to them, in the order of `names`.
        names: all names in `changes`.
    """
    known = slots(model)
    missing = Counter(id(known[name].module) for name in names)
    images: dict[int, dict[str, torch.Tensor]] = {}
    digests: dict[int, dict[str, bytes]] = {}
    for name, change in changes:
        slot = known[name]
        key = id(slot.module)
        whole = isinstance(change, torch.Tensor)
        fresh = change if whole else change.apply_to(slot.read())
        digests.setdefault(key, {})[name] = own_digest(name, fresh)
        image = images.setdefault(key, {})
        if slot.leaf not in image:
            data = getattr(slot.module, slot.leaf).data
            # What a patch, or the padding of a vocabulary, leaves as it is has to be there.
            image[slot.leaf] = torch.empty_like(data) if whole and not is_padded(slot.module) else data.clone()
        slot.write(fresh, image[slot.leaf])
        missing[key] -= 1
        if not missing[key]:
            del fresh, change
            image = images.pop(key)
            yield [*_writes(slot.module, image, whole), *_packed(model, slot.module, image)], digests.pop(key)


def _writes(module: torch.nn.Module, image: dict[str, torch.Tensor], whole: bool) -> list[Write | Steps]:
    """What turns a module's parameters, and what it derives from them, into those of the image."""
    parameters = dict(module.named_parameters(recurse=False))
    method = getattr(module, "quant_method", None)
    if isinstance(method, EmulatedLinearMethod):
        image |= method.derive(module, parameters | image)
    return [
        Write(parameters[leaf], new) if whole else _difference(parameters[leaf], new) for leaf, new in image.items()
    ]


def _packed(model: torch.nn.Module, module: torch.nn.Module, image: dict[str, torch.Tensor]) -> list[Packed]:
    """The head's product, if the image holds its weight; a tied head's weight is the embedding's."""
    head = getattr(model, "lm_head", None)
    if head is None or "weight" not in image or not hasattr(head, "cpu_linear") or module.weight is not head.weight:
        return []
    stand_in = torch.nn.Module()
    stand_in.weight = torch.nn.Parameter(image["weight"], requires_grad=False)
    head.quant_method.process_weights_after_loading(stand_in)  # type: ignore[union-attr]
    return [Packed(head, stand_in.cpu_linear)]  # type: ignore[arg-type]


def drop_unused_pack(model: torch.nn.Module) -> None:
    """Free the packed copy that vLLM makes of an embedding even if the head that is tied to it has its own."""
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module is not head and head is not None and module.weight is head.weight:
            del module.cpu_linear


def _difference(parameter: torch.nn.Parameter, new: torch.Tensor) -> Write | Steps:
    old = parameter.data
    if old.device.type != "cpu" or not (old.is_contiguous() and new.is_contiguous()):
        return Write(parameter, new)
    where, steps = differing(flat_integers(old), flat_integers(new))
    # Copies: what was found lies in room for a change of everything.
    return Write(parameter, new) if where.size * SPARSE > new.numel() else Steps(parameter, where.copy(), steps.copy())
