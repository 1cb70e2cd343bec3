"""The folders are the data flow: who may import whom, no circles, what `import rlq` loads, how large things may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TENSORS = {"torch", "numpy", "safetensors", "compressed_tensors"}
DISPLAY = {"rich"}
ALLOWED = {
    "rlq": TENSORS | DISPLAY | {"numba", "llvmlite", "packaging", "triton", "zstandard"},
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
MOST_METHODS = 18
MOST_FILES = 14
PACKAGES = ("rlq", "samplers", "trainers", "launch")
CODE = (*PACKAGES, "tests", "benchmarks")


def _files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


# ---- who may import whom


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
        ("rlq", "import torch.nn.functional, os\nfrom .formats import Scheme", 0),
        ("rlq", "import transformers", 1),
        ("rlq", "def load():\n    from transformers import AutoModel", 0),
        ("rlq", "def load():\n    import ray", 1),
        ("rlq", "from rlq.formats import Scheme", 1),
        ("samplers", "from trainers.grpo import QuantGRPOTrainer", 1),
        ("samplers", "if True:\n    try:\n        import trl\n    except ImportError:\n        pass", 1),
        ("trainers", "import importlib\nimportlib.import_module('samplers.pool.pool')", 1),
        ("trainers", "from rlq.bridge import correct", 0),
    ],
)
def test_the_checker_sees_what_it_should(package: str, source: str, count: int):
    assert len(_violations(package, source)) == count


# ---- circles


@dataclass(frozen=True)
class Source:
    """One module of ours."""

    name: str
    """Dotted name; a package is named like its folder."""
    is_package: bool
    """The text is an `__init__.py`."""
    text: str


def _sources(*folders: str) -> list[Source]:
    found = []
    for path in _files(*folders):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = parts[-1] == "__init__"
        found.append(Source(".".join(parts[:-1] if package else parts), package, path.read_text()))
    return found


def _edges(sources: list[Source]) -> dict[str, set[str]]:
    """Module to the modules of ours that it names in an import or, where that is a whole text, in a string.

    Every import counts: at the top, inside a function, under `TYPE_CHECKING`, and a dotted name in a string, which is
    what importlib and tables of modules work with. `from package import module` is an import of the module.
    """
    names = {source.name for source in sources}
    edges: dict[str, set[str]] = {}
    for source in sources:
        found: set[str] = set()
        for node in ast.walk(ast.parse(source.text)):
            match node:
                case ast.Import(names=aliases):
                    found.update(alias.name for alias in aliases)
                case ast.ImportFrom():
                    base = _absolute(source, node)
                    for alias in node.names:
                        inner = f"{base}.{alias.name}"
                        found.add(inner if inner in names else base)
                case ast.Constant(value=str(text)) if "." in text:
                    found.add(text)
        edges[source.name] = (found & names) - {source.name}
    return edges


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.name.split(".")
    base = parts[: len(parts) - node.level + source.is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components of more than one module)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def test_no_two_modules_import_each_other_in_a_circle():
    circles = _circles(_edges(_sources(*PACKAGES)))
    assert not circles, "\n".join(" <-> ".join(circle) for circle in circles)


def test_no_two_folders_of_rlq_import_each_other_in_a_circle():
    """`rlq/quantize` lies below `rlq/weights`, never both ways. A folder's `__init__` belongs to the folder."""
    edges: dict[str, set[str]] = {}
    for name, targets in _edges(_sources("rlq")).items():
        if name == "rlq":  # re-exports all of them
            continue
        folder = ".".join(name.split(".")[:2])
        edges.setdefault(folder, set()).update(".".join(target.split(".")[:2]) for target in targets if target != "rlq")
    circles = _circles({folder: targets - {folder} for folder, targets in edges.items()})
    assert not circles, "\n".join(" <-> ".join(circle) for circle in circles)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("from .b import x", "from .a import y"),
        ("from . import b", "def f():\n    from .a import y"),
        ("from p import b", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import y"),
        ("import p.b", "import importlib\nimportlib.import_module('p.a')"),
        ("from .b import x", "TABLE = [('a', 'p.a')]"),
    ],
)
def test_circles_are_seen_wherever_they_hide(a: str, b: str):
    sources = [Source("p", True, ""), Source("p.a", False, a), Source("p.b", False, b)]
    assert _circles(_edges(sources)) == [["p.a", "p.b"]]


def test_one_way_is_no_circle():
    sources = [
        Source("p", True, "from .a import y"),
        Source("p.a", False, "from .b import x"),
        Source("p.b", False, "import os"),
    ]
    assert _circles(_edges(sources)) == []


# ---- what is loaded


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


# ---- sizes


def test_functions_classes_modules_and_folders_stay_small():
    found = []
    for path in _files(*CODE):
        source, place = path.read_text(), path.relative_to(ROOT)
        if (lines := source.count("\n")) > LONGEST_MODULE:
            found.append(f"{place} has {lines} lines, at most {LONGEST_MODULE}: split it")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    where = f"{place}:{node.lineno} {node.name}"
                    found.append(f"{where} has {lines} lines, at most {LONGEST_FUNCTION}: split it")
            if isinstance(node, ast.ClassDef) and (methods := _methods(node)) > MOST_METHODS:
                found.append(f"{place}:{node.lineno} {node.name} has {methods} methods, at most {MOST_METHODS}")
    for folder in sorted({path.parent for path in _files(*CODE)}):
        files = len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        if files > MOST_FILES:
            found.append(f"{folder.relative_to(ROOT)} has {files} files, at most {MOST_FILES}: make rooms")
    assert not found, "\n".join(found)


def _methods(node: ast.ClassDef) -> int:
    return sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
