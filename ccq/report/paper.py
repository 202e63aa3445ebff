"""The paper's numbers, which stand in paper.toml alone."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Column:
    heading: str
    where: str  # "suite:score" of `ccq eval`, * for any length; "" where it is no score
    better: str  # "lower", "higher" or ""


@dataclass(frozen=True)
class Cell:
    text: str  # as the paper prints it
    bold: bool = False

    @property
    def value(self) -> float | None:
        """The number without its deviation; None for what is no number (15B)."""
        try:
            return float(self.text.partition("+-")[0])
        except ValueError:
            return None

    @property
    def shown(self) -> str:
        return self.text.replace("+-", " ± ")


@dataclass(frozen=True)
class Table:
    label: str
    title: str
    columns: tuple[Column, ...]
    rows: dict[tuple[str, str], tuple[Cell, ...]]  # by scale and system
    bold: str  # among which rows the paper marks the best: "all", "recurrent" or "none"
    more: tuple[Column, ...] = ()  # that the paper leaves out
    notes: tuple[str, ...] = ()  # where its bold, or its text, does not agree with its cells
    gpus: int = 0

    def cell(self, scale: str, system: str, heading: str) -> Cell | None:
        at = [column.heading for column in self.columns].index(heading)
        row = self.rows.get((scale, system))
        return None if row is None else row[at]

    def value(self, scale: str, system: str, heading: str) -> float | None:
        cell = self.cell(scale, system, heading)
        return None if cell is None else cell.value

    def column(self, heading: str) -> Column:
        return next(column for column in self.columns if column.heading == heading)

    def of(self, scale: str) -> dict[str, tuple[Cell, ...]]:
        return {system: cells for (where, system), cells in self.rows.items() if where == scale}

    @property
    def scales(self) -> list[str]:
        return list(dict.fromkeys(scale for scale, _ in self.rows))

    @property
    def where_run(self) -> str:
        return f"{self.label}; {'one GPU' if self.gpus == 1 else f'{self.gpus} GPUs'}"

    def counts(self, system: str) -> bool:
        """Whether a row is one of those whose best is marked."""
        return self.bold != "recurrent" or system != "transformer"


@dataclass(frozen=True)
class Fact:
    """A number that the text gives; of a diagnostic also its model, which has so many layers and keys so long."""

    value: str | int  # as it stands in the file: 0.40, not 0.4
    what: str
    where: str
    model: str = ""
    layers: int = 0
    key_size: int = 0

    def __str__(self) -> str:
        return str(self.value).replace("-", "−")


@dataclass(frozen=True)
class Paper:
    tables: dict[str, Table]
    facts: dict[str, Fact]


@functools.cache
def load(path: Path = HERE / "paper.toml") -> Paper:
    content = tomllib.loads(path.read_text("utf-8"), parse_float=str)
    tables = {}
    for name, table in content["tables"].items():
        rows = {(scale, system): tuple(Cell(part.rstrip("*"), part.endswith("*")) for part in text.split())
                for scale, system, text in table["rows"]}  # fmt: skip
        if any(len(cells) != len(table["columns"]) for cells in rows.values()):
            raise ValueError(f"{path.name}: {name}: expected {len(table['columns'])} cells in each row")
        columns = {key: tuple(Column(*column) for column in table.get(key, ())) for key in ("columns", "more")}
        tables[name] = Table(**table | columns | {"rows": rows})
    return Paper(tables, {name: Fact(**fact) for name, fact in content["facts"].items()})


def numbers_of(table: str, system: str) -> list[float | None]:
    """A row of a table at 1.3B; empty where the paper has none."""
    return [cell.value for cell in load().tables[table].rows.get(("1.3b", system), ())]


def leader(values: dict[Any, float | None], better: str) -> Any:
    """What is set in bold: the one that is best. None of several that are equal, nor one that stands alone."""
    known = {key: value for key, value in values.items() if value is not None}
    if len(known) < 2 or better not in ("lower", "higher"):
        return None
    top = (min if better == "lower" else max)(known.values())
    leaders = [key for key, value in known.items() if value == top]
    return leaders[0] if len(leaders) == 1 else None
