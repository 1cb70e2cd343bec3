"""Prepare a version beside the one that is served, so that switching to it is a few assignments.

Codes are decoded, dequantized and compared module by module while the engine goes on serving. What changed in a few
places is kept as positions and values; what changed in many is kept whole and takes the old tensor's place.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlq.publish import Snapshot, own_digest
from rlq.publish.codec import differing
from rlq.publish.delta import Delta, Patch, flat_integers

from .cpu_head import PackedProduct, Product, head_of, new_product
from .linear_method import COMPUTE_WEIGHT, EmulatedLinearMethod
from .slots import Slot, is_padded, slots

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
    """What changes in a parameter on the CPU, or in what is packed from it."""

    integers: np.ndarray
    """Where: flat, as the unsigned integers that the elements are stored as."""
    where: np.ndarray
    """Positions there, each once."""
    steps: np.ndarray
    """New minus old."""

    def apply(self) -> None:
        """Make them."""
        self.integers[self.where] += self.steps


@dataclass
class Repacked:
    """The head's next product, packed anew. Applied, it holds the last one."""

    head: torch.nn.Module
    """The head."""
    product: Product
    """Its next `cpu_linear`."""

    def apply(self) -> None:
        """Make it the engine's."""
        self.head.cpu_linear, self.product = self.product, self.head.cpu_linear  # type: ignore[assignment]


Step = tuple[list[Write | Steps | Repacked], dict[str, bytes]]


def prepare(model: torch.nn.Module, version: Snapshot | Delta) -> Iterator[Step]:
    """Yield, module by module, what to write and the digests of the wire tensors that the writes will leave.

    Args:
        model: vLLM model that is `rlq`'s throughout, see `storage.placeable`; it is read, not changed.
        version: fits the model; a delta, the version that it serves.
    """
    whole = isinstance(version, Snapshot)
    names, changes = (version.tensors, version.tensors.items()) if whole else (version.names, version.patches())
    known = slots(model)
    missing = Counter(id(known[name].module) for name in names)
    images: dict[int, dict[str, torch.Tensor]] = {}
    digests: dict[int, dict[str, bytes]] = {}
    for name, change in changes:
        slot = known[name]
        key = id(slot.module)
        missing[key] -= 1
        patched = _patched(model, name, slot, change) if isinstance(change, Patch) else None
        if patched is not None:
            yield patched
        else:
            fresh = change.apply_to(slot.read()) if isinstance(change, Patch) else change
            digests.setdefault(key, {})[name] = own_digest(name, fresh)
            image = images.setdefault(key, {})
            if slot.leaf not in image:
                data = getattr(slot.module, slot.leaf).data
                # What a patch, or the padding of a vocabulary, leaves as it is has to be there.
                image[slot.leaf] = torch.empty_like(data) if whole and not is_padded(slot.module) else data.clone()
            slot.write(fresh, image[slot.leaf])
            del fresh
        del change
        if key in images and not missing[key]:
            image = images.pop(key)
            yield [*_writes(slot.module, image, whole), *_repacked(model, slot.module, image)], digests.pop(key)


def _writes(module: torch.nn.Module, image: dict[str, torch.Tensor], whole: bool) -> list[Write | Steps]:
    """What turns a module's parameters, and what it derives from them, into those of the image."""
    parameters = dict(module.named_parameters(recurse=False))
    method = getattr(module, "quant_method", None)
    change = Write if whole else _difference
    writes = [change(parameters[leaf], new) for leaf, new in image.items()]
    if not isinstance(method, EmulatedLinearMethod):
        return writes
    rows = None if whole else _changed_rows(method, dict(zip(image, writes, strict=True)), parameters)
    if rows is not None and not len(rows):
        return writes
    derived = method.derive(module, parameters | image, rows)
    if rows is not None:
        return [*writes, _difference(parameters[COMPUTE_WEIGHT], derived[COMPUTE_WEIGHT], rows)]
    return [*writes, *(change(parameters[leaf], new) for leaf, new in derived.items())]


def _changed_rows(
    method: EmulatedLinearMethod, writes: dict[str, Write | Steps], parameters: dict[str, torch.nn.Parameter]
) -> torch.Tensor | None:
    """Rows whose derived values may change, ascending; None if those are many, or all."""
    found = [np.empty(0, np.int64)]
    for leaf, write in writes.items():
        if leaf == "bias":
            continue
        if leaf in method.per_shard or isinstance(write, Write):
            return None
        found.append(write.where // (parameters[leaf].numel() // len(parameters[leaf])))
    rows = np.unique(np.concatenate(found))
    return torch.from_numpy(rows) if 2 * rows.size < len(parameters[COMPUTE_WEIGHT]) else None


def _repacked(model: torch.nn.Module, module: torch.nn.Module, image: dict[str, torch.Tensor]) -> list[Repacked]:
    """The head's product, if the image holds its weight; a tied head's weight is the embedding's."""
    found = head_of(model)
    if found is None or "weight" not in image or module.weight is not found.weight:
        return []
    return [Repacked(found, new_product(found, image["weight"]))]


def _patched(model: torch.nn.Module, name: str, slot: Slot, patch: Patch) -> Step | None:
    """What `prepare` yields for few changes to embeddings or the like, without a second copy of them.

    None if much changes, if values are derived from the tensor, or if it does not lie in this memory as published.
    """
    stored, where = slot.stored, patch.where
    if where is None or where.size * SPARSE > stored.numel():
        return None
    derives = slot.shards > 1 or isinstance(getattr(slot.module, "quant_method", None), EmulatedLinearMethod)
    if derives or stored.device.type != "cpu" or not stored.is_contiguous():
        return None
    found, places = head_of(model), None
    if found is not None and slot.leaf == "weight" and slot.module.weight is found.weight:
        places = found.cpu_linear.places(where) if isinstance(found.cpu_linear, PackedProduct) else None
        if places is None:
            return None
    old = stored.view(-1)[torch.from_numpy(where)]
    wire = old.to(slot.dtype, copy=True)
    flat_integers(wire)[:] += patch.values
    steps = flat_integers(wire.to(old.dtype)) - flat_integers(old)
    writes: list[Write | Steps | Repacked] = [Steps(flat_integers(stored), where, steps)]
    if found is not None and places is not None:
        writes.append(Steps(found.cpu_linear.integers, places, steps))
    return writes, {name: slot.own_digest(name, patch)}


def _difference(parameter: torch.nn.Parameter, new: torch.Tensor, rows: torch.Tensor | None = None) -> Write | Steps:
    """What turns a parameter, or some rows of it, into `new`."""
    old = parameter.data
    if rows is not None:
        where, steps = differing(flat_integers(old[rows]), flat_integers(new))
        row, column = np.divmod(where, old.shape[1])
        return Steps(flat_integers(old), rows.numpy()[row] * old.shape[1] + column, steps.copy())
    if old.device.type != "cpu" or not (old.is_contiguous() and new.is_contiguous()):
        return Write(parameter, new)
    integers = flat_integers(old)
    where, steps = differing(integers, flat_integers(new))
    # Copies: what was found lies in room for a change of everything.
    return Write(parameter, new) if where.size * SPARSE > new.numel() else Steps(integers, where.copy(), steps.copy())
