"""A real vLLM engine in a Ray actor: what it serves, what it samples, and what it refuses."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from rlq.errors import ConfigError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import delta, snapshot
from rlq.types import Request, Rollout, Sampling
from samplers.options import SamplerConfig
from samplers.pool.pool import SamplerPool
from samplers.testing.reference import TransformersSampler

pytestmark = pytest.mark.usefixtures("ray_session")

MODEL = str(Path(__file__).parents[2] / "configs/models/sort_digits")
EQUALS, EOS = 44, 1  # token ids of "=" and <eos>
SAMPLING = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=(EOS,))


def requests(count: int = 16, samples: int = 8) -> list[Request]:
    digits = torch.randint(3, 13, (count, 6), generator=torch.Generator().manual_seed(0)).tolist()
    return [Request((*row, EQUALS), samples, 1000 * i) for i, row in enumerate(digits)]


def learner(shift: float = 0.0) -> PreTrainedModel:
    """The shipped policy in fp32; a shift moves every weight off the bf16 grid, as training does."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=shift)
    return model


def engine(scheme: str, config: dict | None = None, **options) -> SamplerPool:
    settings = SamplerConfig(sampler_scheme=scheme, num_samplers=1, **options)
    return SamplerPool.vllm(config or AutoConfig.from_pretrained(MODEL).to_dict(), settings)


@pytest.fixture(scope="module")
def fp8(ray_session) -> Iterator[SamplerPool]:
    pool = engine("fp8", sampler_max_model_len=32)
    yield pool
    pool.close()


def largest_gap(rollouts: list[Rollout], reference: TransformersSampler) -> tuple[float, float]:
    """Mean and largest |reference log-prob - sampler log-prob| over all tokens."""
    gaps = torch.cat([(reference.score(r) - torch.tensor(r.logprobs)).abs() for r in rollouts])
    return float(gaps.mean()), float(gaps.max())


def reference_for(model: PreTrainedModel, scheme: str, version: int = 0) -> TransformersSampler:
    reference = TransformersSampler(model.config.to_dict(), Scheme.preset(scheme))
    reference.install(snapshot(model.named_parameters(), reference.scheme, version))
    return reference


def test_a_version_is_served_exactly_whatever_came_before(fp8):
    first, second = learner(), learner(shift=0.01)
    snaps = {v: snapshot(m.named_parameters(), fp8.scheme, v) for v, m in ((1, first), (2, second))}
    # The report's digest is computed from the engine's own storage, the snapshot's from quantize(learner).
    assert fp8.install(snaps[1]).digest == snaps[1].digest
    before = fp8.generate(requests(), SAMPLING, version=1)
    assert fp8.install(snaps[2]).digest == snaps[2].digest != snaps[1].digest
    between = fp8.generate(requests(), SAMPLING, version=2)
    assert fp8.install(snaps[1]).digest == snaps[1].digest
    again = fp8.generate(requests(), SAMPLING, version=1)
    assert before == again, "the same version must sample the same rollouts, log-probs included, bit for bit"
    assert [r.logprobs.tolist() for r in before] != [r.logprobs.tolist() for r in between]


def test_deltas_leave_the_engine_with_exactly_the_published_version(fp8, monkeypatch):
    """Ten versions, every fifth whole; afterwards it samples what an engine samples that got the last one whole."""
    monkeypatch.setattr(fp8.fleet, "options", replace(fp8.fleet.options, whole_every=5))
    model, small = learner(), 0
    for version in range(10):
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * version + index)
                parameter.add_(torch.randn(parameter.shape, generator=generator).sign(), alpha=1e-4)
        snap = snapshot(model.named_parameters(), fp8.scheme, version)
        report = fp8.install(snap)
        assert (report.version, report.digest) == (version, snap.digest)
        small += report.shipped_bytes < snap.nbytes
    assert small == 8, "versions 0 and 5 travel whole"
    after = fp8.generate(requests(), SAMPLING, version=9)
    monkeypatch.setattr(fp8.fleet, "options", replace(fp8.fleet.options, whole_every=1))
    assert fp8.install(snapshot(model.named_parameters(), fp8.scheme, 9)).shipped_bytes == snap.nbytes
    assert fp8.generate(requests(), SAMPLING, version=9) == after


def test_interrupted_sampling_leaves_complete_groups_and_a_clean_engine(fp8):
    """Nothing of the requests that were cut short is left: the same version samples the same afterwards."""
    snap = snapshot(learner().named_parameters(), fp8.scheme, 1)
    fp8.install(snap)
    long = Sampling(temperature=2.0, max_tokens=24, stop_token_ids=(EOS,))
    many = requests(count=128, samples=2)  # the engine decodes 128 completions at once
    fp8.generate(many, long, version=1)
    start = time.perf_counter()
    wanted = fp8.generate(many, long, version=1)
    seconds = time.perf_counter() - start
    found: list[Rollout] = []
    sampling = threading.Thread(target=lambda: found.extend(fp8.generate(many, long, version=1)))
    sampling.start()
    time.sleep(0.6 * seconds)
    fp8.interrupt(1)
    sampling.join()
    assert len(found) % 2 == 0
    assert 0 < len(found) < len(wanted)
    seeds = {rollout.seed for rollout in found}
    assert [r.token_ids.tolist() for r in found] == [r.token_ids.tolist() for r in wanted if r.seed in seeds]
    assert fp8.generate(many, long, version=1) == []
    fp8.install(snap)
    assert fp8.generate(many, long, version=1) == wanted


def test_a_delta_that_does_not_fit_is_refused_and_the_version_travels_whole(fp8, monkeypatch, caplog):
    first, second = learner(), learner(shift=0.001)
    fp8.install(snapshot(first.named_parameters(), fp8.scheme, 1))
    snap = snapshot(second.named_parameters(), fp8.scheme, 2)
    wrong = delta.encode(snap, snapshot(first.named_parameters(), fp8.scheme, 3))
    monkeypatch.setattr(delta, "encode", lambda base, new: wrong)
    monkeypatch.setattr(fp8.fleet, "options", replace(fp8.fleet.options, whole_every=5))
    assert fp8.install(snap).digest == snap.digest
    assert "needs version 2 whole" in caplog.text
    assert fp8.generate(requests(count=1), SAMPLING, version=2)


def test_sampler_agrees_with_the_transformers_reference(fp8):
    model = learner()
    fp8.install(snapshot(model.named_parameters(), fp8.scheme, 0))
    reference = reference_for(model, "fp8")
    rollouts = fp8.generate(requests(), SAMPLING, version=0)
    mean, _ = largest_gap(rollouts, reference)
    # Engine and reference round the same values in another order of summation; where a sum falls next to a rounding
    # boundary of an activation the two differ by one FP8 step, which is rare but not small.
    assert mean < 1e-3
    twins = reference.generate(requests(count=2), SAMPLING, version=0)
    assert largest_gap(twins, reference)[0] < 1e-3, "the same, sampled step by step and scored at once"


def test_tokens_are_drawn_from_the_distribution_that_is_reported(fp8):
    """First tokens of 1,024 samples of one prompt at T=2 against the reference's probabilities."""
    model = learner()
    fp8.install(snapshot(model.named_parameters(), fp8.scheme, 0))
    hot = Sampling(temperature=2.0, max_tokens=1, stop_token_ids=(EOS,))
    request = Request(requests(count=1)[0].prompt_ids, num_samples=1024, seed=7)
    drawn = torch.tensor([r.token_ids[0] for r in fp8.generate([request], hot, version=0)])
    logits = reference_for(model, "fp8").model(torch.tensor([request.prompt_ids])).logits[0, -1]
    expected = torch.softmax(logits / 2.0, -1)
    observed = torch.bincount(drawn, minlength=len(expected)) / len(drawn)
    # Total variation of an empirical distribution is at most sqrt(k / 4n) in expectation: 0.11 for k=51, n=1,024.
    assert float((observed - expected).abs().sum() / 2) < 0.11


def test_log_probs_are_those_of_the_tempered_distribution(fp8):
    model = learner()
    fp8.install(snapshot(model.named_parameters(), fp8.scheme, 0))
    cool = Sampling(temperature=0.6, max_tokens=8, stop_token_ids=(EOS,))
    mean, _ = largest_gap(fp8.generate(requests(), cool, version=0), reference_for(model, "fp8"))
    assert mean < 1e-3


def test_seeds_reproduce_and_differ(fp8):
    fp8.install(snapshot(learner().named_parameters(), fp8.scheme, 0))
    one = fp8.generate(requests(), SAMPLING, version=0)
    assert one == fp8.generate(requests(), SAMPLING, version=0)
    shifted = [Request(r.prompt_ids, r.num_samples, r.seed + 500) for r in requests()]
    two = fp8.generate(shifted, SAMPLING, version=0)
    assert [r.token_ids.tolist() for r in one] != [r.token_ids.tolist() for r in two]
    assert len({r.seed for r in one}) == len(one)


def test_every_declared_end_token_ends_a_completion_and_keeps_its_log_prob(fp8):
    fp8.install(snapshot(learner().named_parameters(), fp8.scheme, 0))
    nine = 12  # token id of "9"
    both = Sampling(temperature=1.0, max_tokens=8, stop_token_ids=(EOS, nine))
    rollouts = fp8.generate(requests(), both, version=0)
    ends = {r.token_ids[-1] for r in rollouts if r.finish_reason == "stop"}
    assert ends == {EOS, nine}
    assert all(not {EOS, nine} & set(r.token_ids[:-1].tolist()) for r in rollouts)
    assert all(len(r.logprobs) == len(r.token_ids) for r in rollouts)


def test_a_completion_cut_at_the_limit_says_so(fp8):
    fp8.install(snapshot(learner().named_parameters(), fp8.scheme, 0))
    short = Sampling(temperature=1.0, max_tokens=3, stop_token_ids=(EOS,))
    rollouts = fp8.generate(requests(), short, version=0)
    cut = [r for r in rollouts if r.token_ids[-1] != EOS]
    assert len(cut) > 100
    assert {(len(r.token_ids), r.finish_reason) for r in cut} == {(3, "length")}


def test_a_prompt_longer_than_the_context_is_refused_and_serving_goes_on(fp8):
    fp8.install(snapshot(learner().named_parameters(), fp8.scheme, 0))
    with pytest.raises(ConfigError, match="a prompt of 32 tokens leaves no room in a context of 32"):
        fp8.generate([Request((3,) * 32, 1, 0)], SAMPLING, version=0)
    assert len(fp8.generate(requests(), SAMPLING, version=0)) == 128


def test_a_snapshot_with_a_missing_tensor_leaves_the_engine_serving_the_old_version(fp8):
    good = snapshot(learner().named_parameters(), fp8.scheme, 0)
    fp8.install(good)
    before = fp8.generate(requests(), SAMPLING, version=0)
    named = dict(learner(shift=0.01).named_parameters())
    del named["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(SnapshotError, match=r"2 missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        fp8.install(snapshot(named.items(), fp8.scheme, 1))
    assert fp8.generate(requests(), SAMPLING, version=0) == before


def test_identity_scheme_agrees_with_the_bf16_rounded_learner():
    pool = engine("bf16", sampler_max_model_len=32)
    model = learner(shift=0.001)
    pool.install(snapshot(model.named_parameters(), pool.scheme, 0))
    rollouts = pool.generate(requests(), SAMPLING, version=0)
    mean, largest = largest_gap(rollouts, reference_for(model, "bf16"))
    assert mean < 1e-5
    assert largest < 1e-4
    pool.close()


TIED_WITH_BIAS = Qwen2Config(
    vocab_size=51,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
UNTIED_ALL_BIASES = LlamaConfig(
    vocab_size=51,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=512,
    attention_bias=True,
    mlp_bias=True,
)


@pytest.mark.slow
@pytest.mark.parametrize("config", [TIED_WITH_BIAS, UNTIED_ALL_BIASES], ids=["tied", "biases"])
@pytest.mark.parametrize("scheme", ["fp8", "bf16"])
def test_heads_biases_and_prefix_cache_after_reloads(config, scheme):
    """Ten installs of different weights; prompts of 300 tokens, so that a stale prefix cache would show."""
    pool = engine(scheme, config.to_dict(), sampler_max_model_len=512)
    prompts = [Request(tuple(3 + (i * 7 + j) % 40 for j in range(300)), 2, 100 * i) for i in range(4)]
    for version in range(10):
        torch.manual_seed(version)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1 if parameter.ndim == 2 else 0.5)
        snap = snapshot(model.named_parameters(), pool.scheme, version)
        assert pool.install(snap).digest == snap.digest
        rollouts = pool.generate(prompts, SAMPLING, version=version)
    mean, _ = largest_gap(rollouts, reference_for(model, scheme))
    assert mean < (1e-3 if scheme == "fp8" else 1e-5)
    pool.close()


@pytest.mark.slow
def test_vllm_kernels_read_the_same_published_bytes():
    """`arithmetic=kernel` hands the bytes to vLLM's own compressed-tensors method; on a CPU only the loading counts.

    Of the last version, a delta to one shard of a fused layer, only that layer is loaded.
    """
    pool = engine("fp8", sampler_max_model_len=32, sampler_arithmetic="kernel", sampler_whole_every=4)
    policy = learner(0.01)
    changed = learner(0.01)
    with torch.no_grad():
        changed.get_parameter("model.layers.0.mlp.up_proj.weight")[3:5] *= -1
    for version, each in enumerate((learner(), policy, changed)):
        snap = snapshot(each.named_parameters(), pool.scheme, version)
        report = pool.install(snap)
        assert report.digest == snap.digest
        assert len(pool.generate(requests(), SAMPLING, version)) == 128
    assert pool.proof == {"sync/proven_samplers": 1.0}
    assert report.shipped_bytes < 0.1 * snap.nbytes
    pool.close()
