"""The worked examples of docs/extending.md do what the page says."""

import argparse
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rlq.cli.main
import rlq.formats.elements
import rlq.formats.schemes
from rlq.bridge import Correction, correct
from rlq.errors import ConfigError, SnapshotError
from rlq.formats.schemes import PRESETS, Scheme
from rlq.publish import delta, snapshot
from rlq.quantize import fake_quantize
from rlq.recipes.base import RECIPES

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
BLOCKS = {block.split("\n")[0].removeprefix("# "): block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S)}


def row(where: str, scope: Mapping[str, Any]) -> Any:
    """The value of the row that goes into a table."""
    return eval(BLOCKS[where].partition("\n")[2], dict(scope))


def module(file: str, monkeypatch) -> dict:
    """Names of the module that a block makes, as if it stood in its file."""
    name = file.removesuffix(".py").replace("/", ".")
    made: Any = types.ModuleType(name)
    made.__package__ = name.rpartition(".")[0]
    monkeypatch.setitem(sys.modules, name, made)
    exec(BLOCKS[file], vars(made))
    return vars(made)


@pytest.fixture
def named():
    generator = torch.Generator().manual_seed(0)
    return [("model.layers.0.mlp.down_proj.weight", torch.randn(8, 256, generator=generator))]


def test_every_block_is_run_here():
    code = Path(__file__).read_text()
    assert len(BLOCKS) >= 9
    for where in BLOCKS:
        assert f'"{where.split(", ")[0]}' in code, f"no test of the block {where}"


def test_a_preset(monkeypatch, named):
    scheme = row("rlq/formats/schemes.py, in PRESETS", vars(rlq.formats.schemes))
    monkeypatch.setitem(PRESETS, scheme.name, scheme)
    snap = snapshot(named, Scheme.preset("w8a16_block"), 1)
    assert snap.tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert snap.tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (1, 2)


def test_an_element_format(monkeypatch):
    elements = rlq.formats.elements
    element = row("rlq/formats/elements.py, in ELEMENTS", vars(elements))
    monkeypatch.setitem(elements.ELEMENTS, element.name, element)
    names: dict[str, Any] = {"BLOCKS": elements.BLOCKS}
    exec(BLOCKS["rlq/formats/elements.py"], names)
    assert set(names["FORMATS"]) == {*elements.FORMATS, "int6"}
    monkeypatch.setattr(rlq.formats.schemes, "FORMATS", names["FORMATS"])
    x = torch.tensor([[31.0, 2.4, -1.6]])
    assert fake_quantize(x, "int6.channel").tolist() == [[31.0, 2.0, -2.0]]


def test_a_transport(monkeypatch, tmp_path, named):
    made = module("samplers/transport/pickled.py", monkeypatch)
    assert row("samplers/transport/__init__.py, in TRANSPORTS", made) == {"pickled": made["Pickled"]}
    settings = SimpleNamespace(sampler_transport_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="sampler_transport_dir"):
        made["Pickled"].check(SimpleNamespace(sampler_transport_dir=None))
    transport = made["Pickled"].from_config(settings, {})
    old, new = (snapshot([(n, t * f) for n, t in named], Scheme.preset("fp8"), v) for v, f in ((1, 1.0), (2, 1.5)))
    ticket = transport.send(1, old)
    assert ticket.open().digest == old.digest
    assert transport.send(2, delta.encode(old, new)).open().info.digest == new.digest
    transport.release(ticket)
    with pytest.raises(SnapshotError, match="send the version again"):
        ticket.open()


def test_a_correction(monkeypatch):
    module("my_corrections.py", monkeypatch)
    learner, sampler, mask = torch.zeros(1, 200), torch.full((1, 200), -0.5), torch.ones(1, 200, dtype=torch.bool)
    out = correct(learner, sampler, mask, Correction(custom="my_corrections.fading"))
    rho = torch.tensor(0.5).exp()
    assert torch.allclose(out.weights[0, :100], rho)
    assert torch.allclose(out.weights[0, 199], rho.sqrt())


def test_a_recipe(monkeypatch, named):
    made = module("rlq/recipes/trim.py", monkeypatch)
    assert row("rlq/recipes/base.py, in RECIPES", made) == {"trim": made["Trim"]}
    monkeypatch.setitem(RECIPES, "trim", made["Trim"])
    plain = snapshot(named, Scheme.preset("fp8_tensor"), 1)
    trimmed = snapshot(named, Scheme.preset("fp8_tensor", recipe=["trim:share=0.5"]), 1)
    scale = "model.layers.0.mlp.down_proj.weight_scale"
    assert trimmed.tensors[scale].item() == pytest.approx(0.5 * plain.tensors[scale].item(), rel=0.01)


def test_a_metric(monkeypatch):
    made = module("my_rewards.py", monkeypatch)
    logged: dict[str, float] = {}
    assert made["sorted_and_short"](["12", "9876"], ["12", "6789"], log_metric=logged.__setitem__) == [1.0, 0.0]
    assert logged == {"rlq/rollout/mean_length": 3.0}


def test_a_subcommand(monkeypatch, tmp_path, capsys):
    made = module("rlq/cli/count.py", monkeypatch)
    command = row("rlq/cli/main.py, in COMMANDS", vars(rlq.cli.main))
    assert command.name == "count"
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.safetensors")
    parser = argparse.ArgumentParser()
    made["add_arguments"](parser)
    outcome = made["run"](parser.parse_args([str(tmp_path / "x.safetensors")]))
    assert outcome.ok
    assert outcome.report == {"tensors": 2}
    assert capsys.readouterr().out == "2 tensors\n"
