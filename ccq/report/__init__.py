"""`ccq report`: write one page with your results beside the paper's tables and figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ccq.files import check_free
from ccq.names import plural

MADE_BY = "Made by `ccq report`"  # how the last line of every page begins


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq report", description=(__doc__ or "").splitlines()[0])
    runs = "folders and files, in any mix: runs of `ccq train`, results of `ccq eval`, `ccq analyze`, `ccq bench`"
    parser.add_argument("paths", nargs="*", type=Path, metavar="RUNS", help=runs)
    parser.add_argument("-o", "--out", type=Path, help="folder for the page (default: report, unless --docs is given)")
    filled = "Markdown files in which `<!-- ccq report: TABLE -->` ... `<!-- /ccq report -->` is to be filled"
    parser.add_argument("--docs", nargs="+", type=Path, default=[], metavar="FILE", help=filled)
    parser.add_argument("--force", action="store_true", help="write into a folder that holds other files")
    arguments = parser.parse_args(argv)
    for name, paths in (("RUNS", arguments.paths), ("--docs", arguments.docs)):
        for path in paths:
            if not path.exists():
                parser.error(f"{name}: {path} does not exist")
    out = arguments.out or Path("report")
    if arguments.out is not None or not arguments.docs:
        older = out / "report.md"
        ours = older.is_file() and MADE_BY in older.read_text(encoding="utf-8", errors="replace")
        check_free(out, arguments.force, ours, older="one with an older page")
    from ccq.report.collect import collect  # late: `--help` needs none of this
    from ccq.report.page import build, fill

    found = collect(arguments.paths)
    page = build(found)
    if arguments.docs:
        done = [path for file in arguments.docs for path in fill(file, page)]
        print(f"Filled {', '.join(map(str, done))}")
        if arguments.out is None:
            return 0
    written = page.write(out)
    print(f"Wrote {written[0]}, {written[1].name} and {plural(len(written) - 2, 'figure')}")
    if not found.sources:
        print(f"ccq report: no result in {', '.join(map(str, arguments.paths)) or 'what was given'}", file=sys.stderr)
    return int(not found.sources)
