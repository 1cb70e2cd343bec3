"""From a YAML file and flags to a checked plan; everything here runs before anything expensive."""

import difflib
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from rlq.bridge.correction.options import BridgeConfig, read_nulls
from rlq.errors import ConfigError
from rlq.files import write_renamed
from samplers.options import SamplerConfig
from trainers.checkpoints import resolve_resume
from trainers.compat import TrlParser
from trainers.learner import LearnerPlan, load_rewards
from trainers.observe.config import ObserveConfig
from trainers.options import QuantGRPOConfig, RunConfig
from trainers.tracking import records

CONFIGS: Any = (RunConfig, QuantGRPOConfig, SamplerConfig, BridgeConfig, ObserveConfig)
# Where Ray unpacks the working directory of a job; nothing written there outlives it.
RAY_COPY = "runtime_resources/working_dir_files"


SETTINGS = "the settings are the fields of " + ", ".join(c.__name__ for c in CONFIGS)


class _Parser(TrlParser):
    """TrlParser that reads a file as it reads flags, and whose faults are one line rather than a page of usage."""

    def error(self, message: str):
        raise ConfigError(f"{message}; {SETTINGS}")

    def set_defaults_with_config(self, **kwargs) -> list[str]:
        """Numbers go in as text, because argparse checks the type of no other default; one name makes a list of one."""
        kwargs = read_nulls(kwargs)
        lists = {action.dest for action in self._actions if action.nargs in ("+", "*")}
        for key, value in kwargs.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                kwargs[key] = str(value)
            elif isinstance(value, str) and key in lists:
                kwargs[key] = [value]
        return super().set_defaults_with_config(**kwargs)


def parse(argv: list[str], default_config: Path) -> tuple[tuple, dict[str, Any]]:
    """Parse `--config FILE` (or the default) plus flags; unknown keys and flags raise ConfigError.

    Returns:
        One object per class of CONFIGS, and the flat settings that parse to the same objects again.
    """
    argv, path = _split_config(argv, default_config)
    parser = _Parser(CONFIGS, allow_abbrev=False)
    try:
        unknown = parser.set_defaults_with_config(**read_config(path))
        if not unknown:
            *parsed, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    except (ValueError, TypeError) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    if unknown:
        raise ConfigError(_describe(unknown, [action.dest for action in parser._actions]))
    given = _given(vars(parser.parse_args(argv)))
    # What is recorded is what runs: the bridge's fields with the preset and the defaults filled in.
    record = {name: value for c in parsed if isinstance(c, BridgeConfig) for name, value in c.record().items()}
    return tuple(c.resolved() if isinstance(c, BridgeConfig) else c for c in parsed), given | record


def _split_config(argv: list[str], default_config: Path) -> tuple[list[str], Path]:
    """Flags without `--config FILE` or `--config=FILE`, and the file."""
    argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if "--config" not in argv:
        return argv, default_config
    at = argv.index("--config")
    if at + 1 == len(argv):
        raise ConfigError("--config needs a file; name one of configs/*.yaml")
    return argv[:at] + argv[at + 2 :], Path(argv[at + 1])


def read_config(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The settings of a YAML file, on top of those of the file that it `extends`.

    `extends: base.yaml` is relative to the file that says it; the other file may extend a third. A setting of the file
    itself wins. Example: base.yaml says `seed: 0`, run.yaml says `extends: base.yaml` and `seed: 7`: the seed is 7.

    Args:
        path: the file.
        above: the files that led to it, to notice a circle.

    Raises:
        ConfigError: a file that cannot be read, is no mapping, or extends itself in the end.
    """
    place = path.resolve()
    if place in above:
        raise ConfigError(f"{' extends '.join(p.name for p in (*above, place))}: a circle; remove one `extends`")
    said_by = f", which {above[-1].name} extends," if above else ""
    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(
            f"configuration {str(path)!r}{said_by} cannot be read ({reason}); name one of configs/*.yaml"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration {str(path)!r}: " + " ".join(str(error).split())) from None
    if not isinstance(settings, dict):
        raise ConfigError(f"configuration {str(path)!r} must hold `setting: value` lines; name one of configs/*.yaml")
    base = settings.pop("extends", None)
    for name, value in settings.pop("env", {}).items():  # as TRL's own parser has it
        os.environ[name] = str(value)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise ConfigError(f"configuration {str(path)!r}: extends is {base!r}; name one file, such as base.yaml")
    return read_config(path.parent / base, (*above, place)) | settings


def _describe(unknown: list[str], known: list[str]) -> str:
    names = [part[2:].partition("=")[0] for part in unknown if part.startswith("--")] or unknown
    close = [match for name in names for match in difflib.get_close_matches(name, known, n=1)]
    hint = f"did you mean {', '.join(close)}?" if close else SETTINGS
    return f"unknown setting {', '.join(names)}; {hint}"


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """All of rlq's settings but the bridge's, and those of TRL that are not at their defaults."""
    defaults = TrlParser(QuantGRPOConfig)  # type: ignore[arg-type]  # transformers' stub asks for an instance
    grpo = {f.name for f in fields(QuantGRPOConfig)}
    own = {f.name for c in CONFIGS if c not in (QuantGRPOConfig, BridgeConfig) for f in fields(c)}
    return {k: v for k, v in values.items() if k in own or (k in grpo and v != defaults.get_default(k))}


def build_plan(
    configs: tuple[RunConfig, QuantGRPOConfig, SamplerConfig, BridgeConfig, ObserveConfig],
    given: dict[str, Any],
    root: Path,
) -> tuple[LearnerPlan, SamplerConfig]:
    """Check what can be checked without a model, create the run directory and write its `config.yaml`."""
    run, grpo, sampler, bridge, observe = configs
    scheme, correction = sampler.scheme(), bridge.correction()
    load_rewards(run.reward_funcs)
    model_path = resolve_model(run.model_name_or_path, root)
    run_dir = resolve_run_dir(grpo, root)
    checkpoints = run_dir / "checkpoints"
    resume = resolve_resume(grpo.resume_from_checkpoint, checkpoints)
    if resume is None and (run_dir / records.FILE).exists():
        raise ConfigError(
            f"{run_dir} already holds a run; choose another --output_dir or --resume_from_checkpoint true"
        )
    resolved = given | {"output_dir": str(run_dir)}
    write_config(run_dir, resolved)
    grpo.output_dir = str(checkpoints)
    return LearnerPlan(run, grpo, observe, scheme, correction, run_dir, model_path, resume, resolved), sampler


def resolve_run_dir(grpo: QuantGRPOConfig, root: Path) -> Path:
    """Absolute run directory: `--output_dir`, or runs/<run_name>-<time> below the checkout.

    A job's working directory is a copy that Ray deletes, so there the runs go to ~/rlq/runs.
    """
    if grpo.output_dir not in (None, "trainer_output"):  # transformers' default when nothing was given
        directory = Path(str(grpo.output_dir)).expanduser()
        if not directory.is_absolute():
            directory = _outside_ray(root) / directory
        return directory
    name = grpo.run_name or "grpo"
    return _outside_ray(root) / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _outside_ray(root: Path) -> Path:
    return Path.home() / "rlq" if RAY_COPY in str(root) else root


def resolve_model(name: str, root: Path) -> str:
    """A path relative to the repository becomes absolute; anything else is left to transformers."""
    local = root / name
    if local.is_dir():
        return str(local)
    if Path(name).is_absolute() or name.startswith((".", "configs/")):
        raise ConfigError(f"model {name!r} does not exist; name a checkpoint directory or a hub model")
    return name


def write_config(run_dir: Path, resolved: dict) -> None:
    """Create the run directory and write the resolved configuration; ConfigError if it is not writable."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_renamed(run_dir / "config.yaml", yaml.safe_dump(resolved, sort_keys=True).encode())
    except OSError as error:
        raise ConfigError(
            f"run directory {run_dir} is not writable ({error.strerror}); choose another --output_dir"
        ) from None
