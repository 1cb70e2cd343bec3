"""Prepare a version beside the served one, so that switching to it is a few assignments.

Codes are decoded, dequantized and compared module by module while the engine goes on serving. What changed in a few
places is kept as positions and values; what changed in many is kept whole and takes the old tensor's place.

On a CPU vLLM multiplies with a packed copy of the head's weight. It is packed anew here, through vLLM's own method.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlq.publish import Snapshot, own_digest
from rlq.publish.codec import differing
from rlq.publish.delta import Delta, Patch, flat_integers

from .linear_method import COMPUTE_WEIGHT, EmulatedLinearMethod
from .slots import Slot, is_padded, slots

SPARSE = 8
"""A tensor is patched if at most one in `SPARSE` elements changed: a position takes as much as the value."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Of an input, the weight and a bias."""


@dataclass
class Write:
    """A parameter's next values. `apply` swaps, so that the old tensor is freed after the pause."""

    parameter: torch.nn.Parameter
    values: torch.Tensor

    def apply(self) -> None:
        """Give the parameter its next values."""
        if self.parameter.device.type == "cpu":
            self.parameter.data, self.values = self.values, self.parameter.data
        else:
            self.parameter.data.copy_(self.values)  # captured graphs hold the address


@dataclass(frozen=True)
class Steps:
    """What changes in a few places of a parameter on the CPU."""

    integers: np.ndarray
    """The parameter's elements, flat, as the unsigned integers that they are stored as."""
    where: np.ndarray
    """Positions in `integers`, each once."""
    steps: np.ndarray
    """New minus old."""

    def apply(self) -> None:
        """Change them."""
        self.integers[self.where] += self.steps


@dataclass
class Repacked:
    """A head's next product; `apply` swaps."""

    head: torch.nn.Module
    product: Product

    def apply(self) -> None:
        """Give the head its next product."""
        self.head.cpu_linear, self.product = self.product, self.head.cpu_linear  # type: ignore[assignment]


Step = tuple[list[Write | Steps | Repacked], dict[str, bytes]]


def prepare(model: torch.nn.Module, version: Snapshot | Delta) -> Iterator[Step]:
    """Yield, module by module, what to write and the digests of the wire tensors that the writes will leave.

    Args:
        model: vLLM model that can be written in place, see `slots.placeable`; it is read, not changed.
        version: fits the model; a delta, the version that it serves.
    """
    whole = isinstance(version, Snapshot)
    names, changes = (version.tensors, version.tensors.items()) if whole else (version.names, version.patches())
    known, outputs = slots(model), heads(model)
    missing = Counter(id(known[name].module) for name in names)
    images: dict[int, dict[str, torch.Tensor]] = {}
    digests: dict[int, dict[str, bytes]] = {}
    for name, change in changes:
        slot = known[name]
        key = id(slot.module)
        missing[key] -= 1
        patched = _patched(outputs, name, slot, change) if isinstance(change, Patch) else None
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
            writes = [*_writes(slot.module, image, whole), *_repacked(outputs, slot.module, image)]
            yield writes, digests.pop(key)


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


def heads(model: torch.nn.Module) -> list[Any]:
    """The layers on a CPU that compute logits: heads, or embeddings in a model that has no head of its own."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    packed = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and hasattr(m, "cpu_linear")]
    return [m for m in packed if isinstance(m, ParallelLMHead)] or packed


def new_product(head: Any, weight: torch.Tensor) -> Product:
    """The product of `head` with another weight, as vLLM makes it."""
    stand_in: Any = torch.nn.Module()
    stand_in.weight = torch.nn.Parameter(weight, requires_grad=False)
    head.quant_method.process_weights_after_loading(stand_in)
    del stand_in.weight  # vLLM leaves a reference cycle behind, which would keep the weight until it is collected
    return stand_in.cpu_linear


def repack(model: torch.nn.Module) -> None:
    """Give the heads the products of their weights as they are now; runs in the engine.

    vLLM packs each embedding as well; a model with heads never multiplies with those copies, which are dropped.
    """
    outputs = heads(model)
    for module in model.modules():
        if hasattr(module, "cpu_linear") and hasattr(module, "num_embeddings") and module not in outputs:
            del module.cpu_linear
    for head in outputs:
        head.cpu_linear = None  # first, so that there is room
        head.cpu_linear = new_product(head, head.weight.data)


def _repacked(outputs: list[Any], module: torch.nn.Module, image: dict[str, torch.Tensor]) -> list[Repacked]:
    """Products of the heads whose weight the image holds; a tied head's weight is the embedding's."""
    if "weight" not in image:
        return []
    return [Repacked(head, new_product(head, image["weight"])) for head in outputs if head.weight is module.weight]


def _patched(outputs: list[Any], name: str, slot: Slot, patch: Patch) -> Step | None:
    """What `prepare` yields for few changes to embeddings or the like, without a second copy of them.

    None if much changes, if something is derived from the tensor, or if it does not lie in this memory as published.
    """
    stored, where = slot.stored, patch.where
    if where is None or where.size * SPARSE > stored.numel():
        return None
    derives = slot.shards > 1 or isinstance(getattr(slot.module, "quant_method", None), EmulatedLinearMethod)
    derives = derives or any(slot.leaf == "weight" and slot.module.weight is head.weight for head in outputs)
    if derives or stored.device.type != "cpu" or not stored.is_contiguous():
        return None
    old = stored.view(-1)[torch.from_numpy(where)]
    wire = old.to(slot.dtype, copy=True)
    flat_integers(wire)[:] += patch.values
    steps = flat_integers(wire.to(old.dtype)) - flat_integers(old)
    return [Steps(flat_integers(stored), where, steps)], {name: slot.own_digest(name, patch)}


def _difference(parameter: torch.nn.Parameter, new: torch.Tensor, rows: torch.Tensor | None = None) -> Write | Steps:
    """What turns a parameter, or some rows of it, into `new`."""
    old = parameter.data
    if rows is not None:
        where, steps = differing(flat_integers(old[rows]), flat_integers(new))
        row, column = np.divmod(where, old.shape[1])
        return Steps(flat_integers(old), rows.numpy()[row] * old.shape[1] + column, steps)
    if old.device.type != "cpu" or not (old.is_contiguous() and new.is_contiguous()):
        return Write(parameter, new)
    integers = flat_integers(old)
    where, steps = differing(integers, flat_integers(new))
    return Write(parameter, new) if where.size * SPARSE > new.numel() else Steps(integers, where, steps)
