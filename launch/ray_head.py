"""A local Ray head that lives exactly as long as its `with` block, or the one that is already there.

The head is `ray start --head --block`, the command that a user would type, in a session of its own: Ctrl-C reaches
all processes of a terminal's session, and Ray's job server would end before the job could be stopped in order. Linux
ends the head's daemons with it, so stopping it cannot touch another head on the same machine, which `ray stop` would.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from rlq.errors import RlqError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 15
GIB = 2**30


@dataclass(frozen=True)
class Ray:
    """Where jobs are submitted to."""

    variables: dict[str, str]
    """What Ray's commands and clients need in their environment to reach it; RAY_ADDRESS among them."""
    local: bool
    """True when jobs run on this machine, and so can use this interpreter."""
    ours: bool
    """True when it was started here."""


@contextmanager
def local_or_running_ray() -> Iterator[Ray]:
    """The cluster that the environment names, else the one at Ray's default address, else a head of our own.

    Raises:
        RlqError: a head of our own did not start.
    """
    named = next((os.environ[name] for name in ADDRESS_VARIABLES if os.environ.get(name)), None)
    if named is not None:
        local = any(word in named for word in ("127.0.0.1", "localhost", "auto"))
        yield Ray({"RAY_ADDRESS": named}, local=local, ours=False)
        return
    if _lets_in(DEFAULT_ADDRESS, token=None):
        yield Ray({"RAY_ADDRESS": DEFAULT_ADDRESS}, local=True, ours=False)
        return
    token = _user_token()
    if token is not None and _lets_in(DEFAULT_ADDRESS, token=token):
        # Ray's clients send the user's token to a given address only when they are told to.
        yield Ray({"RAY_ADDRESS": DEFAULT_ADDRESS, "RAY_AUTH_MODE": "token"}, local=True, ours=False)
        return
    with _head() as variables:
        yield Ray(variables, local=True, ours=True)


def environment(**extra: str) -> dict[str, str]:
    """The environment of Ray's commands: this interpreter's folder first, unbuffered, and no inherited surprises."""
    dropped = {"OMP_NUM_THREADS", *ADDRESS_VARIABLES}
    if TOKEN_PATH in extra:
        dropped.add(TOKEN)  # would win over the file
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env.update(
        PATH=f"{interpreter_folder()}{os.pathsep}{env['PATH']}",
        PYTHONUNBUFFERED="1",
        RAY_USAGE_STATS_ENABLED="0",
        # Ray gives workers nice 15, which triples the import time of an engine on a busy machine.
        RAY_worker_niceness="0",
        # Time for a stopped job to write its checkpoint and close its tracker; Ray's own default is 3 s.
        RAY_JOB_STOP_WAIT_TIME_S="20",
        **extra,
    )
    return env


def interpreter_folder() -> Path:
    """The folder that holds `python` and `ray` of this environment (not resolved: a venv's python is a link)."""
    return Path(sys.executable).parent


@contextmanager
def _head() -> Iterator[dict[str, str]]:
    # Short, because Ray puts Unix sockets deep below it and their paths may have 107 characters at most.
    temp_dir = Path(tempfile.mkdtemp(prefix="rlq-", dir="/tmp"))
    log_path, token_path = temp_dir / "head.log", temp_dir / "auth_token"
    # Ray listens on every interface; with a token of its own nobody else can run code through it.
    token = secrets.token_hex(32)
    token_path.write_text(token)
    port = _free_port(8265)
    address = f"http://127.0.0.1:{port}"
    auth = {"RAY_AUTH_MODE": "token", TOKEN_PATH: str(token_path)}
    with log_path.open("w") as log:
        process = subprocess.Popen(
            _head_command(temp_dir, port),
            env=environment(**auth),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(address, token, process, log_path)
        yield {"RAY_ADDRESS": address, **auth}
    finally:
        _stop(process)
        shutil.rmtree(temp_dir, ignore_errors=True)


def _head_command(temp_dir: Path, port: int) -> list[str]:
    options = {
        "port": _free_port(6379),
        "dashboard-host": "127.0.0.1",
        "dashboard-port": port,
        "dashboard-agent-listen-port": _free_port(52365),
        "ray-client-server-port": _free_port(10001),
        "num-cpus": len(os.sched_getaffinity(0)),
        "object-store-memory": _object_store_bytes(),
        "temp-dir": temp_dir,
    }
    return [
        str(interpreter_folder() / "ray"),
        *("start", "--head", "--block", "--disable-usage-stats"),
        *(f"--{name}={value}" for name, value in options.items()),
    ]


def _object_store_bytes() -> int:
    """A bound rather than a reservation: pages of the store are taken when they are written."""
    shared = shutil.disk_usage("/dev/shm").free
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(100_000_000, min(8 * GIB, int(0.8 * shared), int(0.3 * memory)))


def _wait_until_ready(address: str, token: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _lets_in(address, token=token):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.stderr.write("".join(log_path.read_text().splitlines(keepends=True)[-20:]))
            raise RlqError("the local Ray head did not start; the end of its log is above")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # The head is a session of its own, so this ends its daemons and nobody else's.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lets_in(address: str, *, token: str | None) -> bool:
    """True when a Ray job server answers there and accepts the token (or asks for none)."""
    request = urllib.request.Request(f"{address}/api/version")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=2) as response:
            return b"ray_version" in response.read()
    except (OSError, HTTPException):  # nothing listens, it refuses us (urllib's errors are OSErrors), or it is not HTTP
        return False


def _user_token() -> str | None:
    """The token that Ray's own commands would send, found where they look for it."""
    if os.environ.get(TOKEN):
        return os.environ[TOKEN]
    path = Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    return path.read_text().strip() if path.is_file() else None


def _free_port(preferred: int) -> int:
    for port in (preferred, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise RlqError("no free port on 127.0.0.1")
