"""Which checkpoint a run resumes from: the newest complete one, never a half-written one, and never silently none."""

import json
import logging
from pathlib import Path

import pytest

from rlq.errors import ConfigError
from trainers.checkpoints import MARKER, fault, mark_complete, resolve_resume


def write_checkpoint(directory: Path, step: int, *, complete: bool = True) -> Path:
    checkpoint = directory / f"checkpoint-{step}"
    (checkpoint / "nested").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights" * 100)
    (checkpoint / "optimizer.pt").write_bytes(b"moments" * 50)
    (checkpoint / "nested" / "rng.pth").write_bytes(b"state")
    if complete:
        mark_complete(checkpoint, version=step)
    return checkpoint


def test_a_marked_checkpoint_has_no_fault_and_its_marker_lists_every_file(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 8)
    assert fault(checkpoint) is None
    marker = json.loads((checkpoint / MARKER).read_text())
    assert marker == {
        "version": 8,
        "files": {"model.safetensors": 700, "optimizer.pt": 350, str(Path("nested") / "rng.pth"): 5},
    }
    mark_complete(checkpoint, version=8)  # marking again does not list the marker
    assert json.loads((checkpoint / MARKER).read_text()) == marker
    assert fault(checkpoint) is None


def test_the_newest_complete_checkpoint_wins_by_number(tmp_path):
    for step in (2, 10, 9):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()  # not one of ours
    (tmp_path / "checkpoint-11.tmp").mkdir()
    assert resolve_resume("true", tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize("request_", [None, "", "false", "False", False])
def test_a_run_that_does_not_ask_starts_anew(tmp_path, request_):
    write_checkpoint(tmp_path, 2)
    assert resolve_resume(request_, tmp_path) is None


@pytest.mark.parametrize("request_", ["true", "True", True])
def test_yaml_and_flags_ask_alike(tmp_path, request_):
    checkpoint = write_checkpoint(tmp_path, 2)
    assert resolve_resume(request_, tmp_path) == checkpoint


def cut_short(checkpoint: Path) -> None:
    data = (checkpoint / "optimizer.pt").read_bytes()
    (checkpoint / "optimizer.pt").write_bytes(data[:-1])


DAMAGES = {
    "no marker": (lambda c: (c / MARKER).unlink(), "its writing was interrupted"),
    "no file": (lambda c: (c / "model.safetensors").unlink(), "model.safetensors is missing or has another size"),
    "no nested file": (lambda c: (c / "nested" / "rng.pth").unlink(), "rng.pth is missing or has another size"),
    "cut short": (cut_short, "optimizer.pt is missing or has another size"),
    "emptied": (lambda c: (c / "optimizer.pt").write_bytes(b""), "optimizer.pt is missing or has another size"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_half_written_checkpoint_is_skipped_with_a_warning(tmp_path, caplog, damage, reason):
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    damage(tmp_path / "checkpoint-6")
    with caplog.at_level(logging.WARNING, logger="trainers.checkpoints"):
        assert resolve_resume("true", tmp_path) == tmp_path / "checkpoint-4"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("skipping checkpoint-6: it ")
    assert reason in message


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_half_written_checkpoint_is_refused_by_name(tmp_path, damage, reason):
    checkpoint = write_checkpoint(tmp_path, 6)
    write_checkpoint(tmp_path, 4)
    damage(checkpoint)
    with pytest.raises(ConfigError, match=reason) as error:
        resolve_resume(str(checkpoint), tmp_path)
    assert str(error.value).startswith(f"cannot resume from {checkpoint}: it ")
    assert "name an older checkpoint" in str(error.value)


def test_an_interrupted_marker_does_not_count(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 2, complete=False)
    (checkpoint / (MARKER + ".partial")).write_text('{"version": 2, "fi')
    assert fault(checkpoint) is not None


def test_a_complete_checkpoint_can_be_named_from_anywhere(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "other" / "run", 4)
    monkeypatch.chdir(tmp_path / "other")
    assert resolve_resume("run/checkpoint-4", tmp_path / "elsewhere") == checkpoint.resolve()


@pytest.mark.parametrize("make", [lambda d: None, lambda d: write_checkpoint(d, 2, complete=False)])
def test_asking_to_resume_from_nothing_is_refused(tmp_path, make):
    make(tmp_path)
    with pytest.raises(ConfigError, match=r"no complete checkpoint in .*; start without --resume_from_checkpoint"):
        resolve_resume("true", tmp_path)


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint in"):
        resolve_resume("true", tmp_path / "never")
    with pytest.raises(ConfigError, match="cannot resume from"):
        resolve_resume(str(tmp_path / "never"), tmp_path)
