"""The paper's numbers (paper.toml), and where its bold or its text does not agree with its own tables."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ccq.report.systems import label_of, scale_label

HERE = Path(__file__).parent
MEAN_ERROR = 0.0101  # a mean of cells rounded to 0.01, itself rounded


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
class Row:
    scale: str
    system: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    name: str
    label: str
    title: str
    columns: tuple[Column, ...]
    more: tuple[Column, ...]  # that the paper leaves out
    rows: tuple[Row, ...]
    bold: str  # among which rows the paper marks the best: "all", "recurrent" or "none"
    gpus: int | None
    mean: dict[str, Any] | None

    def at(self, heading: str) -> int:
        return [column.heading for column in self.columns].index(heading)

    def cell(self, scale: str, system: str, heading: str) -> Cell | None:
        for row in self.rows:
            if (row.scale, row.system) == (scale, system):
                return row.cells[self.at(heading)]
        return None

    def value(self, scale: str, system: str, heading: str) -> float | None:
        cell = self.cell(scale, system, heading)
        return None if cell is None else cell.value

    @property
    def scales(self) -> list[str]:
        return list(dict.fromkeys(row.scale for row in self.rows))


@dataclass(frozen=True)
class Paper:
    tables: dict[str, Table]
    facts: dict[str, dict]
    statements: tuple[dict, ...]


@functools.cache
def load(path: Path = HERE / "paper.toml") -> Paper:
    content = tomllib.loads(path.read_text())
    tables = {}
    for name, table in content["tables"].items():
        rows = []
        for scale, system, text in table["rows"]:
            cells = tuple(Cell(part.rstrip("*"), part.endswith("*")) for part in text.split())
            if len(cells) != len(table["columns"]):
                raise ValueError(f"{path.name}: {name}, {scale} {system}: {len(cells)} cells")
            rows.append(Row(scale, system, cells))
        tables[name] = Table(
            name=name,
            label=table["label"],
            title=table["title"],
            columns=tuple(Column(*column) for column in table["columns"]),
            more=tuple(Column(*column) for column in table.get("more", ())),
            rows=tuple(rows),
            bold=table["bold"],
            gpus=table.get("gpus"),
            mean=table.get("mean"),
        )
    return Paper(tables, content["facts"], tuple(content["statements"]))


def eligible(system: str, among: str) -> bool:
    """Whether a row is one of those whose best is marked."""
    return among == "all" or (among == "recurrent" and not system.startswith("transformer"))


def best(values: dict[Any, float | None], better: str) -> set:
    """Keys of the best value, ties included; none where nothing is known or nothing is better."""
    known = {key: value for key, value in values.items() if value is not None}
    if not known or better not in ("lower", "higher"):
        return set()
    top = (min if better == "lower" else max)(known.values())
    return {key for key, value in known.items() if value == top}


def leaders(values: dict[Any, float | None], better: str) -> set:
    """What is set in bold: the best, unless all are the same, or there is but one."""
    top = best(values, better)
    return set() if len(top) == sum(value is not None for value in values.values()) else top


def footnotes(paper: Paper, name: str) -> list[str]:
    """Where the table's bold, its means, or what the text says of it do not agree with its cells."""
    table = paper.tables[name]
    return [
        *wrong_bold(table),
        *wrong_means(table),
        *(note for statement in paper.statements if statement["table"] == name for note in wrong(table, statement)),
    ]


def wrong_bold(table: Table) -> list[str]:
    notes: list[str] = []
    if table.bold == "none":
        return notes
    for scale in table.scales:
        rows = {row.system: row for row in table.rows if row.scale == scale and eligible(row.system, table.bold)}
        for at, column in enumerate(table.columns):
            top = best({system: row.cells[at].value for system, row in rows.items()}, column.better)
            bold = {row.system for row in table.rows if row.scale == scale and row.cells[at].bold}
            if bold == top:
                continue
            has = ", ".join(f"{label_of(s)} {rows[s].cells[at].text}" for s in rows if s in bold) or "nothing"
            should = ", ".join(f"{label_of(s)} {rows[s].cells[at].text}" for s in rows if s in top)
            notes.append(f"{column.heading}, {scale_label(scale)}: the paper prints {has} in bold; best is {should}.")
    return notes


def wrong_means(table: Table) -> list[str]:
    notes: list[str] = []
    if table.mean is None:
        return notes
    for row in table.rows:
        parts = [row.cells[table.at(heading)].value or 0.0 for heading in table.mean["of"]]
        told, mean = row.cells[table.at(table.mean["column"])], sum(parts) / len(parts)
        if abs(mean - (told.value or 0.0)) > MEAN_ERROR:
            notes.append(
                f"{table.mean['column']}, {scale_label(row.scale)} {label_of(row.system)}: the paper prints "
                f"{told.text}; the mean of its cells is {mean:.2f}."
            )
    return notes


def wrong(table: Table, statement: dict) -> list[str]:
    """A footnote where the table does not bear the statement out."""
    failed = []
    kind, scale = statement["kind"], statement["scale"]
    for heading in statement["columns"]:
        better = table.columns[table.at(heading)].better
        if kind == "grain":
            for row in table.rows:
                value = row.cells[table.at(heading)].value or 0.0
                steps = value / statement["value"]
                if row.scale == scale and abs(steps - round(steps)) > 1e-6:
                    failed.append(f"{heading} of {label_of(row.system)} is {row.cells[table.at(heading)].text}")
            continue
        row_value = table.value(scale, statement["row"], heading)
        if kind == "best":
            rows = [r.system for r in table.rows if r.scale == scale and eligible(r.system, statement["of"])]
            top = best({system: table.value(scale, system, heading) for system in rows}, better)
            if statement["row"] not in top:
                leader = min(top, key=rows.index)
                failed.append(
                    f"{heading}: {label_of(leader)} has {table.value(scale, leader, heading)}, "
                    f"{label_of(statement['row'])} {row_value}"
                )
            continue
        other = table.value(scale, statement["other"], heading)
        assert row_value is not None
        assert other is not None
        difference = row_value - other
        if kind == "difference":
            borne_out = abs(difference - statement["value"]) < 0.0051  # cells are rounded
        elif kind == "improves":
            borne_out = difference < 0 if better == "lower" else difference > 0
        elif kind == "between":
            low, high = statement["value"]
            borne_out = low <= difference <= high
        else:
            raise ValueError(f"statements: kind: expected best, difference, improves, between or grain, got {kind!r}")
        if not borne_out:
            failed.append(f"{heading}: {row_value} against {other} ({difference:+.2f})")
    if not failed:
        return []
    if kind == "grain":
        return [f"{'; '.join(failed)}, while {statement['says']}."]
    return [f"The text: {statement['says']}. The table: {'; '.join(failed)}."]
