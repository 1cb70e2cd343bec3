"""Sampling settings that bias the ratio are refused; the bias itself is shown once."""

import pytest
import torch

from rlq.bridge import Correction, check_support, correct
from rlq.errors import ConfigError


def test_top_p_makes_the_mean_ratio_the_kept_mass():
    # p = [.5, .3, .15, .05] at top_p = 0.8 keeps two tokens, at .625 and .375; the learner is the same model.
    learner = torch.tensor([[0.5, 0.3]]).log()
    sampler = torch.tensor([[0.625, 0.375]]).log()
    metrics = correct(learner, sampler, torch.ones(1, 2, dtype=torch.bool), Correction()).metrics
    assert metrics["ratio_mean"] == pytest.approx(0.8)


def test_full_support_passes():
    check_support()
    check_support(temperature=0.6, top_k=-1)
    check_support(top_p=0.9, top_k=50, min_p=0.1, mask_replayed=True)
    check_support(temperature=1.0, processed_logprobs=False)


@pytest.mark.parametrize(
    ("settings", "mend"),
    [
        ({"top_p": 0.95}, "replay"),
        ({"top_k": 20}, "replay"),
        ({"min_p": 0.05}, "replay"),
        ({"repetition_penalty": 1.1, "mask_replayed": True}, "set it to 1"),
        ({"temperature": 0.0}, "above 0"),
        ({"temperature": 0.6, "processed_logprobs": False}, "processed"),
    ],
)
def test_biased_settings_are_refused_with_the_mend(settings, mend):
    with pytest.raises(ConfigError, match=mend):
        check_support(**settings)
