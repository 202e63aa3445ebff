"""`ccq train RECIPE --run-dir DIR`: train or resume. Many GPUs: torchrun --nproc-per-node 8 -m ccq train RECIPE ..."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ccq.names import nearest
from ccq.systems import SIZES, SYSTEMS

if TYPE_CHECKING:
    from ccq.train.config import Config

RESUME = """

The same command resumes a run: exactly on a CPU with as many ranks as before; with another number of ranks,
the data come in the same order and the weights differ by rounding."""


def main(argv: Sequence[str]) -> int:
    parser = recipe_parser("train", (__doc__ or "").splitlines()[0], RESUME)
    parser.add_argument("--run-dir", type=Path, help="folder of the run (default: runs/RECIPE)")
    options, config = parse(parser, argv)
    from ccq.train.loop import train

    return train(config, run_dir(options))


def run_dir(options: argparse.Namespace) -> Path:
    return options.run_dir or Path("runs") / options.recipe


def recipe_parser(command: str, description: str, more: str = "") -> argparse.ArgumentParser:
    """A parser for `ccq COMMAND RECIPE`; what it does not know are fields of the config. `more` ends the help."""

    def table(lines: dict[str, str]) -> str:
        return "".join(f"\n  {name:<29} {line}" for name, line in lines.items())

    systems = table({name.replace("-", "_"): system.help for name, system in SYSTEMS.items()})
    sizes = table({name: size["help"] for name, size in SIZES.items()})
    parser = argparse.ArgumentParser(
        prog=f"ccq {command}",
        description=description,
        epilog=f"A recipe is SYSTEM_SIZE, such as ccq_gla_tiny.\n\nsystems:{systems}\n\nsizes:{sizes}\n\n"
        "Any field of a recipe can be set: --steps 20 --seed 0 --optimizer.lr 3e-4 --model.num-hidden-layers 4 ...\n"
        f"`ccq {command} RECIPE --help` lists them.{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run_dir=None)
    parser.add_argument("recipe", metavar="RECIPE", help="one of the recipes below")
    told = "start from the weights and options of a model: a folder, a run, or a name"
    parser.add_argument("--init", metavar="MODEL", help=told)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """The options, and the recipe's config with the fields that the rest of the arguments set."""
    listed = any(x in ("-h", "--help") for x in argv[1:]) and not argv[0].startswith("-")
    options, fields = parser.parse_known_args([argv[0]] if listed else argv)
    import tyro  # late: `--help` needs none of this

    from ccq.pretrained import has_gates
    from ccq.recipes import RECIPES
    from ccq.train.config import Config, check_read

    name = options.recipe.replace("-", "_")
    if name not in RECIPES:
        near = nearest(name, tuple(RECIPES))
        parser.error(f"there is no recipe {options.recipe!r}.{near} A recipe is SYSTEM_SIZE, such as ccq_gla_tiny.")
    if listed:
        fields = ["--help"]
    for field in fields:
        if field.startswith("--system."):
            parser.error(f"{field}: this option is now --runtime.{field.removeprefix('--system.')}")
    default = RECIPES[name]()
    if options.init:
        from ccq.train.init import begun_from

        default = begun_from(options.init, default, run_dir(options))
    config = tyro.cli(Config, default=default, args=fields, prog=f"{parser.prog} {options.recipe}")
    if not Path(run_dir(options), "config.json").exists():
        check_read(config.data)
    if config.foreign and config.model != default.model:
        told = "a model of transformers has options of its own. To add cleaning: ccq.attach and ccq.save_adapter"
        parser.error(f"--model: {told}, then --init that folder (docs/attach.md)")
    cure = "ccq.attach" if config.foreign else "--model.clean"
    asked = options.init and RECIPES[name]().model.clean
    if asked and not (has_gates(options.init) if config.foreign else config.model.clean):
        told = f"{options.recipe} has cleaning and the model to begin with has none: it trains without"
        print(f"{parser.prog}: warning: {told}. {cure} adds it", file=sys.stderr)
    return options, config
