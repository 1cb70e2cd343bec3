"""The `rlq` command: one table of subcommands, one module each.

A subcommand's module has two functions: `add_arguments(parser)` and `run(args) -> Outcome`. Only the module of the
subcommand that was asked for is imported, so that `rlq --help` answers at once.

Exit codes: 0 ok, 1 a check failed or the work could not be done, 2 bad usage.
"""

import argparse
import importlib
import importlib.metadata
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ConfigError, RlqError
from .outcome import Outcome


@dataclass(frozen=True)
class Command:
    """One subcommand."""

    name: str
    """What the user types after `rlq`."""
    module: str
    """Module with `add_arguments` and `run`."""
    help: str
    """One line for `rlq --help`."""


COMMANDS = (
    Command("doctor", "rlq.cli.doctor", "check this machine and what is installed on it"),
    Command("quantize", "rlq.cli.quantize", "write a quantized checkpoint and print the error of every weight"),
    Command("formats", "rlq.cli.formats", "list number formats and schemes, with the numbers of their specifications"),
    Command("replay", "rlq.cli.replay", "recompute corrections on dumped rollouts and compare them"),
)


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rlq ARGV` and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = _parser(chosen=next((word for word in argv if not word.startswith("-")), None)).parse_args(argv)
    try:
        if args.json is not None and not args.json.absolute().parent.is_dir():
            raise ConfigError(f"--json {args.json}: the folder does not exist; create it or name another file")
        outcome: Outcome = args.run(args)
        if args.json is not None:
            args.json.write_text(json.dumps(_finite(outcome.report), indent=2) + "\n")
    except RlqError as error:
        print(f"rlq: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return 0 if outcome.ok else 1


def _parser(*, chosen: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="rlq", description="GRPO from the rollouts of a quantized copy of the policy.")
    parser.add_argument("--version", action="version", version=f"rlq {importlib.metadata.version('rlq')}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if command.name == chosen:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to FILE")
            subparser.set_defaults(run=module.run)
    return parser


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


if __name__ == "__main__":
    sys.exit(main())
