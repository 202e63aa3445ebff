"""Tables and progress on the screen."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any


def show(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, left: int = 1, width: int = 120
) -> None:
    """A table whose first `left` columns are texts; where there is no terminal to keep to, `width` wide."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    console = Console()
    (console if console.is_terminal else Console(width=width)).print(table)


def progress(name: str, work: float | None, unit: str, shown: bool = True, done: int = 0) -> Any:
    """A bar on stderr with the time left, of work of which some is `done`; where nobody watches, a line every 15 s."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    often = 0.2 if sys.stderr.isatty() else 15
    return tqdm(None, name, work, initial=done, unit=unit, unit_scale=True, mininterval=often, disable=not shown)
