"""The wheel: what is in it, what it declares, and that it works away from the checkout."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rlq", "samplers", "trainers")

pytestmark = pytest.mark.slow


def _tracked() -> list[str]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listing.split("\0") if (ROOT / name).is_file()]


def _run(*command: str, cwd: Path, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tracked files alone, in a folder without leftovers of an earlier build."""
    source = tmp_path_factory.mktemp("source")
    for name in _tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    dist = tmp_path_factory.mktemp("dist")
    _run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), cwd=source)
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed where PYTHONPATH puts it before the checkout's editable install."""
    target = tmp_path_factory.mktemp("site")
    _run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=target)
    return target


def test_top_level_names_are_the_three_packages(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    assert names == {*PACKAGES, "rlq-0.1.0.dist-info"}


def test_no_tracked_module_of_the_packages_is_missing(wheel: Path):
    """A subpackage without __init__.py would be left out without a word."""
    tracked = {name for name in _tracked() if name.split("/")[0] in PACKAGES and name.endswith(".py")}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.endswith(".py")} == tracked


def test_entry_points_and_metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read("rlq-0.1.0.dist-info/entry_points.txt").decode())
        metadata = Parser().parsestr(archive.read("rlq-0.1.0.dist-info/METADATA").decode())
        assert "rlq-0.1.0.dist-info/licenses/LICENSE" in archive.namelist()
    assert dict(entry_points["console_scripts"]) == {"rlq": "rlq.cli.main:main"}
    assert dict(entry_points["vllm.general_plugins"]) == {"rlq": "samplers.vllm.plugin:register"}
    assert metadata["Requires-Python"] in {">=3.11,<3.13", "<3.13,>=3.11"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Provides-Extra") == ["train", "dev"]


def test_the_installed_wheel_is_what_gets_imported_elsewhere(site: Path, tmp_path: Path):
    code = "import rlq, samplers, trainers; print(rlq.__file__, samplers.__file__, trainers.__file__)"
    # The last line: TRL and vLLM may warn when they are imported.
    places = _run("-c", code, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()[-1].split()
    assert [Path(place).is_relative_to(site) for place in places] == [True] * 3
    assert "rlq 0.1.0" in _run("-m", "rlq.cli.main", "--version", cwd=tmp_path, PYTHONPATH=str(site))


def _tests_of_rlq_alone() -> list[Path]:
    """Unit tests that import rlq, nothing of the other layers, and read no file of the checkout."""
    others = (
        "samplers",
        "trainers",
        "launch",
        "tests",
        *(path.stem for path in (ROOT / "tests" / "support").glob("*.py")),
    )
    chosen = []
    for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py")):
        source = path.read_text()
        foreign = any(f"import {name}" in source or f"from {name}" in source for name in others)
        if ("import rlq" in source or "from rlq" in source) and not foreign and "__file__" not in source:
            chosen.append(path)
    return chosen


def test_unit_tests_of_rlq_pass_against_the_installed_wheel(site: Path, tmp_path: Path):
    chosen = _tests_of_rlq_alone()
    assert len(chosen) > 2
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    for path in chosen:
        shutil.copy(path, tmp_path / "tests" / "unit")
    out = _run("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", cwd=tmp_path, PYTHONPATH=str(site))
    assert " passed" in out
