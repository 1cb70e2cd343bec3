"""What crosses the boundary between learner and samplers cannot be built incomplete."""

import math
import pickle

import numpy as np
import pytest

from rlq.errors import ConfigError, SamplerError
from rlq.types import Request, Rollout, Sampling

LOGPROBS = np.array([-0.5, -1.5, -0.25], np.float32)


def rollout(**changes) -> Rollout:
    fields = {
        "prompt_ids": (5, 6),
        "token_ids": np.array([7, 8, 1]),
        "logprobs": LOGPROBS,
        "finish_reason": "stop",
        "version": 3,
        "scheme": "fp8",
        "temperature": 1.0,
        "seed": 11,
    }
    return Rollout(**{**fields, **changes})


def test_a_complete_rollout_is_kept_as_it_is_and_travels():
    whole = rollout()
    assert pickle.loads(pickle.dumps(whole)) == whole
    with pytest.raises(AttributeError):
        whole.version = 4  # type: ignore[misc]


@pytest.mark.parametrize("field", ["prompt_ids", "token_ids", "logprobs", "finish_reason", "version", "seed"])
def test_rollouts_are_equal_only_if_every_field_is(field):
    other = {
        "prompt_ids": (5, 7),
        "token_ids": np.array([7, 8, 2]),
        "logprobs": np.nextafter(LOGPROBS, np.float32(0)),
        "finish_reason": "length",
        "version": 4,
        "seed": 12,
    }
    assert rollout() == rollout()
    assert rollout() != rollout(**{field: other[field]})


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_unset_logprob_is_refused(position):
    logprobs: list[float | None] = LOGPROBS.tolist()
    logprobs[position] = None
    with pytest.raises(SamplerError, match=r"request logprobs=0 .* without its log-prob"):
        rollout(logprobs=np.array(logprobs))


@pytest.mark.parametrize("logprobs", [(), (-0.5,), (-0.5, -1.5), (-0.5, -1.5, -0.25, -1.0)])
def test_unequal_lengths_are_refused_with_both_numbers(logprobs):
    with pytest.raises(SamplerError, match=f"3 tokens with {len(logprobs)} log-probs") as error:
        rollout(logprobs=np.array(logprobs, np.float32))
    assert "\n" not in str(error.value)


def test_a_nonfinite_logprob_passes_because_the_bridge_counts_it():
    assert math.isnan(rollout(logprobs=np.array([-0.5, math.nan, -math.inf], np.float32)).logprobs[1])


@pytest.mark.parametrize("temperature", [0.0, -0.5, math.nan, -math.inf])
def test_sampling_refuses_a_temperature_without_a_ratio(temperature):
    with pytest.raises(ConfigError, match=r"use a value above 0, such as 1\.0"):
        Sampling(temperature=temperature, max_tokens=8, stop_token_ids=(1,))


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_sampling_refuses_completions_without_a_token(max_tokens):
    with pytest.raises(ConfigError, match=f"max_tokens is {max_tokens}; use at least 1"):
        Sampling(temperature=1.0, max_tokens=max_tokens, stop_token_ids=(1,))


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_sampling_has_no_field_that_changes_the_support(name):
    assert not hasattr(Sampling(1.0, 8, (1,)), name)


def test_requests_are_values():
    assert Request((1, 2), 4, 9) == Request((1, 2), 4, 9) != Request((1, 2), 4, 10)
