"""Environment and shared fixtures of every test.

The variables are set before any test module is imported: Ray, transformers and wandb read them at import time, and the
processes that tests start inherit them.
"""

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_TOKEN_FOLDER = tempfile.TemporaryDirectory(prefix="rlq-test-")
_TOKEN = Path(_TOKEN_FOLDER.name, "auth_token")
_TOKEN.write_text(secrets.token_hex(32))

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    WANDB_MODE="offline",
    RAY_USAGE_STATS_ENABLED="0",
    # Ray runs workers at nice 15 by default, which triples their import time on a busy machine.
    RAY_worker_niceness="0",
    TOKENIZERS_PARALLELISM="false",
    # Ray listens on every interface; with a token nobody else can run code through it, and naming one keeps Ray from
    # writing ~/.ray/auth_token.
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN_PATH=str(_TOKEN),
)
# Tests that talk to a cluster start their own.
os.environ.pop("RAY_ADDRESS", None)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for all tests of the session: 4 logical CPUs whatever the machine has, no dashboard."""
    import ray

    ray.init(
        address="local",  # never a cluster that happens to run here
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=200_000_000,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()
