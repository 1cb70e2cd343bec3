"""The worked examples of docs/extending.md do what the page says."""

import argparse
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rlq.cli.main
import rlq.formats.elements
import rlq.formats.schemes
from rlq.bridge import Correction, correct
from rlq.formats.schemes import PRESETS, Scheme
from rlq.publish import snapshot
from rlq.recipes.base import RECIPES

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
BLOCKS = {block.split("\n")[0].removeprefix("# "): block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S)}


def row(where: str, scope: Mapping[str, Any]) -> Any:
    """The value of the row that goes into a table."""
    return eval(f"({BLOCKS[where]})", dict(scope))[0]


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
    assert len(BLOCKS) >= 6
    for where in BLOCKS:
        assert f'"{where.split(", ")[0]}' in code, f"no test of the block {where}"


def test_a_preset(monkeypatch, named):
    scheme = row("rlq/formats/schemes.py, in PRESETS", vars(rlq.formats.schemes))
    monkeypatch.setitem(PRESETS, scheme.name, scheme)
    snap = snapshot(named, Scheme.preset("w8a16_block"), 1)
    assert snap.tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert snap.tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (1, 2)


def test_a_correction(monkeypatch):
    module("my_corrections.py", monkeypatch)
    learner, sampler, mask = torch.zeros(1, 200), torch.full((1, 200), -0.5), torch.ones(1, 200, dtype=torch.bool)
    out = correct(learner, sampler, mask, Correction(custom="my_corrections.fading"))
    rho = torch.tensor(0.5).exp()
    assert torch.allclose(out.weights[0, :100], rho)
    assert torch.allclose(out.weights[0, 199], rho.sqrt())


def test_a_recipe(monkeypatch, named):
    made = module("rlq/recipes/trim.py", monkeypatch)
    assert eval("{" + BLOCKS["rlq/recipes/base.py, in RECIPES"].partition("\n")[2] + "}", made) == {
        "trim": made["Trim"]
    }
    monkeypatch.setitem(RECIPES, "trim", made["Trim"])
    plain = snapshot(named, Scheme.preset("fp8_tensor"), 1)
    trimmed = snapshot(named, Scheme.preset("fp8_tensor", recipe=["trim:share=0.5"]), 1)
    scale = "model.layers.0.mlp.down_proj.weight_scale"
    assert trimmed.tensors[scale].item() == pytest.approx(0.5 * plain.tensors[scale].item(), rel=0.01)


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
