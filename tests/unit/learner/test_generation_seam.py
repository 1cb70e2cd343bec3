"""The generation seam without a trainer: grouping, seeds, and what may enter the loss."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlq.errors import SamplerError
from rlq.types import Rollout
from trainers.rollouts.generation import check_rollouts, group_requests, request_seed

prompts_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=24)


def seeds_of(requests) -> list[int]:
    """The seed of every completion, as `Request.seed` defines it."""
    return [request.seed + i for request in requests for i in range(request.num_samples)]


# ---- grouping


def test_consecutive_equal_prompts_become_one_request():
    a, b = [1, 2], [3]
    requests = group_requests([a, a, a, b, a, a], base=100)
    assert [(r.prompt_ids, r.num_samples, r.seed) for r in requests] == [
        ((1, 2), 3, 100),
        ((3,), 1, 103),
        ((1, 2), 2, 104),
    ]


@settings(deadline=None)
@given(prompts_of)
def test_requests_ask_for_the_prompts_in_order(prompts):
    requests = group_requests(prompts, base=0)
    assert [list(r.prompt_ids) for r in requests for _ in range(r.num_samples)] == prompts
    assert all(a.prompt_ids != b.prompt_ids for a, b in itertools.pairwise(requests))


@settings(deadline=None)
@given(prompts_of, st.integers(0, 2**62))
def test_seeds_are_unique_over_all_completions_and_fit_a_signed_64_bit_integer(prompts, base):
    seeds = seeds_of(group_requests(prompts, base))
    assert len(set(seeds)) == len(prompts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_group_that_is_cut_in_two_keeps_its_seeds():
    # Another number of ranks cuts the batch elsewhere; the j-th completion is drawn with the same seed all the same.
    prompts = [[1]] * 4 + [[2]] * 4
    whole = seeds_of(group_requests(prompts, base=7))
    assert whole == [7 + j for j in range(8)]


# ---- seeds


def test_a_base_seed_is_a_function_of_run_step_call_and_mode():
    assert request_seed(0, 5, 0, training=True) == request_seed(0, 5, 0, training=True)
    # Pinned, because a run that another release resumes must draw the same tokens: the first 8 bytes of what
    # `printf "0 5 0 train" | sha256sum` prints, shifted right by 2.
    assert request_seed(0, 5, 0, training=True) == 0xFFA25C07A70269DF >> 2


def test_runs_steps_calls_and_modes_never_share_a_stream():
    grid = itertools.product(range(4), range(30), range(4), (True, False))
    bases = sorted(request_seed(run, step, call, training=mode) for run, step, call, mode in grid)
    assert len(bases) == 4 * 30 * 4 * 2
    assert all(0 <= base < 2**62 for base in bases)
    # Each base starts a stream of one seed per completion: far fewer than the smallest gap.
    assert min(b - a for a, b in itertools.pairwise(bases)) > 1_000_000


def test_numbers_do_not_run_into_each_other():
    assert request_seed(1, 11, 0, training=True) != request_seed(11, 1, 0, training=True)
    assert request_seed(1, 1, 10, training=True) != request_seed(1, 11, 0, training=True)


# ---- what may enter the loss

PROMPTS = [[1, 2], [1, 2], [3]]


def answers() -> list[Rollout]:
    logprobs = np.array([-0.5, -0.1], np.float32)
    return [Rollout(tuple(p), np.array([7 + i, 1]), logprobs, "stop", 4, "fp8", 1.0, i) for i, p in enumerate(PROMPTS)]


def test_complete_rollouts_in_order_pass():
    check_rollouts(answers(), PROMPTS, 4, "fp8", 1.0)
    check_rollouts([], [], 4, "fp8", 1.0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: r[:-1], "3 completions were requested, 2 came back"),
        (lambda r: [*r, r[0]], "3 completions were requested, 4 came back"),
        (lambda r: [], "3 completions were requested, 0 came back"),
        (lambda r: [r[2], r[0], r[1]], "answers another prompt"),
        (lambda r: [r[0], r[1], replace(r[2], version=3)], r"version 3 \(fp8\), expected 4 \(fp8\)"),
        (lambda r: [replace(r[0], version=5), *r[1:]], r"version 5 \(fp8\), expected 4 \(fp8\)"),
        (lambda r: [r[0], replace(r[1], scheme="bf16"), r[2]], r"version 4 \(bf16\), expected 4 \(fp8\)"),
        (lambda r: [replace(r[0], temperature=0.7), *r[1:]], r"sampled at temperature 0\.7, expected 1\.0"),
    ],
    ids=["missing", "extra", "none", "reordered", "stale", "future", "scheme", "temperature"],
)
def test_anything_else_is_refused_in_one_line(spoil, message):
    with pytest.raises(SamplerError, match=message) as error:
        check_rollouts(spoil(answers()), PROMPTS, 4, "fp8", 1.0)
    assert "\n" not in str(error.value)
