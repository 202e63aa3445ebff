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
    parser.add_argument("-o", "--out", type=Path, default=Path("report"), help="folder to write (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="write into a folder that holds other files")
    arguments = parser.parse_args(argv)
    for path in arguments.paths:
        if not path.exists():
            parser.error(f"RUNS: {path} does not exist")
    older = arguments.out / "report.md"
    ours = older.is_file() and MADE_BY in older.read_text(encoding="utf-8", errors="replace")
    check_free(arguments.out, arguments.force, ours, older="one with an older page")
    from ccq.report.collect import collect  # late: `--help` needs none of this
    from ccq.report.page import build

    found = collect(arguments.paths)
    written = build(found).write(arguments.out)
    print(f"Wrote {written[0]}, {written[1].name} and {plural(len(written) - 2, 'figure')}")
    if not found.sources:
        print(f"ccq report: no result in {', '.join(map(str, arguments.paths)) or 'what was given'}", file=sys.stderr)
    return int(not found.sources)
