"""`ccq report`: one page with the paper's tables and figures, our numbers beside the paper's, from any results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def write(paths: Sequence[Path], out: Path, notes: Sequence[str] = ()) -> list[Path]:
    """Collect what is under `paths` and write OUT/index.html, OUT/report.md and OUT/figures/; what was written.

    `notes` stand on the page with what a reader must know before comparing.
    """
    from ccq.files import write_atomically
    from ccq.report import figures, html, markdown, page
    from ccq.report.collect import collect
    from ccq.report.document import figures_of

    found = collect(paths)
    found.told += notes
    document = page.build(found)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in (("index.html", html.page(document)), ("report.md", markdown.page(document))):
        write_atomically(out / name, text.encode())
        written.append(out / name)
    for figure in figures_of(document.parts):
        written += figures.save(figure, out / "figures")
    return written


def fill(paths: Sequence[Path], files: Sequence[Path]) -> list[Path]:
    """Fill the marked places of Markdown `files` (docs.py) with the tables of what is under `paths`."""
    from ccq.report import docs, page
    from ccq.report.collect import collect

    document = page.build(collect(paths))
    return [written for file in files for written in docs.fill(file, document)]


def markdown_of(paths: Sequence[Path]) -> str:
    """What OUT/report.md would hold; no figure is made."""
    from ccq.report import markdown, page
    from ccq.report.collect import collect

    return markdown.page(page.build(collect(paths)))


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
    arguments = parser.parse_args(argv)
    for name, paths in (("RUNS", arguments.paths), ("--docs", arguments.docs)):
        for path in paths:
            if not path.exists():
                parser.error(f"{name}: {path} is not there")
    if arguments.docs:
        from ccq.report.docs import DocsError

        try:
            filled = fill(arguments.paths, arguments.docs)
        except DocsError as error:
            parser.error(str(error))
        print(f"Filled {', '.join(str(path) for path in filled)}")
        if arguments.out is None:
            return 0
    written = write(arguments.paths, arguments.out or Path("report"))
    print(f"Wrote {written[0]}, {written[1].name} and {len(written) - 2} files of figures", file=sys.stdout)
    return 0
