"""Several nodes: see nodes_worker.py, which runs in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_actors_spread_over_nodes_share_one_copy_each_and_outlive_the_loss_of_one():
    worker = ROOT / "tests/support/nodes_worker.py"
    ran = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "actors per node": [2, 2],
        "nodes with a copy of the weights": 3,  # the publisher's, and one per node, for two actors each
        "nodes": 3,
        "a batch during which a node is lost is complete": True,
        "versions go on with the rest": True,
        "actors that serve": 2,
        "restarts counted": 0,
        "actors that serve on the new node too": 4,
    }
