"""The metric catalogue: everything that names a metric names a row, and a real step logs rows only."""

import json
import subprocess
import sys

import pytest

from launch import follow
from rlq.bridge import DEFAULT_RULES, METRIC_NAMES
from rlq.metrics import METRICS, PAGE, PANELS, SECTIONS, find, render
from tests.support import grpo_steps
from trainers.tracking import callback, curves, progress, wandb_run

KEYS = {m.key for m in METRICS.values()}


def test_the_page_is_what_the_catalogue_renders():
    page = PAGE.read_text()
    assert render(page) == page, "run `python -m rlq.metrics`"


def test_rows_name_sections_panels_and_places_that_exist():
    assert {m.section for m in METRICS.values()} == set(SECTIONS)
    assert {m.panel for m in METRICS.values()} - {""} == set(PANELS)
    assert sorted(m.row[0] for m in METRICS.values() if m.row) == list(range(1, len(callback.SUMMARY_ROWS) + 1))
    assert all(m.direction for m in METRICS.values() if m.limits)


def test_everything_shown_is_a_row():
    assert {name for name, _ in wandb_run.SUMMARIES} <= {f"train/{key}" for key in KEYS}
    assert {name for _, _, shown, _ in curves.PANELS for name in shown} <= KEYS
    assert {name for _, name in callback.SUMMARY_ROWS} <= KEYS
    assert [name for name, _, _ in follow.SHOWN] == [*progress.SHOWN, "eta_s"]
    assert progress.SHOWN.keys() <= KEYS
    assert {*METRIC_NAMES, *(rule.metric for rule in DEFAULT_RULES)} <= METRICS.keys()


def test_the_guards_rules_keep_their_order():
    """A saved guard state holds one entry per rule, by position."""
    assert [(r.metric, r.when, r.limit, r.patience, r.recover_at) for r in DEFAULT_RULES] == [
        ("sampler_kl_k3", "above", 0.01, 5, 0.005),
        ("sampler_kl_k3", "above", 0.1, 2, 0.01),
        ("ess_token", "below", 0.8, 5, 0.9),
        ("ess_token", "below", 0.3, 2, 0.8),
        ("clip_frac_high", "above", 0.02, 5, 0.01),
        ("kept_token_frac", "below", 0.5, 5, 0.8),
        ("nonfinite_tokens", "above", 0.0, 3, 0.0),
        ("sync/version_lag", "above", 4.0, 2, 1.0),
    ]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gap/quant", "gap/*"),
        ("gap/quant_logratio", "gap/*_logratio"),
        ("shadow/trl/token_truncate/cosine", "shadow/*/cosine"),
        ("audit/dropped_seqs", "audit/*_seqs"),
        ("no/such", None),
    ],
)
def test_names_with_varying_parts_find_their_row(name: str, row: str | None):
    found = find(name)
    assert (found.name if found else None) == row


def test_a_real_step_logs_rows_only(tmp_path):
    trainer, _ = grpo_steps.build(grpo_steps.reference_samplers(), tmp_path, "fp8", logging_steps=1)
    trainer.train()
    logged = {name for entry in trainer.state.log_history for name in entry if name.startswith("rlq/")}
    assert {f"rlq/{name}" for name in METRIC_NAMES} <= logged
    assert {name for name in logged if find(name.removeprefix("rlq/")) is None} == set()


def test_the_catalogue_imports_the_standard_library_alone():
    code = (
        "import importlib.util, json, sys; before = set(sys.modules);"
        "spec = importlib.util.spec_from_file_location('catalogue', sys.argv[1]);"
        "module = importlib.util.module_from_spec(spec); sys.modules['catalogue'] = module;"
        "spec.loader.exec_module(module);"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    source = PAGE.parents[1] / "rlq" / "metrics.py"
    out = subprocess.run([sys.executable, "-I", "-c", code, str(source)], capture_output=True, text=True, check=True)
    assert set(json.loads(out.stdout)) - {"catalogue"} <= set(sys.stdlib_module_names)
