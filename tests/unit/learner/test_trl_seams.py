"""What the installed TRL looks like. When an upgrade moves a seam that the trainer stands on, this file says which."""

import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from trainers.compat import GRPOTrainer
from trainers.grpo import QuantGRPOTrainer
from trainers.rollouts.generation import SamplerGeneration

ROOT = Path(__file__).resolve().parents[3]


def test_the_learner_loads_no_module_of_vllm():
    script = """
        import sys
        import trainers.compat, trainers.grpo
        from trl import GRPOTrainer
        assert trainers.compat.GRPOTrainer is GRPOTrainer
        print([name for name in sys.modules if name.split(".")[0] == "vllm"])
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().splitlines()[-1] == "[]"


def test_the_score_seam_has_its_signature():
    seam = inspect.signature(GRPOTrainer._generate_and_score_completions)
    ours = inspect.signature(QuantGRPOTrainer._generate_and_score_completions)
    assert list(seam.parameters) == list(ours.parameters) == ["self", "inputs"]


def calls_on_the_client(function: Callable) -> dict[str, ast.Call]:
    """Method name to call, for every `self.vllm_generation.<method>(...)` in a function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.func.attr: node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self.vllm_generation"
    }


def test_the_generation_seam_is_two_calls_that_our_object_answers():
    calls = calls_on_the_client(GRPOTrainer._generate_single_turn)
    assert set(calls) == {"sync_weights", "generate"}
    for name, call in calls.items():
        assert not call.args
        keywords = {str(keyword.arg): None for keyword in call.keywords}
        inspect.signature(getattr(SamplerGeneration, name)).bind(None, **keywords)
    assert [k.arg for k in calls["generate"].keywords] == ["prompts", "images", "num_generations", "profiler"]


def test_no_other_method_of_the_trainer_uses_the_client():
    users = set()
    for name, function in inspect.getmembers(GRPOTrainer, inspect.isfunction):
        if function.__module__ == GRPOTrainer.__module__ and "vllm_generation" in inspect.getsource(function):
            users.add(name)
    # __init__ builds it when use_vllm is set, _generate serves rollout_func, the tool loop reads it in colocate mode.
    assert users == {"__init__", "_generate", "_generate_single_turn", "_tool_call_loop"}
