"""The model of publishing: against the codec that it describes, and in its limits."""

import pytest
import torch

from rlq.formats.schemes import Scheme
from rlq.plan.publishing import Rates, delta_bits, fan_out_rounds, publish
from rlq.publish import Snapshot, delta, tensor_digest

RATES = Rates(quantize=1e9, digest=1e9, copy=4e9, compare=1e9, stage=1e9, patch=5e8, network=1e9)


def codes(version: int, values: torch.Tensor) -> Snapshot:
    tensors = {"w": values}
    return Snapshot(tensors, version, Scheme.preset("fp8"), tensor_digest(tensors))


@pytest.mark.parametrize("changed", [0.0003, 0.003, 0.03])
def test_a_delta_takes_the_bits_that_the_model_says(changed):
    """Evenly spread steps of one, up or down: 1 bit of value, so the model's 1.3 bounds it from above by 0.3 bits."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(60, 120, (1 << 24,), generator=generator, dtype=torch.uint8)
    where = torch.rand(old.shape, generator=generator) < changed
    step = torch.randint(0, 2, old.shape, generator=generator) * 2 - 1
    new = torch.where(where, old + step.to(torch.uint8), old)
    blob = delta.encode(codes(1, old), codes(2, new))
    count = int(where.sum())
    assert 8 * len(blob) / count == pytest.approx(delta_bits(changed), rel=0.12)


def test_an_object_doubles_its_holders_every_round():
    assert [fan_out_rounds(n) for n in (1, 2, 3, 4, 7, 8, 1000)] == [1, 2, 2, 3, 3, 4, 10]


def test_limits():
    one = publish(1e9, 8, RATES)
    assert one.nbytes == 1e9
    assert one.total_s == pytest.approx(2 + 1 + 0.25 + 1 + 2)  # quantize, digest, pack, ship, stage
    assert publish(1e9, 8, RATES, publishers=4).quantize_s == pytest.approx(one.quantize_s / 4)
    assert publish(1e9, 8, RATES, nodes=1000).ship_s == pytest.approx(10 * one.ship_s)
    delta_publish = publish(1e9, 8, RATES, changed=0.001)
    assert delta_publish.nbytes < one.nbytes / 600
    assert delta_publish.stage_s == pytest.approx(one.stage_s + 1)
