"""What crosses the boundary between learner and samplers cannot be built incomplete."""

import math
import pickle

import pytest

from rlq.errors import ConfigError, SamplerError
from rlq.types import Request, Rollout, Sampling


def rollout(**changes) -> Rollout:
    fields = {
        "prompt_ids": (5, 6),
        "token_ids": (7, 8, 1),
        "logprobs": (-0.5, -1.5, -0.25),
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


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_unset_logprob_is_refused(position):
    logprobs = [-0.5, -1.5, -0.25]
    logprobs[position] = None  # type: ignore[call-overload]
    with pytest.raises(SamplerError, match="without its log-prob; request logprobs=0"):
        rollout(logprobs=tuple(logprobs))


@pytest.mark.parametrize("logprobs", [(), (-0.5,), (-0.5, -1.5), (-0.5, -1.5, -0.25, -1.0)])
def test_unequal_lengths_are_refused_with_both_numbers(logprobs):
    with pytest.raises(SamplerError, match=f"3 tokens with {len(logprobs)} log-probs") as error:
        rollout(logprobs=logprobs)
    assert "\n" not in str(error.value)


def test_a_nonfinite_logprob_passes_because_the_bridge_counts_it():
    assert math.isnan(rollout(logprobs=(-0.5, math.nan, -math.inf)).logprobs[1])


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
