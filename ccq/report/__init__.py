"""`ccq report`: one page with the paper's tables and figures, our numbers beside the paper's, from any results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ccq.files import check_free, write_atomically

MADE_BY = "Made by `ccq report`"  # how the last line of every page begins


def write(paths: Sequence[Path], out: Path, notes: Sequence[str] = ()) -> list[Path]:
    """Collect what is under `paths` and write OUT/index.html, OUT/report.md and OUT/figures/; what was written.

    `notes` stand on the page with what a reader must know before comparing.
    """
    from ccq.figures import save
    from ccq.report.collect import collect
    from ccq.report.page import build

    found = collect(paths)
    found.told += notes
    page = build(found)
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "index.html", out / "report.md"]
    for path, text in zip(written, (page.html, page.markdown()), strict=True):
        write_atomically(path, text.encode())
    return [*written, *(save(figure, out / "figures" / f"{name}.png") for name, figure in page.figures.items())]


def fill(paths: Sequence[Path], files: Sequence[Path]) -> list[Path]:
    """Fill the marked places of Markdown `files` (docs.py) with the tables of what is under `paths`."""
    from ccq.report import docs
    from ccq.report.collect import collect
    from ccq.report.page import build

    page = build(collect(paths))
    return [written for file in files for written in docs.fill(file, page)]


def is_page(out: Path) -> bool:
    """Whether `write` wrote there before."""
    page = out / "report.md"
    return page.is_file() and MADE_BY in page.read_text(encoding="utf-8", errors="replace")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="RUNS",
        help="folders and files, in any mix: runs of `ccq train`, results of `ccq eval`, `ccq analyze`, `ccq bench`",
    )
    parser.add_argument("-o", "--out", type=Path, help="folder to write the page to (report, where there is no --docs)")
    parser.add_argument(
        "--docs",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="Markdown files in which `<!-- ccq report: TABLE -->` ... `<!-- /ccq report -->` is to be filled",
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that holds something else")
    arguments = parser.parse_args(argv)
    for name, paths in (("RUNS", arguments.paths), ("--docs", arguments.docs)):
        for path in paths:
            if not path.exists():
                parser.error(f"{name}: {path} is not there")
    out = arguments.out or Path("report")
    if arguments.out is not None or not arguments.docs:
        check_free(out, arguments.force, ours=is_page(out), older="one with an older page")
    if arguments.docs:
        from ccq.report.docs import DocsError

        try:
            filled = fill(arguments.paths, arguments.docs)
        except DocsError as error:
            parser.error(str(error))
        print(f"Filled {', '.join(str(path) for path in filled)}")
        if arguments.out is None:
            return 0
    written = write(arguments.paths, out)
    print(f"Wrote {written[0]}, {written[1].name} and {len(written) - 2} figures")
    from ccq.report.collect import collect

    if not collect(arguments.paths).sources:
        print(f"ccq report: no result in {', '.join(map(str, arguments.paths)) or 'what was given'}", file=sys.stderr)
        return 1
    return 0
