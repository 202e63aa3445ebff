"""The `ccq` command. A command is one line of commands.toml; its module is imported only when it is chosen."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ccq
from ccq.errors import UserError
from ccq.files import read_toml
from ccq.names import nearest

TABLES = read_toml(Path(__file__).with_name("commands.toml"))
COMMANDS = TABLES["ccq"]

IMPORT = """

Every command takes --import MODULE: a Python module to import first, such as a file with your own mixer."""


def choose(
    prog: str, about: str | None, what: str, known: Mapping[str, list[str]], arguments: Sequence[str], more: str = ""
) -> str:
    """Which of `known` (name: place, help) the first argument names; the rest belongs to it. `more` ends the help."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=(about or "").splitlines()[0],
        epilog=f"{what}s:\n" + "\n".join(f"  {name:<10} {text}" for name, (_, text) in known.items()) + more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ccq {ccq.__version__}")
    hint = f"one of the {what}s below; see `{prog} {what.upper()} --help`"
    parser.add_argument("name", help=hint, metavar=what.upper())
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    name = parser.parse_args(arguments[:1]).name
    if name not in known:
        parser.error(f"unknown {what} {name!r}.{nearest(name, tuple(known))} The {what}s are: {', '.join(known)}.")
    return name


def function_at(place: str) -> Callable[[Sequence[str]], int]:
    """That of "module:function"."""
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


def imported(arguments: Sequence[str]) -> list[str]:
    """Import every module that `--import` names, such as one that registers a mixer; return the other arguments."""
    parser = argparse.ArgumentParser(
        prog="ccq", usage="ccq COMMAND ... --import MODULE", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[])
    found, rest = parser.parse_known_args(arguments)
    if found.modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the `ccq` script does not look in the folder that it is called from
    for module in found.modules:
        try:
            importlib.import_module(module.removesuffix(".py"))
        except ModuleNotFoundError as missing:
            if missing.name != module.removesuffix(".py").partition(".")[0]:
                raise  # it is there, and imports something that is not
            raise UserError(f"--import: no module {module!r} in this folder or installed") from None
    return rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (without the program's name) asks for, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # of a command; a program of one's own says what it wants
    name = choose("ccq", ccq.__doc__, "command", COMMANDS, arguments, IMPORT)
    try:
        rest = imported(arguments[1:])
        return function_at(COMMANDS[name][0])(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (UserError, OSError) as error:  # OSError: a folder that cannot be written, a file that is not there
        rank = os.environ.get("RANK", "0")  # of torchrun
        print(f"ccq {name}{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as missing:
        module = (missing.name or "").partition(".")[0]
        extra = next((extra for extra, modules in TABLES["extras"].items() if module in modules), None)
        if extra is None:
            raise
        print(f"ccq {name} needs {missing.name}: pip install 'ccq[{extra}]'", file=sys.stderr)
        return 1


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """--device and --dtype of a command that runs a model; `ccq.doctor.runnable` checks them."""
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    told = "auto (default): float32 on a CPU, the dtype of the checkpoint on a GPU"
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help=told)
