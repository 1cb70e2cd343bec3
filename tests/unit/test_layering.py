"""The folders are the data flow: who may import whom, what `import rlq` loads, and how long a function may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TENSORS = {"torch", "numpy", "safetensors", "compressed_tensors"}
DISPLAY = {"rich"}
ALLOWED = {
    "rlq": TENSORS | DISPLAY | {"numba", "llvmlite", "packaging", "triton"},
    "samplers": TENSORS | DISPLAY | {"rlq", "vllm", "ray", "transformers"},
    "trainers": TENSORS
    | DISPLAY
    | {"rlq", "trl", "accelerate", "transformers", "tokenizers", "ray", "wandb", "datasets", "matplotlib", "yaml"},
}
# The audit loads a model when it runs, a replay reads parquet and draws when it runs; none of them before.
ALLOWED_IN_FUNCTIONS = {"rlq": {"transformers", "pyarrow", "matplotlib"}}
NEVER_LOADED_BY_RLQ = {"ray", "vllm", "trl", "transformers", "wandb", "accelerate", "datasets"}

LONGEST_FUNCTION = 80
LONGEST_MODULE = 500
CODE = ("rlq", "samplers", "trainers", "launch", "tests", "benchmarks")


def _files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _imports(tree: ast.AST, *, inside_function: bool = False) -> Iterator[tuple[int, str, bool]]:
    """(line, top-level name, inside a function) of every absolute import, dynamic ones by literal name included."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name.split(".")[0], inside_function) for alias in names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield node.lineno, module.split(".")[0], inside_function
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield node.lineno, module.split(".")[0], inside_function
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(node, inside_function=inside_function or function)


def _violations(package: str, source: str) -> list[str]:
    found = []
    for line, name, inside_function in _imports(ast.parse(source)):
        allowed = ALLOWED[package] | (ALLOWED_IN_FUNCTIONS.get(package, set()) if inside_function else set())
        if name == package:
            found.append(f"line {line}: {name} imports its own modules relatively")
        elif name not in allowed and name not in sys.stdlib_module_names:
            found.append(f"line {line}: {package} may not import {name}")
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_every_import_is_allowed_for_its_layer(package: str):
    found = [
        f"{path.relative_to(ROOT)} {violation}"
        for path in _files(package)
        for violation in _violations(package, path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("package", "source", "count"),
    [
        ("rlq", "import torch.nn.functional, os\nfrom .schemes import Scheme", 0),
        ("rlq", "import transformers", 1),
        ("rlq", "def load():\n    from transformers import AutoModel", 0),
        ("rlq", "def load():\n    import ray", 1),
        ("rlq", "from rlq.schemes import Scheme", 1),
        ("samplers", "from trainers.grpo import QuantGRPOTrainer", 1),
        ("samplers", "if True:\n    try:\n        import trl\n    except ImportError:\n        pass", 1),
        ("trainers", "import importlib\nimportlib.import_module('samplers.pool.pool')", 1),
        ("trainers", "from rlq.bridge import correct", 0),
    ],
)
def test_the_checker_sees_what_it_should(package: str, source: str, count: int):
    assert len(_violations(package, source)) == count


def test_no_module_of_rlq_loads_an_engine_or_a_trainer():
    code = (
        "import pkgutil, importlib, sys, rlq\n"
        "names = [module.name for module in pkgutil.walk_packages(rlq.__path__, 'rlq.')]\n"
        "for name in names:\n"
        # Triton comes with a CUDA build of PyTorch; without one these two modules are not imported by anything.
        "    if not name.endswith(('__main__', '.gpu.launch', '.gpu.kernels')): importlib.import_module(name)\n"
        f"print(sorted({NEVER_LOADED_BY_RLQ!r} & set(sys.modules)), len(names))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    loaded, count = result.stdout.rsplit(" ", 1)
    assert loaded == "[]"
    assert int(count) > 5


def test_functions_and_modules_stay_short():
    found = []
    for path in _files(*CODE):
        source = path.read_text()
        if (lines := source.count("\n")) > LONGEST_MODULE:
            found.append(f"{path.relative_to(ROOT)} has {lines} lines, at most {LONGEST_MODULE}: split it")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                    found.append(f"{where} has {lines} lines, at most {LONGEST_FUNCTION}: split it")
    assert not found, "\n".join(found)
