"""`ccq data`: tokenizer, prepare, check."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ccq.data import DataError
from ccq.names import plural


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq data", description="From text to token shards that training reads.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    tokenizer = commands.add_parser("tokenizer", help="train a byte-level BPE tokenizer")
    add_inputs(tokenizer)
    tokenizer.add_argument("--out", type=Path, required=True, help="folder for the tokenizer")
    tokenizer.add_argument("--vocab-size", type=int, default=32_000, help="number of tokens (default: %(default)s)")
    tokenizer.add_argument("--force", action="store_true", help="replace the tokenizer in OUT; its files are removed")
    tokenizer.add_argument("--sample", type=size, help="learn from at most this many bytes (500M, 2G)")

    prepare = commands.add_parser("prepare", help="turn text into token shards; the same command resumes")
    add_inputs(prepare)
    prepare.add_argument("--tokenizer", required=True, help="a folder, a shipped model, or a name on the Hub")
    prepare.add_argument("--out", type=Path, required=True, help="folder for the shards")
    prepare.add_argument("--workers", type=int, help="number of threads (default: one per core)")
    prepare.add_argument("--shard-tokens", type=size, default=2**26, help="tokens per shard (default: %(default)s)")
    prepare.add_argument("--skip", type=int, default=0, metavar="N", help="skip the first N documents")
    prepare.add_argument("--max-tokens", type=size, help="stop after the document that reaches this (10M, 15G)")
    prepare.add_argument("--needles", type=float, metavar="SHARE", help="share of needle documents, such as 0.05")
    prepare.add_argument("--needle-forms", nargs="+", metavar="FORM", help="ruler, note, register (default: all)")
    prepare.add_argument("--needle-seed", type=int, default=0)
    prepare.add_argument(
        "--needle-length", nargs=2, type=size, metavar=("FROM", "TO"), help="characters of a haystack (default: 1K 10K)"
    )
    texts = "texts that no haystack may share 13 words with"
    prepare.add_argument("--needle-exclude", nargs="+", type=Path, default=[], metavar="FILE", help=texts)

    check = commands.add_parser("check", help="read all shards of a folder and compare them with its index")
    check.add_argument("folder", type=Path)

    options = parser.parse_args(arguments)
    return {"tokenizer": run_tokenizer, "prepare": run_prepare, "check": run_check}[options.command](options)


def add_inputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to read").add_argument
    add("paths", nargs="*", type=Path, metavar="PATH", help="files (text, JSONL, also .gz, .zst; Parquet) or folders")
    add("--dataset", help="a dataset on the Hub, streamed, such as HuggingFaceFW/fineweb-edu")
    add("--subset", help="its configuration, such as sample-10BT")
    add("--split", default="train", help="default: %(default)s")
    add("--revision", help="a commit of the dataset")
    add("--field", default="text", help="the field that holds the text (default: %(default)s)")
    add("--id-field", default="id", help="the field that holds the id (default: %(default)s)")
    several: dict[str, Any] = {"action": "append", "default": []}  # they may be given again
    add("--filter", metavar="PREFIX", help="only documents whose id starts with PREFIX; repeatable", **several)
    add("--exclude", metavar="PATTERN", help="skip files with such a name in folders; repeatable", **several)


def inputs_of(options: argparse.Namespace):
    """What to read; says which files in folders are not."""
    from ccq.data.sources import Inputs

    given: dict[str, Any] = {name: getattr(options, name) for name in Inputs.__dataclass_fields__}
    inputs = Inputs(**given | {name: tuple(given[name]) for name in ("paths", "filter", "exclude")})
    if skipped := inputs.skipped():
        shown = [*map(str, skipped[:10]), *[f"and {len(skipped) - 10} more"] * (len(skipped) > 10)]
        print(f"Skipped files of other kinds ({len(skipped)}): {', '.join(shown)}", file=sys.stderr)
    return inputs


def size(text: str) -> int:
    """'64M' is 64,000,000."""
    factor = {"K": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:].upper(), 1)
    try:
        return round(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"expected a number as 5000, 64M or 2G, got {text!r}") from None


def run_tokenizer(options: argparse.Namespace) -> int:
    from ccq.data.tokenizer import train_tokenizer, vocabulary
    from ccq.files import TOKENIZER_FILES, check_free, whole_folder

    inputs = inputs_of(options)
    check_free(options.out, options.force)
    with whole_folder(options.out, last="tokenizer.json", instead_of=TOKENIZER_FILES) as out:
        say = functools.partial(print, file=sys.stderr, flush=True)
        tokenizer = train_tokenizer(inputs, options.vocab_size, options.sample, say)
        tokenizer.save_pretrained(out)
    found = vocabulary(tokenizer)
    fewer = "" if found == options.vocab_size else f" ({options.vocab_size:,} asked for: the text gives no more)"
    print(f"Wrote {options.out}: {found:,} entries{fewer}")
    return 0


def run_prepare(options: argparse.Namespace) -> int:
    from ccq.data.needles import Needles
    from ccq.data.prepare import Preparation, prepare

    asked = {name: getattr(options, f"needle_{name}") for name in ("forms", "length", "exclude")}
    given: Any = {name: tuple(value) for name, value in asked.items() if value}
    if given and not options.needles:
        raise DataError("--needle-forms, --needle-length and --needle-exclude need --needles SHARE")
    needles = Needles(options.needles, seed=options.needle_seed, **given) if options.needles else None
    what = Preparation(
        inputs_of(options), options.tokenizer, options.shard_tokens, options.skip, options.max_tokens, needles
    )
    try:
        index = prepare(what, options.out, options.workers, progress=True)
    except KeyboardInterrupt:
        print("Interrupted: finished shards are kept; the same command resumes.", file=sys.stderr)
        return 130
    print(f"{options.out}: {summary(index)}")
    return 0


def run_check(options: argparse.Namespace) -> int:
    from ccq.data.shards import problems, read_index

    index = read_index(options.folder)
    found = problems(options.folder, index)
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(f"{options.folder}: sound; {summary(index)}")
    return 1 if found else 0


def summary(index: dict) -> str:
    shards = plural(len(index["shards"]), "shard")
    text = f"{index['tokens']:,} tokens, {plural(index['documents'], 'document')}, {shards}"
    if index["needle_documents"]:
        share = index["needle_tokens"] / index["tokens"]
        text += f"; {index['needle_documents']:,} needle documents, {share:.2%} of the tokens"
    return text
