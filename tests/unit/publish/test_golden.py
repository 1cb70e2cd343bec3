"""What an older rlq wrote opens, or is refused by name.

The files were written by the version before the layout of DESIGN.md: a snapshot of version 3, the delta to version 4,
two rollouts, and the `config.yaml` of the default run.
"""

import json
from pathlib import Path

import pytest
import torch

from launch.settings import parse
from rlq.bridge.dump import read_rollouts
from rlq.errors import SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import delta, read_directory, snapshot, write_directory

GOLDEN = Path(__file__).parent / "golden"
DIGEST = "60ebf0cc634ccca9286d6320c07ae2224ebdb6127afb34122db7a2a86d5d202c"
SCHEME = Scheme.preset("fp8", per_layer={r"re:.*down_proj$": "nvfp4a16"}, kv_cache="fp8")


def weights() -> dict[str, torch.Tensor]:
    """What was published."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(8, 16, generator=generator),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(16, 16, generator=generator) * 0.1,
        "model.layers.0.mlp.down_proj.weight": torch.randn(16, 32, generator=generator) * 0.1,
        "model.norm.weight": torch.ones(16),
    }


def test_an_old_snapshot_opens_and_is_what_is_published_today():
    snap = read_directory(GOLDEN / "snapshot")
    assert (snap.version, snap.scheme, snap.digest) == (3, SCHEME, DIGEST)
    assert snapshot(weights().items(), SCHEME, 3).digest == DIGEST


def test_its_config_is_written_as_it_was(tmp_path):
    old = json.loads((GOLDEN / "snapshot" / "config.json").read_text())
    plain = {key: value for key, value in old.items() if key != "quantization_config"}
    write_directory(read_directory(GOLDEN / "snapshot"), tmp_path, plain)
    assert json.loads((tmp_path / "config.json").read_text()) == old


def test_an_old_delta_is_refused_by_name():
    with pytest.raises(SnapshotError, match="written by an older rlq; send the whole snapshot"):
        delta.open_delta((GOLDEN / "4.delta").read_bytes())


def test_old_rollouts_open():
    (rollouts,) = read_rollouts(GOLDEN / "rollouts.parquet")
    assert rollouts.sampler_logprobs[0, :3].tolist() == [-0.5, -1.25, -2.0]
    assert torch.equal(rollouts.learner() - rollouts.sampler_logprobs, 0.0625 * rollouts.mask)
    assert rollouts.scheme == ("fp8", "fp8")


def test_an_old_configuration_opens():
    (run, grpo, sampler, *_), _ = parse(["--config", str(GOLDEN / "config.yaml")], GOLDEN / "config.yaml")
    assert (run.dataset_name, grpo.max_steps, sampler.scheme()) == ("sort_digits", 60, Scheme.preset("fp8"))
