"""What the report's tables of benchmarks share, and what CCQ costs. Each benchmark's own is `tables` in its module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ccq.bench.results import FLA
from ccq.report.collect import Collection, Source
from ccq.report.paper import load
from ccq.report.table import NOT_IN_PAPER, NOT_RUN, Cell, change
from ccq.systems import SYSTEMS

RANGE = "Small print in a cell: the range that was measured."
CLEANED = ("ccq-gla", "ccq-gated-deltanet")  # whose cost the paper gives
BACKBONES = {"gla": "gla", "gdn": "gated-deltanet"}  # what rows of a layer or kernel call a system
# the systems of these rows, by backbone and variant
LAYERS: dict[tuple[str, str], str] = {
    (short, variant): name
    for short, family in BACKBONES.items()
    for variant, name in {
        "fla": family,
        "unit": SYSTEMS[f"ccq-{family}"].control or family,
        "ours": f"ccq-{family}",
        "projected": f"{family}-projected-decay",
    }.items()
}
BATCH = 8  # of the paper's inference


def newest(found: Collection, kind: str) -> Source | None:
    return max(found.of("bench", kind), key=lambda s: s.when, default=None)


def find(sources: list[Source], **wanted: object) -> tuple[dict, Source] | None:
    """The newest row that has these values."""
    for source in sorted(sources, key=lambda s: s.when, reverse=True):
        for row in source.content["rows"]:
            if all(row.get(key) == value for key, value in wanted.items()):
                return row, source
    return None


def measured_of_fla(sources: list[Source]) -> list[str]:
    """Which of fla's own models were measured at the paper's size."""
    return [name for name in FLA if find(sources, system=name, size="1.3b")]


def label_of(system: str) -> str:
    return f"{SYSTEMS[FLA[system]].label}, by fla" if system in FLA else SYSTEMS[system].label


def control_of(system: str) -> str | None:
    return None if system in FLA else SYSTEMS[system].control


def noted(sources: Iterable[Source]) -> str:
    """What whoever measured it has to say of it."""
    notes = dict.fromkeys(source.content["note"] for source in sources if source.content.get("note"))
    return f" ({'; '.join(notes)})" if notes else ""


def timed(text: str, small: str = "", source: Source | None = None) -> Cell:
    return Cell(text, small, "" if source is None else source.told, kind="ours")


def beside(
    sources: list[Source], shown: Callable[[dict, dict | None], tuple[str, str]], control: Mapping[str, object],
    **wanted: object,
) -> Cell:  # fmt: skip
    """Text and small print that `shown` makes of the newest row with these values, and of its control's: the one that
    differs by `control`."""
    mine = find(sources, **wanted)
    if mine is None:
        return NOT_RUN
    base = find(sources, **{**wanted, **control})
    return timed(*shown(mine[0], base and base[0]), mine[1])


def quoted(table: str, system: str, heading: str) -> Cell:
    """A cell of the paper."""
    told = load().tables[table].cell("1.3b", system, heading)
    if told is None:
        return NOT_IN_PAPER
    text = f"{told.value:,.0f}" if told.value and told.value > 1e4 else told.shown
    return Cell(text, kind="paper", hover=load().tables[table].where_run)


def changed(
    key: str, form: str = ".0f", scale: float = 1.0, unit: str = "", ratio: Callable[[float], str] | None = change
) -> Callable[[dict, dict | None], tuple[str, str]]:
    """For `beside`: a value of a row, of timings the median and below it the range; in brackets what CCQ changes."""

    def shown(row: dict, control: dict | None = None) -> tuple[str, str]:
        values: list[Any] = [x[key] if x else None for x in (row, control)]
        mine, its = (x["median"] if isinstance(x, dict) else x for x in values)
        if mine is None:  # fla's models have no captured step
            return "–", ""
        ends = [f"{scale * row[key][end]:{form}}" for end in ("low", "high")] if isinstance(row[key], dict) else []
        brackets = f" ({ratio(mine / its)})" if its and ratio else ""
        return f"{scale * mine:{form}}{unit}{brackets}", "–".join(ends)

    return shown


@dataclass(frozen=True)
class Measure:
    """A cost that the paper gives too: which benchmark has it, and how it is read."""

    kind: str
    table: str  # of paper.toml
    column: str
    what: str
    key: str  # of a row
    timed: str = ""  # ... the timings behind it, with what was measured at least and at most

    def value(self, row: dict) -> float:
        return row[self.key]["median"] if isinstance(row[self.key], dict) else row[self.key]

    @property
    def rate(self) -> bool:
        return load().tables[self.table].column(self.column).better == "higher"

    def added(self, ratio: float) -> float:
        """Time or memory more, in percent."""
        return 100 * ((1 / ratio if self.rate else ratio) - 1)

    def papers(self, system: str) -> float:
        """With CCQ over without, where without has no unit q and k."""
        table = load().tables[self.table]
        one, two = (table.value("1.3b", name, self.column) for name in (system, SYSTEMS[system].family))
        assert one is not None
        assert two is not None
        return one / two

    def rows(self, source: Source) -> dict[str, dict]:
        """By system, at the paper's size, batch and length."""
        rows = source.content["rows"]
        if self.kind == "layer":
            at = [r for r in rows if (r["pass"], r["B"], r["T"]) == ("forward and backward", 1, 4096)]
            return {LAYERS.get((r["backbone"], r["variant"]), ""): r for r in at}
        wanted = {"size": "1.3b", "T": 4096, "length": 4096, "B": BATCH}
        return {r["system"]: r for r in rows if all(r.get(key, value) == value for key, value in wanted.items())}

    def measured(self, found: Collection, system: str) -> tuple[dict, dict, Source] | None:
        """Rows with CCQ and of its control, of the newest benchmark that has both."""
        control = SYSTEMS[system].control or ""
        for source in sorted(found.of("bench", self.kind), key=lambda s: s.when, reverse=True):
            rows = self.rows(source)
            if system in rows and control in rows and asked(rows[system]) == asked(rows[control]):
                return rows[system], rows[control], source
        return None


def asked(row: dict) -> list[Any]:
    """What must be equal for two rows of a benchmark to be compared."""
    return [row.get(name) for name in ("B", "T", "length", "tokens", "prompt", "dtype")]


MEASURES = {
    "layer": Measure("layer", "layer", "forward and backward, 4K", "a layer, 4K", "graph_ms", "graph_ms"),
    "training": Measure("train", "training", "tokens/s a GPU", "training", "tokens_per_second", "step_ms"),
    "memory": Measure("train", "training", "peak GiB a GPU", "training memory", "peak_gib"),
    "prefill": Measure("prefill", "inference", "4K prefill, ms", "prefill, 4K", "wall_ms", "wall_ms"),
    "decode": Measure("decode", "inference", "decode, tokens/s", "decode", "generate_tok_s"),
}
