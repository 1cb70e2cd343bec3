"""`launch/run.py`: what it shows of a job, what it returns, and that it stops exactly what it started."""

import http.server
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from launch import ray_head
from launch.follow import Followed, follow
from launch.ray_head import Ray, local_or_running_ray
from launch.run import ROOT, job_lines, main, package_problem

# What Ray writes into a job's log before the job does (Ray 2.60).
BEFORE = """\
2026-11-29 14:55:36,826\tINFO job_manager.py:581 -- Runtime env is setting up.
Running entrypoint for job j1: python job.py
"""


def _follow(job_output: str, *, terminal: bool, capsys: pytest.CaptureFixture[str]) -> tuple[Followed, str]:
    screen = io.StringIO()
    seen = Followed()
    console = Console(file=screen, force_terminal=terminal, width=200)
    follow((BEFORE + job_output).splitlines(), console, seen)
    return seen, screen.getvalue() if terminal else capsys.readouterr().out


def test_lines_of_the_job_pass_unchanged_and_those_of_ray_do_not(capsys):
    lines = "[a] line  with [red]markup[/]\n\n---\n  indented\nJob 'j2' failed\nrlq-step not json\n"
    seen, shown = _follow(lines, terminal=False, capsys=capsys)
    assert shown == lines
    assert seen.started_s is not None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "unknown flag --seed; what is meant for the launch script goes after --"),
        (["--config", "none.yaml"], "--config none.yaml: no such file"),
    ],
)
def test_bad_flags_end_with_one_line_before_anything_starts(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_step_line_becomes_a_plain_line_when_there_is_no_terminal(capsys):
    step = 'rlq-step {"step": 3, "max_steps": 60, "reward": 0.5, "rlq/clip_frac_high": 0.0125, "eta_s": 61}\n'
    seen, shown = _follow(step, terminal=False, capsys=capsys)
    assert shown == "step 3/60  reward 0.500  clip 1.25%  eta 1:01\n"
    assert seen.last_step["step"] == 3
    assert seen.first_step_s is not None


def test_a_terminal_gets_one_bar_and_the_lines_above_it(capsys):
    output = 'rlq-step {"step": 3, "max_steps": 60, "reward": 0.5}\nhello [bold]there\nrun_dir=/r\n'
    seen, shown = _follow(output, terminal=True, capsys=capsys)
    assert "hello [bold]there\n" in shown
    assert "3/60" in shown
    assert "reward 0.500" in shown
    assert "rlq-step" not in shown
    assert seen.run_dir == "/r"


class Pieces:
    """Ray's client as far as a log goes: pieces that end anywhere."""

    def __init__(self, *pieces: str):
        self.pieces = pieces

    async def tail_job_logs(self, job: str):
        for piece in self.pieces:
            yield piece


def test_pieces_of_a_log_become_lines():
    assert list(job_lines(Pieces("one\ntw", "o", "\n\nthree"), "j1")) == ["one", "two", "", "three"]
    assert list(job_lines(Pieces(), "j1")) == []


def test_a_job_server_that_does_not_answer_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    assert main(["--script", "launch/grpo_fp8.py"]) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("rlq: error: the job could not be submitted to http://127.0.0.1:9: ")


def test_the_checkout_is_small_enough_to_travel_and_a_large_file_is_named(tmp_path: Path):
    assert package_problem(ROOT) is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for name in ("ignored.bin", "large.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(201_000_000)
    (tmp_path / ".gitignore").write_text("ignored.bin\n")
    problem = package_problem(tmp_path)
    assert problem is not None
    assert "large.bin 201 MB" in problem
    assert "ignored" not in problem.split(": ")[1]


class _JobServer(http.server.BaseHTTPRequestHandler):
    """Answers as Ray's job server does when it asks for the token `secret`."""

    def do_GET(self):
        known = self.headers.get("Authorization") == "Bearer secret"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(b'{"ray_version": "2.60.0"}' if known else b"Unauthorized: Missing authentication token")

    def log_message(self, *args):
        """Silent."""


def test_a_ray_that_refuses_our_token_is_not_one_to_use():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _JobServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        answers = [ray_head._lets_in(address, token=token) for token in (None, "wrong", "secret")]
        server.shutdown()
    assert answers == [False, False, True]
    assert not ray_head._lets_in(address, token="secret")


JOB = """
    import argparse, json, os, sys, time

    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--output_dir")
    parser.add_argument("--mode", default="succeed")
    args = parser.parse_args()
    assert os.environ["RLQ_PROGRESS"] == "json"
    print("python", sys.executable)
    for step in range(1, 4):
        print("rlq-step", json.dumps({"step": step, "max_steps": 3, "reward": step / 4}))
    if args.mode == "hang":
        time.sleep(600)
    if args.mode == "fail":
        sys.exit("rlq: error: the sampler died; restart it")
    os.makedirs(args.output_dir)
    print("run_dir=" + args.output_dir)
"""


@pytest.fixture
def job_script(tmp_path: Path) -> Path:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    return script


@pytest.fixture(scope="module")
def running() -> Iterator[Ray]:
    with local_or_running_ray() as ray:
        yield ray


def _start(script: Path, *flags: str, ray: Ray | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "run.py"), "--script", str(script), "--", *flags],
        env=os.environ | (ray.variables if ray is not None else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=script.parent,
    )


def _alive(ray: Ray) -> bool:
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "list"]
    return subprocess.run(command, env=os.environ | ray.variables, capture_output=True, check=False).returncode == 0


def _processes_naming(text: str) -> list[list[str]]:
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if any(text in word for word in command)]


@pytest.mark.slow
def test_own_head_is_started_used_and_gone_afterwards(job_script: Path, tmp_path: Path):
    process = _start(job_script, "--output_dir", str(tmp_path / "run"))
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 0, output
    lines = output.splitlines()
    assert lines[0].startswith("rlq: started a local Ray")
    assert " ray job submit --working-dir . --submission-id " in lines[1]
    assert f"python {sys.executable}" in lines
    assert [line for line in lines if line.startswith("step ")][-1] == "step 3/3  reward 0.750"
    assert lines[-2].startswith("rlq: done (head ready ")
    assert lines[-1] == f"run_dir={tmp_path / 'run'}"
    token_path = re.search(r"RAY_AUTH_TOKEN_PATH=(\S+)", lines[1])
    assert token_path is not None
    temp_dir = Path(token_path[1]).parent
    assert not temp_dir.exists()
    assert not _processes_naming(str(temp_dir))


@pytest.mark.slow
def test_a_failed_job_is_exit_code_1_with_its_error_last_and_a_running_head_stays(job_script: Path, running: Ray):
    process = _start(job_script, "--mode", "fail", ray=running)
    lines = process.communicate(timeout=180)[0].splitlines()
    assert process.returncode == 1
    assert lines[0].startswith("rlq: using the running Ray")
    assert lines[-2] == "rlq: error: the sampler died; restart it"
    assert lines[-1].startswith("rlq: the job failed")
    assert lines.count("rlq: error: the sampler died; restart it") == 1
    assert _alive(running)


@pytest.mark.slow
def test_ctrl_c_stops_the_job_and_leaves_a_running_head(job_script: Path, running: Ray):
    process = _start(job_script, "--mode", "hang", ray=running)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/3"):
            break
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert "rlq: interrupted" in output
    listing = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "job", "list"],
        env=os.environ | running.variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "STOPPED" in listing
    assert "RUNNING" not in listing
