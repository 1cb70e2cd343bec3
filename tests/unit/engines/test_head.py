"""The head's packed product: the product of its weight, and of a changed weight once the copy is patched."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from rlq.publish.delta import Patch, flat_integers
from samplers.vllm import cpu_head as head
from samplers.vllm.cpu_head import PackedProduct, head_of, new_product, repack

SHAPES = [(73, 160), (1000, 33), (5, 3), (33, 1), (1, 70), (4096, 64)]


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def agree(product: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Against torch's own product: sums of `columns` fp32 products, whatever their order."""
    x = matrix(7, weight.shape[1])
    torch.testing.assert_close(product(x, weight, bias), linear(x, weight, bias), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_has_a_place_of_its_own(shape):
    weight = matrix(*shape)
    product = PackedProduct(weight)
    places = product.places(np.arange(weight.numel()))
    assert places is not None
    assert len(np.unique(places)) == weight.numel()
    assert np.array_equal(product.integers[places], flat_integers(weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_patching_the_copy_is_packing_the_patched_weight(shape):
    weight = matrix(*shape)
    product = PackedProduct(weight)
    agree(product, weight, matrix(shape[0]))
    where = np.unique(np.random.default_rng(0).integers(0, weight.numel(), 40)).astype(np.int32)
    old, new = flat_integers(weight)[where], flat_integers(matrix(len(where)))
    flat_integers(weight)[where] = new
    places = product.places(where)
    assert places is not None
    product.integers[places] += new - old
    fresh = PackedProduct(weight)
    assert np.array_equal(product.integers, fresh.integers)
    x = matrix(9, shape[1])
    assert torch.equal(product(x, weight, None), fresh(x, weight, None))
    agree(product, weight)


def test_what_is_written_to_outlives_its_product():
    integers = PackedProduct(matrix(300, 70)).integers
    torch.randn(300, 70)  # would take the place of what is gone
    wanted = PackedProduct(matrix(300, 70)).integers
    assert np.array_equal(integers, wanted)


def test_a_layout_without_a_rule_is_noticed(monkeypatch):
    memory = head._memory
    order = np.random.default_rng(0).permutation(len(memory(PackedProduct(matrix(40, 24))._packed)))
    monkeypatch.setattr(head, "_memory", lambda packed: memory(packed)[order])
    head._offsets.cache_clear()
    try:
        product = PackedProduct(matrix(40, 24))
        assert product.places(np.array([3])) is None
        agree(product, matrix(40, 24))
    finally:
        head._offsets.cache_clear()


class Method:
    """Packs like vLLM: a copy of the weight, and a product that looks at nothing else."""

    def process_weights_after_loading(self, layer):
        copy = layer.weight.data.clone()
        layer.cpu_linear = lambda x, weight, bias: linear(x, copy, bias)


def tied(weight: torch.Tensor) -> Any:
    embedding, lm_head = torch.nn.Module(), torch.nn.Module()
    embedding.weight = lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    for module in (embedding, lm_head):
        module.quant_method = Method()  # type: ignore[assignment]
        module.quant_method.process_weights_after_loading(module)  # type: ignore[operator]
    model = torch.nn.Module()
    model.embed, model.lm_head = embedding, lm_head
    return model


def test_repacking_takes_the_weight_as_it_is_and_drops_the_embeddings_copy():
    model = tied(matrix(29, 8))
    repack(model)
    assert not hasattr(model.embed, "cpu_linear")
    model.lm_head.weight.data.add_(1)
    repack(model)
    agree(model.lm_head.cpu_linear, model.lm_head.weight)


def test_what_torch_does_not_pack_is_left_to_vllm():
    model = tied(matrix(29, 8).to(torch.bfloat16))
    product = new_product(model.lm_head, model.lm_head.weight.data)
    assert not isinstance(product, PackedProduct)
    x = matrix(2, 8).to(torch.bfloat16)
    assert torch.equal(product(x, torch.zeros(0), None), linear(x, model.lm_head.weight))


def test_a_model_whose_head_lies_elsewhere_is_left_alone():
    for model in (SimpleNamespace(lm_head=torch.nn.Linear(2, 2)), SimpleNamespace()):
        repack(model)
        assert head_of(model) is None


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_patch_can_be_taken_in_pieces(dtype):
    old = torch.randn(5, 8).to(torch.bfloat16)
    where = np.array([0, 7, 8, 21, 39], dtype)
    patch = Patch(where, np.array([1, 2, 3, 65535, 5], np.uint16))
    wanted = patch.apply_to(old.clone())
    pieces = old.clone()
    for top in range(5):
        part = patch.between(8 * top, 8 * top + 8)
        assert part.where is not None
        assert part.where.dtype == dtype
        part.apply_to(pieces[top])
    assert torch.equal(pieces, wanted)
    whole = Patch(None, flat_integers(wanted))
    assert torch.equal(whole.between(8, 24).apply_to(old[1:3].clone()), wanted[1:3])
