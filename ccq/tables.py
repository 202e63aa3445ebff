"""Tables on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


class LiveTable:
    """Rows as they come: a live table on a terminal; elsewhere a line each, so that what is cut short leaves its rows.

    >>> with LiveTable("a benchmark", "name", "ms") as table:
    ...     table.add("one", "1.00")
    name  ms
    one   1.00
    """

    def __init__(self, title: str, *columns: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.table import Table

        self.console = Console()
        self.table = Table(title=title)
        for i, column in enumerate(columns):
            self.table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        self.widths = [len(column) for column in columns]
        self.live = Live(self.table, console=self.console) if self.console.is_terminal else None
        if self.live is None:
            print("  ".join(columns))

    def add(self, *cells: object) -> None:
        row = [str(cell) for cell in cells]
        self.table.add_row(*row)
        if self.live is None:
            self.widths = [max(pair) for pair in zip(self.widths, map(len, row), strict=True)]
            print(
                "  ".join(cell.ljust(width) for cell, width in zip(row, self.widths, strict=True)).rstrip(), flush=True
            )

    def __enter__(self) -> LiveTable:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
