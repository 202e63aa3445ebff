"""The `ccq` command. A command is one line of COMMANDS; its module is imported only when it is chosen."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import ccq
from ccq.errors import UserError
from ccq.names import nearest

# name: ("module:function", help). The function takes the arguments that follow the name and returns the exit code.
COMMANDS = {
    "analyze": ("ccq.analysis:main", "where keys lie, what the gate does, what cleaning changes in a trained model"),
    "bench": ("ccq.bench:main", "what the operator costs on a GPU, beside its backbone and beside the floor"),
    "compare": ("ccq.evaluate.compare:main", "results of `ccq eval` side by side, with paired differences"),
    "convert": ("ccq.model.convert:main", "a checkpoint of flash-linear-attention into ours, cleaned or not, and back"),
    "data": ("ccq.data.command:main", "a tokenizer from text, and text into token shards that training reads"),
    "demo": ("ccq.demo:main", "train recall, try the models that ship, write one page: minutes on two cores"),
    "doctor": ("ccq.doctor:main", "what runs on this machine, why nothing faster does, and what to change"),
    "eval": ("ccq.evaluate:main", "a model on the paper's four axes and on MQAR, offline or from the Hub"),
    "export": ("ccq.train.export:main", "the weights of a run as a folder that `from_pretrained` loads"),
    "generate": ("ccq.model.generate:main", "text from a checkpoint, ours or any of Hugging Face's"),
    "info": ("ccq.model.info:main", "parameters, state, FLOPs and memory to train of a preset"),
    "plan": ("ccq.train.plan:main", "memory, speed, days and GPU-hours of a recipe, before it is trained"),
    "report": ("ccq.report:main", "one page: the paper's tables and figures with our numbers beside the paper's"),
    "serve": ("ccq.serve:main", "a model behind an OpenAI-compatible server on this machine"),
    "sweep": ("ccq.train.sweep:main", "every row of the recall comparison at every rate, on one GPU in minutes"),
    "train": ("ccq.train.command:main", "train a recipe, or go on; on a laptop, one GPU or many"),
}

# extras of this package, and the modules that they install
EXTRAS = {
    "gpu": ("fla", "triton"),
    "model": ("huggingface_hub", "safetensors", "transformers"),
    "train": ("datasets", "tensorboard", "tokenizers", "tyro", "wonderwords", "zstandard"),
    "serve": ("fastapi", "openai", "uvicorn"),
    "eval": ("lm_eval", "matplotlib", "nltk", "rouge"),
}

IMPORT = """

Every command takes --import MODULE, such as a file with a mixer of yours: it is imported first."""


def choose(
    prog: str, about: str | None, what: str, known: Mapping[str, str], arguments: Sequence[str], more: str = ""
) -> str:
    """Which of `known` (name: help) the first argument names; the rest belongs to it. `more` ends the help."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=(about or "").splitlines()[0],
        epilog=f"{what}s:\n" + "\n".join(f"  {name:<10} {text}" for name, text in known.items()) + more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ccq {ccq.__version__}")
    hint = f"one of those below; `{prog} {what.upper()} --help` says more"
    parser.add_argument("name", help=hint, metavar=what.upper())
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    name = parser.parse_args(arguments[:1]).name
    if name not in known:
        parser.error(f"unknown {what} {name!r}.{nearest(name, tuple(known))} The {what}s are: {', '.join(known)}.")
    return name


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
    known = {name: text for name, (_, text) in COMMANDS.items()}
    name = choose("ccq", ccq.__doc__, "command", known, arguments, IMPORT)
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        rest = imported(arguments[1:])
        return getattr(importlib.import_module(module), function)(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (UserError, OSError) as error:  # OSError: a folder that cannot be written, a file that is not there
        rank = os.environ.get("RANK", "0")  # of torchrun
        print(f"ccq {name}{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as missing:
        module = (missing.name or "").partition(".")[0]
        extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
        if extra is None:
            raise
        print(f"ccq {name} needs {missing.name}: pip install 'ccq[{extra}]'", file=sys.stderr)
        return 1
