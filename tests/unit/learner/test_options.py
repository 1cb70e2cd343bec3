"""Settings: what would bias the ratio or cannot run is refused at construction, in one line that says what to do."""

import math
import pickle

import pytest

from rlq.bridge.correction.options import BridgeConfig
from rlq.errors import ConfigError, RlqError, SamplerError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.types import Request
from samplers.options import EngineOptions, SamplerConfig
from samplers.pool.dispatch import split_evenly
from samplers.pool.fleet import check_capacity
from trainers.options import REQUIRED, QuantGRPOConfig

# A value of each refused setting that somebody might well pass.
REFUSED = {
    "top_p": 0.95,
    "top_k": 50,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "generation_kwargs": {"logprobs": 5},
    "use_vllm": True,
    "use_transformers_continuous_batching": True,
    "vllm_importance_sampling_correction": False,
}


def config(**changes) -> QuantGRPOConfig:
    return QuantGRPOConfig(**{"use_cpu": True, "bf16": False, "report_to": "none"} | changes)


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


# ---- learner


def test_defaults_are_accepted_and_correct_for_quantized_rollouts():
    default = config()
    assert default.vllm_importance_sampling_correction is True
    assert default.vllm_importance_sampling_mode == "token_truncate"
    assert default.report_to == []


def test_every_required_setting_has_a_refusal_test():
    assert set(REFUSED) == {name for name, _, _ in REQUIRED}


@pytest.mark.parametrize(("name", "allowed", "reason"), REQUIRED, ids=[name for name, _, _ in REQUIRED])
def test_settings_that_bias_the_ratio_are_refused_with_reason_and_fix(name, allowed, reason):
    with pytest.raises(ConfigError) as error:
        config(**{name: REFUSED[name]})
    message = one_line(error.value)
    assert message.startswith(f"{name}={REFUSED[name]!r}")
    assert reason in message
    assert message.endswith(f"set it to {allowed[0]!r}")


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, allowed, _ in REQUIRED for value in allowed], ids=str
)
def test_the_fix_that_the_message_names_is_accepted(name, value):
    assert getattr(config(**{name: value}), name) == value


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_without_a_ratio_is_refused(temperature):
    with pytest.raises(ConfigError, match="use a value above 0") as error:
        config(temperature=temperature)
    one_line(error.value)


def test_a_temperature_that_no_sampler_takes_is_refused_before_one_is_started():
    with pytest.raises(ConfigError, match="more than vLLM samples at; use at most 2"):
        config(temperature=2.5)


@pytest.mark.parametrize("temperature", [0.6, 1.3, 2.0])
def test_other_temperatures_are_accepted(temperature):
    assert config(temperature=temperature).temperature == temperature


def test_completions_without_a_limit_are_refused():
    with pytest.raises(ConfigError, match="max_completion_length is None"):
        config(max_completion_length=None)


def test_groups_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="divisible by num_generations"):
        config(per_device_train_batch_size=16, num_generations=6)


# ---- samplers


@pytest.mark.parametrize(("typo", "close"), [("fp9", "fp8"), ("f8", "fp8"), ("FP8", "fp8"), ("bf-16", "bf16")])
def test_a_scheme_typo_names_the_close_preset(typo, close):
    with pytest.raises(ConfigError, match=f"unknown scheme '{typo}'; did you mean .*{close}") as error:
        SamplerConfig(sampler_scheme=typo)
    one_line(error.value)


def test_a_scheme_unlike_any_other_lists_the_presets():
    with pytest.raises(ConfigError, match=r"presets: .*fp8"):
        SamplerConfig(sampler_scheme="quantum")


@pytest.mark.parametrize(
    "fields",
    [
        {"num_samplers": 0},
        {"num_samplers": -1},
        {"sampler_arithmetic": "emulate"},
        {"sampler_kv_cache": "fp8", "sampler_arithmetic": "kernel"},
        {"sampler_per_layer": ["fp8"]},
        {"sampler_transport": "carrier_pigeon"},
        {"sampler_transport": "nccl"},
        {"sampler_transport": "ipc", "sampler_num_gpus": 0},
        {"sampler_transport_keep": -1},
        {"sampler_transport": "directory"},
        {"sampler_transport": "directory", "sampler_transport_dir": "relative/folder"},
        {"sampler_placement": "SCATTER"},
        {"sampler_whole_every": 0},
    ],
    ids=str,
)
def test_samplers_that_cannot_run_are_refused(fields):
    with pytest.raises(ConfigError) as error:
        SamplerConfig(**fields)
    assert next(iter(fields)) in one_line(error.value)


def test_fields_reach_the_scheme_and_the_engine():
    settings = SamplerConfig(
        sampler_scheme="fp8",
        sampler_ignore=["re:.*down_proj$"],
        sampler_max_model_len=77,
        sampler_max_num_seqs=5,
        sampler_kv_cache_mib=3,
        sampler_arithmetic="kernel",
        sampler_dtype="bfloat16",
        sampler_enforce_eager=False,
    )
    assert settings.scheme() == Scheme.preset("fp8", ignore=["re:.*down_proj$"])
    assert settings.engine() == EngineOptions(
        max_model_len=77,
        max_num_seqs=5,
        kv_cache_bytes=3 * 2**20,
        arithmetic="kernel",
        dtype="bfloat16",
        enforce_eager=False,
    )


def test_options_of_a_scheme_reach_it():
    settings = SamplerConfig(
        sampler_scheme="nvfp4", sampler_per_layer=["re:.*down_proj=fp8", "lm_head=w8a16"], sampler_kv_cache="int8"
    )
    per_layer = {"re:.*down_proj": "fp8", "lm_head": "w8a16"}
    assert settings.scheme() == Scheme.preset("nvfp4", per_layer=per_layer, kv_cache="int8")


def test_fields_reach_the_pool():
    settings = SamplerConfig(num_samplers=3, sampler_placement="SPREAD", sampler_max_restarts=7, sampler_whole_every=9)
    options = settings.pool()
    assert (options.num_samplers, options.placement, options.max_restarts, options.whole_every) == (3, "SPREAD", 7, 9)


# ---- bridge


def test_bridge_defaults_are_the_contract():
    correction = BridgeConfig().correction()
    assert (correction.level, correction.mode, correction.upper) == ("token", "truncate", 2.0)
    assert (correction.veto, correction.denominator) == ((1e-4, None), "fixed")


@pytest.mark.parametrize(
    "fields",
    [{"bridge_mode": "tis"}, {"bridge_level": "tokens"}, {"bridge_upper": 0.5}, {"bridge_denominator": "mean"}],
    ids=str,
)
def test_bridge_typos_are_refused(fields):
    with pytest.raises(ConfigError) as error:
        BridgeConfig(**fields).correction()
    assert str(next(iter(fields.values()))) in one_line(error.value)


# ---- pool


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_split_evenly_keeps_order_and_balance(count, parts):
    requests = [Request((i,), 1, i) for i in range(count)]
    chunks = split_evenly(requests, parts)
    assert [r for chunk in chunks for r in chunk] == requests
    assert len(chunks) == min(parts, count)
    sizes = [len(chunk) for chunk in chunks]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_capacity_that_fits_passes():
    check_capacity(4, {"CPU": 1}, {"CPU": 4.0, "memory": 1e9})
    check_capacity(2, {"CPU": 0.5, "GPU": 1}, {"CPU": 1.0, "GPU": 2.0})
    check_capacity(2, {}, {})


@pytest.mark.parametrize(
    ("bundle", "total", "message"),
    [
        ({"CPU": 1}, {"CPU": 3.0}, "4 samplers need 4 CPU, the cluster has 3;.*num_samplers or sampler_num_cpus"),
        ({"CPU": 0.5, "GPU": 1}, {"CPU": 8.0, "GPU": 2.0}, "need 4 GPU, the cluster has 2;.*sampler_num_gpus"),
        ({"GPU": 0.25}, {"CPU": 8.0}, "need 1 GPU, the cluster has 0;"),
    ],
)
def test_capacity_that_can_never_fit_names_what_is_missing(bundle, total, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_capacity(4, bundle, total)
    one_line(error.value)


# ---- errors


@pytest.mark.parametrize("kind", [ConfigError, SnapshotError, SamplerError])
def test_errors_travel_between_processes_and_are_standard_errors(kind):
    again = pickle.loads(pickle.dumps(kind("one line")))
    assert type(again) is kind
    assert str(again) == "one line"
    assert isinstance(again, RlqError)
    assert isinstance(again, RuntimeError if kind is SamplerError else ValueError)
