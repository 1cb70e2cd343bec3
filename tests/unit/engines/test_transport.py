"""Transports without Ray: shared memory and directories, complete or not there, one publisher, kept and swept."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rlq.errors import ConfigError, SamplerError, SnapshotError
from rlq.formats.schemes import Scheme
from rlq.publish import MANIFEST, Snapshot, delta, snapshot
from samplers.options import SamplerConfig
from samplers.transport import directory, shared_memory
from samplers.transport.directory import Directory, read_version
from samplers.transport.shared_memory import SharedMemory

FP8 = Scheme.preset("fp8")


def snap(version: int) -> Snapshot:
    generator = torch.Generator().manual_seed(version)
    weight = torch.randn(8, 32, generator=generator)
    return snapshot(
        [("model.layers.0.mlp.up_proj.weight", weight), ("model.norm.weight", torch.ones(32))], FP8, version
    )


def same(a: Snapshot, b: Snapshot) -> bool:
    return (a.digest, a.version, a.scheme) == (b.digest, b.version, b.scheme) and set(a.tensors) == set(b.tensors)


@pytest.fixture(params=["shared_memory", "directory"])
def way(request, tmp_path):
    config = SamplerConfig(sampler_transport=request.param, sampler_transport_dir=str(tmp_path / "versions"))
    made = config.transport({"model_type": "llama"})
    yield made
    made.close()


def test_whole_versions_and_deltas_arrive_as_they_were_sent(way):
    one, two = snap(1), snap(2)
    assert same(way.send(1, one).open(), one)
    opened = way.send(2, delta.encode(one, two)).open()
    assert isinstance(opened, delta.Delta)
    assert (opened.info.base_version, opened.info.digest) == (1, two.digest)


def test_two_readers_open_one_ticket(way):
    ticket = way.send(1, snap(1))
    assert same(ticket.open(), ticket.open())


def test_shared_memory_is_freed_on_release_and_says_so_to_late_readers():
    way = SharedMemory()
    ticket = way.send(1, snap(1))
    held: Any = ticket.open()
    way.release(ticket)
    assert same(held, snap(1)), "who has it mapped keeps it"
    with pytest.raises(SnapshotError, match="is gone or empty"):
        ticket.open()
    way.close()


def test_shared_memory_of_a_killed_publisher_is_swept():
    code = (
        "import os, torch; from samplers.transport.shared_memory import SharedMemory;"
        "way = SharedMemory(); print(way._folder, flush=True); os._exit(9)"
    )
    root = Path(__file__).resolve().parents[3]
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    left = Path(ran.stdout.strip())
    assert left.is_dir()
    way = SharedMemory()
    assert not left.exists()
    assert way._folder.is_dir()
    way.close()
    assert not way._folder.exists()


def test_shared_memory_that_is_full_is_refused_before_anything_is_written(monkeypatch):
    way = SharedMemory()
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    with pytest.raises(SamplerError, match="0 MiB left; enlarge it or set sampler_transport"):
        way.send(1, snap(1))
    assert not list(way._folder.iterdir())
    way.close()


def test_shared_memory_reaches_one_host_only():
    way = SharedMemory()
    with pytest.raises(ConfigError, match="out of reach of this host's shared memory; set sampler_transport"):
        way.check_hosts(["somewhere-else"])
    way.close()


def test_a_folder_has_one_publisher_until_it_is_gone(tmp_path):
    first = Directory(tmp_path, {})
    with pytest.raises(
        ConfigError, match=rf"in use by another publisher \(pid {os.getpid()} on .*sampler_transport_dir"
    ):
        Directory(tmp_path, {})
    first.close()
    Directory(tmp_path, {}).close()


def test_a_version_is_published_once(tmp_path):
    way = Directory(tmp_path, {})
    way.send(1, snap(1))
    way.send(1, snap(1))  # a fresh sampler needs it again
    other = snapshot(snap(2).tensors.items(), Scheme.preset("bf16"), 1)
    with pytest.raises(SnapshotError, match="holds other weights as version 1"):
        way.send(1, other)
    way.close()


def publish_chain(way: Directory, versions: range, whole_every: int) -> dict[int, Snapshot]:
    sent, last = {}, None
    for version in versions:
        now = snap(version)
        way.send(version, now if last is None or version % whole_every == 0 else delta.encode(last, now))
        sent[version] = last = now
    return sent


def test_every_kept_version_can_be_read_again(tmp_path):
    way = Directory(tmp_path, {}, keep=2)
    sent = publish_chain(way, range(10), whole_every=4)
    for version in range(4, 10):
        assert same(read_version(tmp_path, version), sent[version])
    with pytest.raises(SnapshotError, match="no whole version up to 3"):
        read_version(tmp_path, 3)
    with pytest.raises(SnapshotError, match="goes up to version 9, not 12"):
        read_version(tmp_path, 12)
    way.close()


def test_a_resumed_run_removes_what_the_first_one_did_beyond_that_point(tmp_path):
    way = Directory(tmp_path, {})
    first = publish_chain(way, range(6), whole_every=4)
    way.close()
    again = Directory(tmp_path, {})
    again.send(3, snap(30 - 27))
    assert same(read_version(tmp_path, 3), first[3])
    assert same(read_version(tmp_path, 2), first[2])
    with pytest.raises(SnapshotError, match="goes up to version 3"):
        read_version(tmp_path, 5)
    again.close()


def test_a_folder_without_its_manifest_is_incomplete_and_a_manifest_without_weights_is_damaged(tmp_path):
    way = Directory(tmp_path, {})
    ticket = way.send(1, snap(1))
    folder = Path(ticket.path)
    shards = folder / "model.safetensors"
    kept = shards.read_bytes()
    shards.unlink()
    with pytest.raises(SnapshotError, match=r"does not match its manifest|damaged"):
        ticket.open()
    shards.write_bytes(kept[:-7])
    with pytest.raises(SnapshotError, match="damaged"):
        ticket.open()
    shards.write_bytes(kept)
    assert same(ticket.open(), snap(1))  # type: ignore[arg-type]
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    with pytest.raises(SnapshotError, match="incomplete"):
        ticket.open()
    (folder / MANIFEST).write_text(json.dumps(manifest | {"digest": "0" * 64}))
    with pytest.raises(SnapshotError, match="does not match its manifest"):
        ticket.open()
    way.close()


def test_a_reader_beside_a_writer_sees_whole_versions_or_none(tmp_path):
    """A reader that takes the newest complete version while forty are being written never reads a half-written one."""
    way, done, seen = Directory(tmp_path, {}), threading.Event(), []

    def read() -> None:
        while not done.is_set() or not seen:
            whole = sorted(path.parent for path in tmp_path.glob(f"v*/{MANIFEST}"))
            if whole:
                seen.append(directory.read_directory(whole[-1]))

    reader = threading.Thread(target=read)
    reader.start()
    sent = {version: snap(version) for version in range(40)}
    for version, each in sent.items():
        way.send(version, each)
    done.set()
    reader.join()
    assert all(same(each, sent[each.version]) for each in seen)
    assert len(seen) > 1
    way.close()
