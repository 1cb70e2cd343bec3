"""What a run shows: records, progress lines, curves, the closing table, and wandb with and without a server."""

import io
import json
import logging
import math
import re
import warnings

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainers.tracking import records, wandb_run
from trainers.tracking.callback import SUMMARY_ROWS, RunRecorder, summary_table
from trainers.tracking.curves import PANELS, plot_curves
from trainers.tracking.progress import SHOWN, Progress

ARGS = TrainingArguments(use_cpu=True, report_to="none")


def history(steps: int, *, reward: float = 0.5, scale: float = 1.0) -> list[dict]:
    """A run's records: every metric that a panel or a table row shows, each moving with the step."""
    metrics = {metric for _, _, panel, _ in PANELS for metric in panel} | {metric for _, metric in SUMMARY_ROWS}
    return [
        {"step": step, "loss": 0.1}
        | {metric: scale * step * (i + 1) / 1000 for i, metric in enumerate(sorted(metrics))}
        | {"reward": reward + step / 100}
        for step in range(1, steps + 1)
    ]


# ---- metrics.jsonl


def test_records_round_trip(tmp_path):
    path = tmp_path / records.FILE
    written = [{"step": 1, "reward": 0.25, "note": "a"}, {"step": 2, "reward": 1 / 3, "rlq/sync/bytes": 1e9}]
    for record in written:
        records.append(path, record)
    assert records.load(path) == written
    assert path.read_text().count("\n") == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_number_becomes_null_and_the_line_stays_json(tmp_path, value):
    path = tmp_path / records.FILE
    record = {"step": 1, "loss": value, "reward": 0.5}
    records.append(path, record)
    line = path.read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": None, "reward": 0.5}
    assert record["loss"] is value  # the caller's record is not changed


@pytest.mark.parametrize("kept", [0, 1, 7, -2, -1])
def test_a_last_line_that_a_crash_cut_short_is_left_out(tmp_path, kept):
    path = tmp_path / records.FILE
    for step in (1, 2):
        records.append(path, {"step": step, "loss": 0.5})
    last = json.dumps({"step": 3, "loss": 0.5}) + "\n"
    with path.open("a") as file:
        file.write(last[:kept])
    complete = last[:kept].endswith("}")  # only the line break is missing
    assert [r["step"] for r in records.load(path)] == ([1, 2, 3] if complete else [1, 2])
    # A resumed run drops what it writes again, and its first line starts on a line of its own.
    records.truncate_after(path, 2)
    records.append(path, {"step": 3, "loss": 0.25})
    assert records.load(path) == [{"step": s, "loss": v} for s, v in ((1, 0.5), (2, 0.5), (3, 0.25))]


@pytest.mark.parametrize(("step", "left"), [(0, []), (2, [1, 2]), (9, [1, 2, 3, 4])])
def test_truncation_keeps_the_steps_up_to_the_one_resumed_from(tmp_path, step, left):
    path = tmp_path / records.FILE
    for s in (1, 2, 3, 4):
        records.append(path, {"step": s})
    records.truncate_after(path, step)
    assert [r["step"] for r in records.load(path)] == left
    assert [p.name for p in tmp_path.iterdir()] == [records.FILE]


def test_truncation_without_a_file_does_nothing(tmp_path):
    records.truncate_after(tmp_path / records.FILE, 3)
    assert not list(tmp_path.iterdir())


# ---- progress


def test_json_mode_prints_exactly_one_step_line_per_step(monkeypatch, capsys):
    monkeypatch.setenv("RLQ_PROGRESS", "json")
    progress = Progress(max_steps=60, start_step=10)
    progress.update(11, {"step": 11, "reward": 0.25, "rlq/sampler_kl_k3": 1e-4, "loss": 3.0, "entropy": 1.0})
    progress.update(12, {"step": 12, "reward": None, "rlq/clip_frac_high": 0.5, "rlq/rollout/tokens_per_s": 1e4})
    progress.close()
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert all(line.startswith("rlq-step ") for line in lines)
    first, second = (json.loads(line.removeprefix("rlq-step ")) for line in lines)
    assert {"step", "max_steps", "eta_s"} <= first.keys() <= {"step", "max_steps", "eta_s", *SHOWN}
    assert (first["step"], first["max_steps"]) == (11, 60)
    assert (first["reward"], first["rlq/sampler_kl_k3"]) == (0.25, 1e-4)
    assert second["rlq/rollout/tokens_per_s"] == 1e4
    assert "reward" not in second
    assert isinstance(first["eta_s"], int)


def test_the_time_left_counts_the_steps_of_this_run_only(monkeypatch, capsys):
    monkeypatch.setenv("RLQ_PROGRESS", "json")
    clock = iter([100.0, 120.0])  # two steps in 20 s after a resume at step 50: 48 steps of 10 s are left
    monkeypatch.setattr("trainers.tracking.progress.time.monotonic", lambda: next(clock))
    Progress(max_steps=100, start_step=50).update(52, {"reward": 1.0})
    assert json.loads(capsys.readouterr().out.removeprefix("rlq-step "))["eta_s"] == 480


def test_plain_mode_prints_one_readable_line_per_step(monkeypatch, capsys):
    monkeypatch.delenv("RLQ_PROGRESS", raising=False)
    progress = Progress(max_steps=60)
    progress.update(3, {"reward": 0.25, "rlq/rollout/tokens_per_s": 9876.5})
    progress.close()
    assert capsys.readouterr().out == "step 3/60  reward 0.25  tok/s 9.88e+03\n"


def test_on_a_terminal_a_bar_shows_the_step_and_stays_at_the_last_one(monkeypatch, capsys):
    monkeypatch.delenv("RLQ_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    progress = Progress(max_steps=60, start_step=10)
    progress.update(12, {"reward": 0.25})
    progress.close()
    out = capsys.readouterr().out
    assert "12/60" in out
    assert "reward 0.25" in out
    assert "step 12" not in out, "no plain line beside the bar"


def test_the_recorder_writes_steps_and_drops_what_a_resumed_run_writes_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLQ_PROGRESS", "json")
    path = tmp_path / records.FILE
    for step in (1, 2, 3):
        records.append(path, {"step": step, "loss": 9.0})
    recorder, control = RunRecorder(tmp_path), TrainerControl()
    state = TrainerState(global_step=2, max_steps=4)
    recorder.on_train_begin(ARGS, state, control)
    state.global_step = 3
    recorder.on_log(ARGS, state, control, logs={"loss": 0.5, "reward": 1.0})
    recorder.on_log(ARGS, state, control, logs={"eval_loss": 0.5})  # recorded, not a step
    recorder.on_log(ARGS, state, control, logs={"train_runtime": 1.0, "train_loss": 2.0})  # transformers' closing entry
    recorder.on_train_end(ARGS, state, control)
    loaded = records.load(path)
    assert [(r["step"], r.get("loss"), r.get("eval_loss")) for r in loaded] == [
        (1, 9.0, None),
        (2, 9.0, None),
        (3, 0.5, None),
        (3, None, 0.5),
    ]
    assert all("time" in r for r in loaded[2:])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_rank_that_is_not_the_first_records_nothing(tmp_path, capsys):
    recorder, state = RunRecorder(tmp_path), TrainerState(global_step=1, max_steps=4, is_world_process_zero=False)
    recorder.on_train_begin(ARGS, state, TrainerControl())
    recorder.on_log(ARGS, state, TrainerControl(), logs={"loss": 0.5})
    recorder.on_train_end(ARGS, state, TrainerControl())
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


# ---- curves


def draw(path, **runs) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_curves(runs, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def coloured(pixels: np.ndarray) -> np.ndarray:
    """Pixels that are neither black, grey nor white: lines of a curve, since everything else of the plot is grey."""
    return pixels.max(-1) - pixels.min(-1) > 60


@pytest.fixture(scope="module")
def one_run(tmp_path_factory) -> np.ndarray:
    return draw(tmp_path_factory.mktemp("curves") / "curves.png", fp8=history(20))


def test_curves_are_drawn_in_every_panel(one_run):
    assert one_run.shape == (825, 1650, 3)  # 15 x 7.5 inches at 110 dots per inch
    panels = [half for row in np.split(coloured(one_run)[:824], 2) for half in np.split(row, 3, axis=1)]
    assert [panel.sum() > 100 for panel in panels] == [True] * 6


def warm(pixels: np.ndarray) -> int:
    """Orange pixels of the reward panel: the second colour of the default cycle, where the first is blue."""
    red, _, blue = np.moveaxis(pixels[:412, :550], -1, 0)
    return int((red - blue > 100).sum())


def test_curves_of_several_runs_have_one_colour_per_arm(one_run, tmp_path):
    same_arm = draw(tmp_path / "arm.png", **{"fp8 0": history(20), "fp8 1": history(20, reward=0.1)})
    two_arms = draw(tmp_path / "arms.png", **{"fp8 0": history(20), "bf16 0": history(20, reward=0.1, scale=0.5)})
    assert two_arms.shape == one_run.shape
    assert warm(one_run) == warm(same_arm) == 0
    assert warm(two_arms) > 20


def test_curves_survive_gaps_zeros_and_runs_that_never_logged(tmp_path):
    zeros = [{"step": s, "reward": None, "rlq/sampler_kl_k3": 0.0, "rlq/clip_frac_high": 0.0} for s in (1, 2)]
    pixels = draw(tmp_path / "odd.png", nothing=[], blank=[{"step": 1}], zeros=zeros)
    assert coloured(pixels).any()  # the clip fraction of `zeros`, the only thing there is to draw
    assert not coloured(pixels)[:, :550].any()


# ---- closing table


def table_text(rows: list[dict]) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table(rows))
    return out.getvalue()


def cells(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(label)]
    return line.strip().removeprefix(label).replace("│", " ").split()


def test_the_table_shows_the_first_and_the_last_window(tmp_path):
    text = table_text(history(20))
    assert "20 logged steps" in text
    assert re.search(r"mean of\W+first 5\W+last 5", text)
    # reward is 0.5 + step / 100: means over steps 1-5 and 16-20.
    assert cells(text, "reward") == ["0.53", "0.68"]
    assert all(label in text for label, _ in SUMMARY_ROWS)


def test_the_table_leaves_out_what_was_never_logged_and_counts_only_what_was():
    rows = [{"step": s, "reward": None if s < 20 else 1.0, "step_time": float(s)} for s in range(1, 21)]
    text = table_text(rows)
    assert cells(text, "reward") == ["-", "1"]
    assert cells(text, "step (s)") == ["3", "18"]
    assert "sampling accuracy" not in text


def test_the_table_of_a_short_or_empty_run_is_still_a_table():
    assert cells(table_text(history(2)), "reward") == ["0.515", "0.515"]
    assert "0 logged steps" in table_text([])


def test_large_numbers_are_readable():
    assert (
        cells(table_text([{"rlq/sync/bytes": 1234567.0, "step_time": 0.001234}]), "published bytes")[0] == "1,234,567"
    )


# ---- wandb


@pytest.fixture
def wandb_home(tmp_path, monkeypatch):
    """A clean wandb in this process: it reads its environment once, when it is first set up."""
    import wandb

    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    wandb.teardown()
    yield tmp_path
    if wandb.run is not None:
        wandb.run.finish()
    wandb.teardown()


def test_without_a_key_wandb_runs_offline_with_summaries_on_a_step_axis(wandb_home):
    """Logged as in a run: by transformers' callback, which has to find and use the run that was started."""
    import wandb
    from transformers.integrations import WandbCallback

    run = wandb_run.start(wandb_home, "name", "group", {"seed": 1})
    assert run.offline
    assert (run.project, run.name, run.group, run.job_type) == ("rlq", "name", "group", "learner")
    assert run.config["seed"] == 1
    callback, state = WandbCallback(), TrainerState(max_steps=3)
    callback.on_train_begin(ARGS, state, TrainerControl())
    metrics = [metric.removeprefix("train/") for metric, _ in wandb_run.SUMMARIES]
    for step, value in enumerate((1.0, 3.0, 2.0), start=1):
        state.global_step = step
        callback.on_log(ARGS, state, TrainerControl(), logs=dict.fromkeys(metrics, value))
    assert wandb.run is run
    expected = {"max": 3.0, "min": 1.0, "last": 2.0}
    for metric, summary in wandb_run.SUMMARIES:
        assert dict(run.summary[metric]) == {kind: expected[kind] for kind in summary.split(",")}, metric
    run.finish()
    (file,) = wandb_home.rglob("*.wandb")
    assert file.is_relative_to(wandb_home / "wandb")
    assert b"train/global_step" in file.read_bytes()


def test_an_unreachable_server_is_one_warning_and_the_run_goes_on_offline(wandb_home, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setattr(wandb_run, "INIT_TIMEOUT_S", 1)
    with caplog.at_level(logging.WARNING, logger="trainers.tracking.wandb_run"):
        run = wandb_run.start(wandb_home, "name", "group", {})
    messages = [r.getMessage() for r in caplog.records if r.name == "trainers.tracking.wandb_run"]
    assert len(messages) == 1
    assert re.fullmatch(r"wandb is not reachable \(.+\); logging offline, upload later with `wandb sync`", messages[0])
    assert run.offline
    run.log({"train/global_step": 1, "train/reward": 3.0})
    run.log({"train/global_step": 2, "train/reward": 2.0})
    assert dict(run.summary["train/reward"]) == {"max": 3.0, "last": 2.0}
    run.finish()
    assert [p for p in wandb_home.rglob("*.wandb") if p.parent.name.startswith("offline-run-")]
