"""Dumps survive the disk, and a replay says what the training run would have said."""

import json
import os
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
import torch

from rlq.bridge import Correction, Rollouts, correct, read_rollouts, write_rollouts
from rlq.bridge.replay import replay
from rlq.cli.main import main
from rlq.cli.replay import parse_correction
from rlq.errors import ConfigError


def rollouts(rows=20, length=15, seed=0):
    g = torch.Generator().manual_seed(seed)
    sampler = -2 * torch.rand(rows, length, generator=g) - 0.1
    mask = torch.arange(length) < torch.randint(0, length + 1, (rows, 1), generator=g)
    mask &= torch.rand(rows, length, generator=g) > 0.1
    return Rollouts(
        sampler_logprobs=sampler,
        mask=mask,
        old_logprobs=(sampler + 0.4 * torch.randn(rows, length, generator=g)).clamp(max=0),
        token_ids=torch.randint(0, 99, (rows, length), generator=g),
        reward=torch.rand(rows, generator=g),
        advantage=torch.randn(rows, generator=g),
        version=torch.arange(rows),
        step=torch.full((rows,), 7),
        scheme=("fp8",) * rows,
    )


def ids(batch: Rollouts) -> torch.Tensor:
    assert batch.token_ids is not None
    return batch.token_ids


def merged(batches):
    return replay(batches, {"d": Correction()}).report()["d"]


@pytest.mark.parametrize("batch", [512, 7])
def test_a_dump_gives_back_every_completion_token(tmp_path, batch):
    written = rollouts()
    write_rollouts(tmp_path / "step-1.parquet", written)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1.parquet"]
    read = list(read_rollouts(tmp_path, batch=batch))
    assert [len(r.mask) for r in read] == ([20] if batch > 20 else [7, 7, 6])
    for name in ("sampler_logprobs", "old_logprobs", "token_ids"):
        tokens = torch.cat([getattr(r, name)[r.mask] for r in read])
        assert torch.equal(tokens, getattr(written, name)[written.mask]), name
    for name in ("reward", "advantage", "version", "step"):
        assert torch.equal(torch.cat([getattr(r, name) for r in read]), getattr(written, name)), name
    assert [s for r in read for s in r.scheme or ()] == ["fp8"] * 20
    assert [int(n) for r in read for n in r.mask.sum(-1)] == written.mask.sum(-1).tolist()


def test_left_padded_rollouts_lose_only_their_padding(tmp_path):
    written = rollouts()
    flipped = replace(
        written,
        sampler_logprobs=written.sampler_logprobs.flip(1),
        mask=written.mask.flip(1),
        old_logprobs=written.learner().flip(1),
        token_ids=ids(written).flip(1),
    )
    write_rollouts(tmp_path / "left.parquet", flipped)
    (read,) = read_rollouts(tmp_path / "left.parquet")
    assert torch.equal(ids(read)[read.mask], ids(flipped)[flipped.mask])


def test_replay_equals_the_correction_of_the_whole_batch(tmp_path):
    written = rollouts()
    write_rollouts(tmp_path / "a.parquet", written)
    advantage = written.advantage
    assert advantage is not None
    names = ["rlq/default", "verl/decoupled_geo_rs", "trl/sequence_mask", "prime-rl/dppo"]
    corrections = {name: Correction.preset(name) for name in names}
    report = replay(read_rollouts(tmp_path, batch=7), corrections).report()
    for name, correction in corrections.items():
        whole = correct(written.learner(), written.sampler_logprobs, written.mask, correction, advantages=advantage)
        cosine = report[name].pop("cosine")
        assert report[name] == pytest.approx(whole.metrics, rel=1e-6)
        ours = correct(written.learner(), written.sampler_logprobs, written.mask, corrections["rlq/default"])
        g = [(o.weights * advantage[:, None]).flatten().double() for o in (ours, whole)]
        assert cosine == pytest.approx(torch.cosine_similarity(*g, dim=0).item(), rel=1e-6)


def test_a_dump_whose_writing_failed_leaves_the_last_one(tmp_path, monkeypatch):
    write_rollouts(tmp_path / "a.parquet", rollouts())
    before = (tmp_path / "a.parquet").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_rollouts(tmp_path / "a.parquet", rollouts(seed=1))
    assert (tmp_path / "a.parquet").read_bytes() == before
    assert len(list(read_rollouts(tmp_path))) == 1


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_files_that_cannot_be_replayed_say_what_they_have(tmp_path):
    with pytest.raises(ConfigError, match="no rollouts"):
        list(read_rollouts(tmp_path))
    (tmp_path / "x.npz").touch()
    with pytest.raises(ConfigError, match=r"give a \.parquet file"):
        list(read_rollouts(tmp_path / "x.npz"))
    zeros = [[0.0, 0.0]]
    parquet(tmp_path / "x.parquet", sampler_logprobs=zeros, mask=[[1, 1]])
    with pytest.raises(ConfigError, match=r"lacks old_logprobs or logprobs; it has sampler_logprobs, mask"):
        list(read_rollouts(tmp_path))
    parquet(tmp_path / "x.parquet", old_logprobs=zeros, sampler_logprobs=zeros, mask=[[0.5, 1.0]])
    with pytest.raises(ConfigError, match="other values than 0 and 1"):
        list(read_rollouts(tmp_path))
    with pytest.raises(ConfigError, match=r"name it \.parquet"):
        write_rollouts(tmp_path / "x.csv", rollouts())
    with pytest.raises(ConfigError, match="has no logprobs"):
        rollouts().learner("logprobs")


def test_correction_names_take_changes():
    assert parse_correction("rlq/default:upper=4:normalize=batch") == Correction(upper=4.0, normalize="batch")
    assert parse_correction("rlq/default:veto=none").veto is None
    for text in ("rlq/defaul", "rlq/default:cap=4", "rlq/default:upper", "rlq/default:upper=0.5"):
        with pytest.raises(ConfigError):
            parse_correction(text)


def test_command_prints_a_table_writes_json_and_plots(tmp_path, capsys):
    write_rollouts(tmp_path / "a.parquet", rollouts())
    report = tmp_path / "report.json"
    plots = tmp_path / "plots"
    options = ["--corrections", "rlq/default,trl/token_mask:upper=1.5", "--json", str(report), "--plots", str(plots)]
    assert main(["replay", str(tmp_path / "a.parquet"), *options]) == 0
    assert "rlq/default" in capsys.readouterr().out
    corrections = json.loads(report.read_text())["corrections"]
    assert corrections["rlq/default"]["cosine"] == pytest.approx(1)
    assert corrections["trl/token_mask:upper=1.5"]["weight_max"] <= 1.5
    assert (plots / "replay.png").stat().st_size > 10_000


@pytest.mark.parametrize("corrections", ["nope/x", "", "rlq/default:upper=0.1"])
def test_command_refuses_bad_corrections_with_code_2(tmp_path, capsys, corrections):
    write_rollouts(tmp_path / "a.parquet", rollouts())
    assert main(["replay", str(tmp_path / "a.parquet"), "--corrections", corrections]) == 2
    assert capsys.readouterr().err.startswith("rlq: error:")
