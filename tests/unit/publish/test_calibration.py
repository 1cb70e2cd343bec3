"""Static scales in a run: calibrated on the learner that is published, and the same if done again."""

import json
from typing import Any

import pytest
import torch
from grpo_steps import MODEL, TOKENIZER, build
from transformers import AutoModelForCausalLM, DynamicCache

from rlq.bridge.diagnostics.gap import gap_attribution
from rlq.errors import ConfigError
from rlq.formats.schemes import Scheme
from rlq.publish import snapshot
from rlq.recipes.statistics import KINDS, Statistics, collect
from samplers.options import SamplerConfig
from samplers.testing.reference import TransformersSampler
from trainers.observe.gap import quantized_copy
from trainers.options import QuantGRPOConfig
from trainers.publish.calibration import calibrate
from trainers.twin import score

STATIC = Scheme.preset("fp8_static")
CONFIG = json.loads((MODEL / "config.json").read_text())


@pytest.fixture(scope="module")
def samplers():
    return {
        "fp8_static": TransformersSampler(CONFIG, STATIC),
        "nvfp4": TransformersSampler(CONFIG, Scheme.preset("nvfp4", static=True)),
    }


def largest_inputs(model: Any, prompts: list[str]) -> dict[str, float]:
    """One prompt at a time, one linear after the other; written again on purpose."""
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            seen: list[torch.Tensor] = []
            hook = module.register_forward_hook(lambda m, args, out, seen=seen: seen.append(args[0].abs().max()))
            with torch.no_grad():
                for prompt in prompts:
                    model(input_ids=torch.tensor([TOKENIZER(prompt, add_special_tokens=False).input_ids]))
            hook.remove()
            found[name] = float(max(seen))
    return found


def test_calibration_looks_at_the_learner_as_it_is_and_leaves_it_as_it_was(samplers, tmp_path):
    trainer, _ = build(samplers, tmp_path, scheme="fp8_static", calibration_prompts=3)
    trainer.model.train()
    before = torch.get_rng_state()
    found = calibrate(trainer, STATIC)
    prompts = [trainer.train_dataset[i]["prompt"] for i in range(3)]
    alone = largest_inputs(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), prompts)
    assert found is not None
    assert found.input_amax == pytest.approx(alone, rel=1e-5), "prompts of one length are one batch"
    assert trainer.model.training
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.5)
    again = calibrate(trainer, STATIC)
    assert again is not None
    assert again.input_amax != found.input_amax


@pytest.mark.parametrize("name", ["fp8", "fp8_tensor", "nvfp4", "bf16"])
def test_dynamic_schemes_cost_nothing(name, samplers, tmp_path, monkeypatch):
    trainer, _ = build(samplers, tmp_path, scheme="fp8_static")
    monkeypatch.setattr(trainer.model, "forward", lambda *a, **k: pytest.fail("the learner ran"))
    assert calibrate(trainer, Scheme.preset(name)) is None


def test_one_static_layer_is_enough():
    assert Scheme.preset("fp8", per_layer={"re:.*down_proj": "fp8_static"}).calibrated_inputs
    assert not Scheme.preset("fp8", per_layer={"re:.*down_proj": "fp8_tensor"}).calibrated_inputs


@pytest.mark.parametrize("name", ["fp8_static", "nvfp4"])
def test_a_run_publishes_scales_of_its_own_versions(name, samplers, tmp_path):
    trainer, _ = build(samplers, tmp_path, scheme=name, max_steps=2, learning_rate=1e-2)
    published = []
    inner = trainer.vllm_generation.publisher.samplers
    install = inner.install

    def note(snap, probe=None):
        statistics = calibrate(trainer, snap.scheme)
        expected = snapshot(trainer.model.named_parameters(), snap.scheme, snap.version, statistics)
        assert expected.digest == snap.digest
        published.append(
            {n: t.clone() for n, t in snap.tensors.items() if n.endswith(("input_scale", "input_global_scale"))}
        )
        return install(snap, probe)

    inner.install = note
    trainer.train()
    history = [r for r in trainer.state.log_history if "loss" in r]
    assert len(published) == 2
    assert published[0].keys() == published[1].keys()
    assert len(published[0]) == sum(isinstance(m, torch.nn.Linear) for m in trainer.model.model.modules())
    assert any(not torch.equal(published[0][n], published[1][n]) for n in published[0]), "the learner moved"
    assert all(r["rlq/sync/canary_nats"] < 1e-4 for r in history), "the engine computes with the scales it was sent"
    assert all(r["rlq/time/calibrate_s"] > 0 for r in history)
    trainer.vllm_generation.close()


def test_the_quantized_copy_of_the_learner_is_the_sampler(samplers, tmp_path):
    """Gap attribution with static scales: nothing is left for the engine."""
    trainer, _ = build(samplers, tmp_path, scheme="fp8_static")
    seen = []
    scored = type(trainer)._generate_and_score_completions

    def look(inputs):
        out = scored(trainer, inputs)
        model = quantized_copy(trainer, STATIC)
        seen.append((out, score(model, out, trainer.args.temperature)[0]))
        return out

    trainer._generate_and_score_completions = look
    trainer.train()
    out, quantized = seen[0]
    mask = out["completion_mask"].bool()
    learner, sampler = out["old_per_token_logps"], out["sampling_per_token_logps"]
    gap = gap_attribution(learner, learner, quantized, sampler, mask).metrics()
    assert abs(gap["gap/engine"]) < 1e-6 < gap["gap/quant"]
    trainer.vllm_generation.close()


# ---- keys and values


CACHED = Scheme.preset("fp8", kv_cache="fp8.tensor")


@torch.no_grad()
def cached(model: Any, prompts: list[list[int]]) -> list[list[torch.Tensor]]:
    """What transformers' own cache holds per layer after each prompt: keys, then values."""
    held = []
    for prompt in prompts:
        cache: Any = DynamicCache()
        model(input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True)
        held.append([tensor for layer in cache.layers for tensor in (layer.keys, layer.values)])
    return held


def test_keys_and_values_are_calibrated_as_they_are_cached():
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompts = [[3, 4, 5, 44], [9, 9, 12, 3, 7, 44]]
    batches = [torch.tensor([prompt]) for prompt in prompts]
    found = collect(model, batches, {"cache_amax"}).cache_amax
    held = cached(model, prompts)
    expected = [float(max(a.abs().max(), b.abs().max())) for a, b in zip(*held, strict=True)]
    assert [amax for pair in found.values() for amax in pair] == expected
    assert list(found)[:2] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    with pytest.raises(ConfigError, match="saw no keys and values"):
        collect(model, [], {"cache_amax"})
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(ConfigError, match=r"the keys of 'model\.layers\.1\.self_attn' is not finite"):
        collect(model, batches, {"cache_amax"})


def test_one_walk_finds_what_separate_walks_find():
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    batches = [torch.tensor([[3, 4, 5, 44], [7, 8, 9, 44]]), torch.tensor([[9, 9, 12, 3, 7, 44]])]
    found = collect(model, batches, KINDS)
    assert found.input_amax == collect(model, batches, {"input_amax"}).input_amax
    assert found.cache_amax == collect(model, batches, {"cache_amax"}).cache_amax
    name = "model.layers.1.mlp.down_proj"
    rows: list[torch.Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: rows.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
    hook.remove()
    x = torch.cat(rows)
    assert torch.equal(found.channel_amax[name], x.abs().amax(0))
    assert float(found.channel_amax[name].max()) == found.input_amax[name]
    torch.testing.assert_close(found.hessian[name], x.T @ x / len(x))
    assert not collect(model, batches, {"channel_amax"}).input_amax, "only what was asked for"
    with pytest.raises(ConfigError, match="unknown statistics variance"):
        collect(model, batches, {"variance"})


def test_one_scale_for_all_keys_of_a_layer_and_one_for_all_values():
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    statistics = Statistics(cache_amax={f"model.layers.{i}.self_attn": (0.5 + i, 0.5 + i) for i in range(4)})
    snap = snapshot(model.named_parameters(), CACHED, 0, statistics)
    assert snap.tensors["model.layers.2.self_attn.k_scale"].tolist() == pytest.approx([2.5 / 448])
    twin: Any = TransformersSampler(CONFIG, CACHED)
    twin.install(snap)
    seen = []
    original = DynamicCache.update
    prompt = torch.tensor([[3, 4, 5, 44]])

    def look(self, keys, values, layer, *rest, **more):
        seen.append((layer, keys.clone(), values.clone()))
        return original(self, keys, values, layer, *rest, **more)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(DynamicCache, "update", look)
        twin.model(input_ids=prompt)
    assert [layer for layer, _, _ in seen] == [0, 1, 2, 3]
    for layer, keys, values in seen:
        step = torch.tensor((0.5 + layer) / 448)
        for tensor in (keys, values):
            codes = tensor / step
            assert codes.abs().max() <= 448 * (1 + 1e-6), "what is larger than on the calibration prompts saturates"
            assert torch.allclose(codes, codes.to(torch.float8_e4m3fn).float(), rtol=1e-6)
    with pytest.raises(ConfigError, match=r"'fp8.tensor' needs calibrated keys and values"):
        snapshot(model.named_parameters(), CACHED, 0)


@pytest.mark.parametrize("kv_cache", ["fp8", "int8.tensor"])
def test_a_run_with_a_rounded_cache_recalibrates_it_and_keeps_its_canary(kv_cache, tmp_path):
    scheme = Scheme.preset("fp8", kv_cache=kv_cache)
    trainer, _ = build(
        {"kv": TransformersSampler(CONFIG, scheme)}, tmp_path, scheme="kv", max_steps=2, learning_rate=1e-2
    )
    scales = []
    inner = trainer.vllm_generation.publisher.samplers
    install = inner.install
    inner.install = lambda snap, probe=None: (
        scales.append({n: float(t) for n, t in snap.tensors.items() if n.endswith(("k_scale", "v_scale"))})
        or install(snap, probe)
    )
    trainer.train()
    trainer.vllm_generation.close()
    history = [r for r in trainer.state.log_history if "loss" in r]
    assert [len(each) for each in scales] == [8 if kv_cache == "int8.tensor" else 0] * 2
    if scales[0]:
        assert scales[0] != scales[1]
    assert all(r["rlq/sync/canary_nats"] < 1e-4 for r in history)


def test_settings():
    assert SamplerConfig(sampler_scheme="fp8_static").scheme().calibrated_inputs
    assert SamplerConfig(sampler_scheme="nvfp4", sampler_static_activations=True).scheme().static
    assert not SamplerConfig(sampler_scheme="nvfp4").scheme().static
    with pytest.raises(ConfigError, match="'fp8' has no static form"):
        SamplerConfig(sampler_scheme="fp8", sampler_static_activations=True)
    with pytest.raises(ConfigError, match="calibration_prompts=0 calibrates nothing"):
        QuantGRPOConfig(use_cpu=True, bf16=False, calibration_prompts=0)
