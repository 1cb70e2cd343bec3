"""Every file in configs/ and every slip that a command line invites, up to the moment before Ray would start."""

import os
import pickle
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from launch.grpo import main
from launch.settings import CONFIGS, build_plan, parse, read_config, resolve_model, resolve_run_dir
from rlq.bridge import Correction, correct
from rlq.errors import ConfigError
from trainers.checkpoints import mark_complete
from trainers.learner import load_rewards
from trainers.tracking import records

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "configs").glob("*.yaml"))
RUNS = [path for path in FILES if path.stem != "base"]
DEFAULT = ROOT / "configs" / "grpo_fp8.yaml"


def plan(*argv: str):
    return build_plan(*parse(list(argv), DEFAULT), ROOT)


def refusal(*argv: str) -> str:
    """The message of the ConfigError that these arguments raise, checked to be one line."""
    with pytest.raises(ConfigError) as error:
        plan(*argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def variant(tmp_path: Path, text: str) -> str:
    """A configuration file that is the default one plus `text`."""
    path = tmp_path / "variant.yaml"
    settings = "".join(line for line in DEFAULT.read_text().splitlines(keepends=True) if text.split(":")[0] not in line)
    path.write_text(settings.replace("extends: base.yaml", f"extends: {DEFAULT.parent / 'base.yaml'}") + text + "\n")
    return str(path)


# ---- the files


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_file_parses_builds_a_plan_and_survives_its_own_record(path, tmp_path):
    configs, given = parse(["--config", str(path), "--output_dir", str(tmp_path / "run")], DEFAULT)
    learner, sampler = build_plan(configs, given, ROOT)
    assert learner.run_dir == tmp_path / "run"
    assert learner.grpo.output_dir == str(tmp_path / "run" / "checkpoints")
    assert learner.scheme == sampler.scheme()
    assert Path(learner.model_path).is_dir()
    assert learner.resume is None
    again, given_again = parse(["--config", str(tmp_path / "run" / "config.yaml")], DEFAULT)
    fresh, _ = parse(["--config", str(path), "--output_dir", str(tmp_path / "run")], DEFAULT)
    assert again == fresh
    assert given_again == learner.config == yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())


def test_runs_differ_in_name_and_scheme_alone():
    settings = {path.stem: read_config(path) for path in RUNS}
    control = settings["grpo_bf16"]
    assert control["sampler_scheme"] == "bf16"
    for name, run in settings.items():
        assert run == control | {"run_name": name, "sampler_scheme": name.removeprefix("grpo_")}


def test_the_default_run_is_the_one_that_was_measured():
    """The settings of the default run before they were split into a base and overlays; docs/results.md measured it."""
    assert read_config(DEFAULT) == {
        "run_name": "grpo_fp8", "seed": 0, "model_name_or_path": "configs/models/sort_digits",
        "dataset_name": "sort_digits", "dataset_rows": 4096, "reward_funcs": ["exact_match"], "max_steps": 60,
        "learning_rate": 5e-4, "lr_scheduler_type": "linear", "per_device_train_batch_size": 256, "num_generations": 8,
        "max_completion_length": 8, "temperature": 1.0, "loss_type": "dapo", "beta": 0.0, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "learner_num_threads": 1, "save_steps": 20,
        "save_total_limit": 2, "sampler_scheme": "fp8", "num_samplers": 2, "sampler_num_cpus": 1,
        "sampler_max_model_len": 32, "sampler_max_num_seqs": 128, "report_to": "wandb",
    }  # fmt: skip


def test_a_file_extends_another_and_its_own_settings_win(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "one.yaml").write_text("seed: 1\nmax_steps: 5\nbeta: 0.5\n")
    (tmp_path / "deep/two.yaml").write_text("extends: ../one.yaml\nseed: 2\nbeta: null\n")
    (tmp_path / "three.yaml").write_text("extends: deep/two.yaml\nrun_name: three\n")
    assert read_config(tmp_path / "three.yaml") == {"seed": 2, "max_steps": 5, "beta": None, "run_name": "three"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "extends: b.yaml", "b": "extends: a.yaml"}, "a.yaml extends b.yaml extends a.yaml: a circle; remove"),
        ({"a": "extends: a.yaml"}, "a.yaml extends a.yaml: a circle"),
        ({"a": "extends: b.yaml"}, "b.yaml', which a.yaml extends, cannot be read (No such file"),
        ({"a": "extends: b.yaml", "b": "- a list"}, "b.yaml' must hold `setting: value` lines"),
        ({"a": "extends: [b.yaml]"}, "extends is ['b.yaml']; name one file"),
        ({"a": "extends: b.yaml", "b": "sampler_schem: fp8"}, "unknown setting sampler_schem; did you mean"),
    ],
    ids=str,
)
def test_a_faulty_extends_is_one_line(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError) as error:
        parse(["--config", str(tmp_path / "a.yaml")], DEFAULT)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["grpo_fp8", "grpo_bf16"])
def test_each_launch_script_is_executable_and_names_its_file(name):
    script = ROOT / "launch" / f"{name}.py"
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env python3\n")
    assert f'main("configs/{name}.yaml")' in script.read_text()


def test_no_two_configuration_classes_share_a_field():
    names = [field.name for config in CONFIGS for field in fields(config)]
    assert len(names) == len(set(names))


# ---- flags and keys


def test_a_flag_overrides_the_file_and_is_recorded(tmp_path):
    learner, sampler = plan("--output_dir", str(tmp_path), "--num_samplers", "1", "--learning_rate=1e-3")
    assert (sampler.num_samplers, learner.grpo.learning_rate) == (1, 1e-3)
    recorded = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (recorded["num_samplers"], recorded["learning_rate"]) == (1, 1e-3)


def test_config_can_be_given_with_an_equals_sign(tmp_path):
    path = variant(tmp_path, "seed: 7")
    (_, grpo, *_), _ = parse([f"--config={path}"], DEFAULT)
    assert grpo.seed == 7


def test_settings_of_every_kind_survive_the_record(tmp_path):
    flags = [
        *("--sampler_ignore", "lm_head", r"re:.*down_proj$"),
        *("--bridge_mode", "clip", "--bridge_lower", "0.5", "--bridge_upper", "inf"),
        *("--bridge_veto_low", "none", "--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs", '{"num_cycles": 1}'),
        *("--report_to", "none", "--save_steps", "5", "--max_nonfinite_frac", "0.5", "--temperature", "0.7"),
        *("--output_dir", str(tmp_path)),
    ]
    before, _ = parse(flags, DEFAULT)
    plan(*flags)
    after, _ = parse(["--config", str(tmp_path / "config.yaml")], DEFAULT)
    assert after == before
    assert after[3].bridge_veto_low == "none"
    assert after[3].correction().veto is None


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("reward_funcs: exact_match", "reward_funcs", ["exact_match"]),
        ("sampler_ignore: lm_head", "sampler_ignore", ["lm_head"]),
        ("learning_rate: 1e-3", "learning_rate", 1e-3),  # YAML 1.1 reads this as text
        ("learning_rate: 1", "learning_rate", 1.0),
        ("run_name: 17", "run_name", "17"),
        ("bridge_veto_low: null", "bridge_veto_low", "none"),
        ("bridge_veto_low: none", "bridge_veto_low", "none"),
        ("bridge_veto_low: 1e-3", "bridge_veto_low", 1e-3),
        ("bridge_upper: .inf", "bridge_upper", float("inf")),
    ],
)
def test_a_value_in_a_file_means_what_it_means_as_a_flag(tmp_path, text, field, value):
    configs, _ = parse(["--config", variant(tmp_path, text)], DEFAULT)
    got = next(getattr(config, field) for config in configs if hasattr(config, field))
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampler_schem: fp8", "unknown setting sampler_schem; did you mean sampler_scheme?"),
        ("bridge_uper: 3.0", "unknown setting bridge_uper; did you mean bridge_upper?"),
        ("zzz: 1", "unknown setting zzz; the settings are the fields of RunConfig, "),
        ("sampler_scheme: fp9", "unknown scheme 'fp9'; did you mean fp8"),
        ("num_generations: 7", "must be divisible by num_generations (7)"),
        ("num_samplers: 2.5", "argument --num_samplers"),
        ("num_samplers: two", "argument --num_samplers"),
        ("temperature: hot", "argument --temperature"),
        ("use_cpu: perhaps", "argument --use_cpu"),
        ("temperature: 0", "use a value above 0"),
        ("top_p: 0.9", "set it to 1.0"),
        ("bridge_mode: tis", "'tis'"),
        ("bridge_lower: low", "bridge_lower 'low' is neither a number nor none"),
        ("bridge_reject: [k3]", "write statistic:aggregation:lower:upper"),
        ("bridge_preset: trl/token_trunc", "did you mean trl/token_truncate"),
        ("bridge_custom: no.such.weights", "correction 'no.such.weights' cannot be imported"),
        ("bridge_custom: half", "give the dotted path of a function, such as my_module.my_weights"),
        ("bridge_custom: os.path.joyn", "cannot be imported"),
        ("bridge_custom: os.path.curdir", "is not a function of one argument"),
        ("bridge_custom: os.replace", "is not a function of one argument"),
        ("reward_funcs: [exact_mach]", "reward 'exact_mach' not found; use ['exact_match'] or a dotted path"),
        ("reward_funcs: [no.such.module]", "reward 'no.such.module' not found"),
        ("reward_funcs: [os.path.joyn]", "reward 'os.path.joyn' not found"),
        ("model_name_or_path: configs/models/sort_digit", "model 'configs/models/sort_digit' does not exist"),
        ("model_name_or_path: /no/such/model", "model '/no/such/model' does not exist"),
        ("resume_from_checkpoint: true", "no complete checkpoint in"),
        ("resume_from_checkpoint: /no/such/checkpoint", "cannot resume from /no/such/checkpoint"),
        ("seed: [", "while parsing"),
    ],
    ids=lambda value: value if ":" in value else "",
)
def test_a_slip_in_a_file_is_one_line_and_leaves_nothing_behind(tmp_path, text, message):
    assert message in refusal("--config", variant(tmp_path, text), "--output_dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sampler_schem", "fp8"], "unknown setting sampler_schem; did you mean sampler_scheme?"),
        (["--bridge_uper=3.0"], "unknown setting bridge_uper; did you mean bridge_upper?"),
        (["stray"], "unknown setting stray"),
        (["--num_samplers"], "argument --num_samplers"),
        (["--num_samplers", "two"], "argument --num_samplers"),
        (["--config"], "--config needs a file"),
        (["--config", "no/such/file.yaml"], "configuration 'no/such/file.yaml' cannot be read (No such file"),
        (["--config", str(ROOT)], "cannot be read (Is a directory)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_on_the_command_line_is_one_line(argv, message):
    assert message in refusal(*argv)


@pytest.mark.parametrize("content", [b"", b"just text", b"- a\n- list\n", b"\xff\xfe\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, content):
    (tmp_path / "bad.yaml").write_bytes(content)
    refusal("--config", str(tmp_path / "bad.yaml"))


# ---- the bridge


def planned(*argv: str) -> Correction:
    return plan(*argv)[0].correction


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ((), {}),
        (("--bridge_upper", "2.0", "--bridge_veto_low", "1e-4"), {"upper": 2.0, "veto": (1e-4, None)}),
        (("--bridge_upper", "2", "--bridge_level", "token"), {"upper": 2.0}),
        (("--bridge_mode", "mask", "--bridge_lower", "0.5"), {"mode": "mask", "lower": 0.5}),
        (("--bridge_veto_high", "50", "--bridge_denominator", "kept"), {"veto": (None, 50.0), "denominator": "kept"}),
    ],
    ids=str,
)
def test_an_explicit_setting_wins_over_a_preset_and_the_record_is_what_runs(tmp_path, flags, changes):
    expected = Correction.preset("trl/token_truncate", **changes)
    assert planned("--bridge_preset", "trl/token_truncate", *flags, "--output_dir", str(tmp_path)) == expected
    recorded = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (recorded["bridge_preset"], recorded["bridge_upper"]) == ("trl/token_truncate", expected.upper)
    assert planned("--config", str(tmp_path / "config.yaml")) == expected


@pytest.mark.parametrize("text", ["bridge_upper: 2.0", "bridge_veto_low: 1.0e-4"])
def test_a_setting_in_a_file_wins_over_a_preset_on_the_command_line(tmp_path, text):
    name, value = text.split(": ")
    correction = planned(
        *("--config", variant(tmp_path, text)),
        *("--bridge_preset", "trl/token_truncate", "--output_dir", str(tmp_path / "run")),
    )
    changes = {"upper": 2.0} if name == "bridge_upper" else {"veto": (float(value), None)}
    assert correction == Correction.preset("trl/token_truncate", **changes)


@pytest.mark.parametrize(
    ("preset", "text", "changes"),
    [
        ("rlq/default", "bridge_veto_low: none", {"veto": None}),
        ("skyrl/token_tis_outlier", "bridge_veto_low: null", {"veto": (None, 100.0)}),
        ("openrlhf/tis", "bridge_lower: none", {"lower": None}),
        ("verl/decoupled_k3_rs_seq_tis", "bridge_reject: none", {"reject": None}),
        ("verl/decoupled_k3_rs_seq_tis", "bridge_reject: null", {"reject": None}),
    ],
)
def test_none_switches_off_what_a_preset_says(tmp_path, preset, text, changes):
    file = variant(tmp_path, f"bridge_preset: {preset}\n{text}")
    expected = Correction.preset(preset, **changes)
    assert planned("--config", file, "--output_dir", str(tmp_path)) == expected
    assert planned("--config", str(tmp_path / "config.yaml")) == expected


OLD_RECORD = """
bridge_custom: null
bridge_denominator: fixed
bridge_ess_target: null
bridge_level: token
bridge_lower: null
bridge_mode: truncate
bridge_normalize: none
bridge_reject: null
bridge_upper: 2.0
bridge_veto_high: null
bridge_veto_low: 0.0001
"""


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ("bridge_preset: null", Correction()),
        ("bridge_preset: trl/token_truncate", Correction.preset("trl/token_truncate")),
        ("bridge_preset: trl/token_truncate\nbridge_upper: 4.0", Correction.preset("trl/token_truncate", upper=4.0)),
        (
            "bridge_preset: skyrl/token_tis_outlier\nbridge_veto_low: 0.001",
            Correction.preset("skyrl/token_tis_outlier", veto=(1e-3, None)),
        ),
        (
            "bridge_preset: trl/token_truncate\nbridge_veto_high: 50.0",
            Correction.preset("trl/token_truncate", veto=(1e-4, 50.0)),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_older_record_opens_and_means_what_ran(tmp_path, edit, expected):
    old = variant(tmp_path, OLD_RECORD + edit)
    assert planned("--config", old, "--output_dir", str(tmp_path / "run")) == expected
    assert planned("--config", str(tmp_path / "run" / "config.yaml")) == expected


def test_weights_of_ones_own_are_found_by_their_dotted_path(tmp_path, monkeypatch):
    (tmp_path / "my_corrections.py").write_text("def half(ratio):\n    return 0.5 * ratio.rho_BT\n")
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--bridge_custom", "my_corrections.half", "--output_dir", str(tmp_path / "run"))
    correction = pickle.loads(pickle.dumps(planned(*flags)))
    sys.modules.pop("my_corrections")  # as on a rank, where nothing imported it yet
    logprobs = torch.full((2, 3), -1.0)
    out = correct(logprobs, logprobs, torch.ones(2, 3, dtype=torch.bool), correction)
    assert out.weights.tolist() == [[0.5] * 3] * 2
    assert planned("--config", str(tmp_path / "run" / "config.yaml")) == correction


# ---- run directory


@pytest.mark.parametrize("below", ["run", "deep/er/run"])
def test_an_unwritable_run_directory_is_refused(tmp_path, below):
    # A path below a regular file: not even root can write there.
    (tmp_path / "file").write_text("")
    message = refusal("--output_dir", str(tmp_path / "file" / below))
    assert re.search(r"run directory .* is not writable \(.+\); choose another --output_dir", message)


def test_a_directory_that_holds_a_run_is_refused_unless_it_is_resumed(tmp_path):
    plan("--output_dir", str(tmp_path))
    plan("--output_dir", str(tmp_path))  # a run that never logged left nothing to lose
    records.append(tmp_path / records.FILE, {"step": 1, "loss": 0.0})
    before = (tmp_path / "config.yaml").read_text()
    message = refusal("--output_dir", str(tmp_path), "--seed", "1")
    assert "already holds a run; choose another --output_dir or --resume_from_checkpoint true" in message
    assert (tmp_path / "config.yaml").read_text() == before
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    mark_complete(checkpoint, version=4)
    learner, _ = plan("--output_dir", str(tmp_path), "--resume_from_checkpoint", "true")
    assert learner.resume == checkpoint


def test_the_run_directory_is_absolute_and_never_inside_a_job_copy(tmp_path, monkeypatch):
    (_, grpo, *_), _ = parse(["--run_name", "mine"], DEFAULT)
    default = resolve_run_dir(grpo, tmp_path)
    assert re.fullmatch(r"mine-\d{8}-\d{6}", default.name)
    assert default.parent == tmp_path / "runs"
    grpo.output_dir = "out/here"
    assert resolve_run_dir(grpo, tmp_path) == tmp_path / "out" / "here"
    monkeypatch.setenv("HOME", "/home/somebody")
    job = Path("/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg_0")
    assert resolve_run_dir(grpo, job) == Path("/home/somebody/rlq/out/here")
    grpo.output_dir = "~/there"
    assert resolve_run_dir(grpo, job) == Path("/home/somebody/there")


def test_a_run_from_before_the_files_were_split_resumes_with_the_settings_it_had(tmp_path):
    """tests/support/old_run holds the record and the first metrics of such a run."""
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests/support/old_run", run)
    checkpoint = run / "checkpoints" / "checkpoint-20"
    checkpoint.mkdir(parents=True)
    mark_complete(checkpoint, version=20)
    flags = ["--config", str(run / "config.yaml"), "--output_dir", str(run), "--resume_from_checkpoint", "true"]
    learner, sampler = plan(*flags)
    assert learner.resume == checkpoint
    assert learner.correction == Correction()
    assert (sampler.sampler_scheme, learner.grpo.max_steps, learner.grpo.learning_rate) == ("fp8", 60, 5e-4)
    assert [record["step"] for record in records.load(run / records.FILE)] == [1, 2]


# ---- models and rewards


def test_a_model_is_a_directory_of_the_checkout_an_absolute_one_or_a_hub_name(tmp_path):
    assert resolve_model("configs/models/sort_digits", ROOT) == str(ROOT / "configs/models/sort_digits")
    assert resolve_model(str(tmp_path), ROOT) == str(tmp_path)
    assert resolve_model("owner/model", ROOT) == "owner/model"


def test_rewards_by_name_and_by_dotted_path():
    from trainers.tasks import exact_match

    assert load_rewards(["exact_match", "os.path.join"]) == [exact_match, os.path.join]


# ---- exit code


def test_the_script_prints_one_line_and_exits_with_1(capsys):
    assert main("configs/grpo_fp8.yaml", ["--sampler_scheme", "fp9"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rlq: error: unknown scheme 'fp9'")
    assert captured.err.count("\n") == 1
