"""Prepare a version beside the one that is served, so that switching to it is a few assignments.

Codes are decoded, dequantized and compared module by module while the engine goes on serving. What changed in a few
places is kept as positions and values; what changed in many is kept whole and takes the old tensor's place.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from rlq.delta import Patch, flat_integers
from rlq.publish import own_digest

from .emulated import EmulatedLinearMethod
from .storage import slots

SPARSE = 8
"""A tensor is patched if at most one in so many elements changed: a position takes twice the bytes of a value."""


@dataclass(frozen=True)
class Write:
    """New values for one parameter of the engine."""

    parameter: torch.nn.Parameter
    """Where they go."""
    where: torch.Tensor | None
    """Flat positions (int64), or None for all of it."""
    values: torch.Tensor
    """As many, in the parameter's dtype."""

    def apply(self) -> None:
        """Make them the engine's."""
        if self.where is not None:
            self.parameter.data.view(-1)[self.where] = self.values
        elif self.parameter.device.type == "cpu":
            self.parameter.data = self.values
        else:
            self.parameter.data.copy_(self.values)  # captured graphs hold the address


@dataclass(frozen=True)
class Packed:
    """The head's next matrix product: on a CPU it computes with a packed copy of the weight, which goes stale."""

    head: torch.nn.Module
    """The head."""
    product: Callable
    """`cpu_linear` of the next version."""

    def apply(self) -> None:
        """Make it the engine's."""
        self.head.cpu_linear = self.product  # type: ignore[assignment]  # vLLM's attribute, not a parameter


Step = tuple[list[Write | Packed], dict[str, bytes]]


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
        fresh = change if isinstance(change, torch.Tensor) else _patched(slot.read(), change)
        digests.setdefault(key, {})[name] = own_digest(name, fresh)
        image = images.setdefault(key, {})
        if slot.leaf not in image:
            # A patch leaves the rest as it is, and so does a tensor that is one shard of a fused parameter.
            image[slot.leaf] = getattr(slot.module, slot.leaf).data.clone()
        slot.write(fresh, image[slot.leaf])
        missing[key] -= 1
        if not missing[key]:
            image = images.pop(key)
            yield [*_writes(slot.module, image), *_packed(model, slot.module, image)], digests.pop(key)


def _patched(tensor: torch.Tensor, patch: Patch) -> torch.Tensor:
    patch.apply_(flat_integers(tensor))
    return tensor


def _writes(module: torch.nn.Module, image: dict[str, torch.Tensor]) -> list[Write]:
    """What turns a module's parameters, and what it derives from them, into those of the image."""
    parameters = dict(module.named_parameters(recurse=False))
    method = getattr(module, "quant_method", None)
    if isinstance(method, EmulatedLinearMethod):
        image |= method.derive(module, parameters | image)
    return [write for leaf, new in image.items() if (write := _difference(parameters[leaf], new)) is not None]


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


def _difference(parameter: torch.nn.Parameter, new: torch.Tensor) -> Write | None:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[new.element_size()]
    old = parameter.data
    if not (old.is_contiguous() and new.is_contiguous()):
        return Write(parameter, None, new)
    differs = old.view(-1).view(integer) != new.view(-1).view(integer)
    count = int(differs.count_nonzero())
    if count * SPARSE > new.numel():
        return Write(parameter, None, new)
    if count == 0:
        return None
    where = differs.nonzero()[:, 0]
    return Write(parameter, where, new.view(-1)[where])
