"""The report's tables of recall: what `ccq sweep` trained, and what `ccq eval --suite mqar` or `mad` asked."""

from __future__ import annotations

from collections.abc import Sequence

from ccq.report.paper import Column
from ccq.report.results import RECALL, Results, by_size, mean
from ccq.report.table import WORDS, Block, Cell, Table, not_run
from ccq.report.tables import score_rows, title_of
from ccq.systems import SYSTEMS, Identity
from ccq.train.sweep import TASKS


def tables(results: Results) -> list[Table]:
    made = []
    if blocks := [
        block for size, rows in by_size(results.rows("recall")).items() for block in sweep_blocks(size, rows, results)
    ]:
        head = ["", "test accuracy, %", "seeds", "rate", "tokens", "parameters", "embeddings", "state, KiB", "of it Σ",
                "lam at the end"]  # fmt: skip
        notes = [WORDS["sweep"], WORDS["scores"]]
        missing = [name for source in results.found.of("sweep") for name in source.content["missing"]]
        if missing:
            told = f"{', '.join(missing[:12])}{' ...' if len(missing) > 12 else ''}"
            notes.append(f"Not finished: {told}.")
        caption = "Recall (MQAR) by system (not in the paper)"
        made.append(Table("mqar", caption, head, blocks, notes))
    for name, suite, what in (
        ("mqar-slices", "recall", "(MQAR) by slice of the sweep"),
        ("recall", "mqar", "(MQAR) by slice of `ccq eval`"),
        ("mad", "mad", "(MAD) of `ccq eval`, by tokens and longest key"),
    ):
        order = lambda n: (n == "average", [int(p) for p in n.split("-") if p.isdigit()])  # noqa: E731
        settings = sorted(results.settings(suite), key=order)
        columns = [Column(n, f"{suite}:{n}", "higher") for n in settings if (suite, n) != ("recall", "average")]
        if columns:
            told = "{} tokens, keys of at most {}" if suite == "mad" else "{} tokens, {} pairs"
            heads = [told.format(*n.heading.split("-")) if "-" in n.heading else n.heading for n in columns]
            likes = ["0.0" if suite == "recall" else ""] * len(columns)
            blocks = [Block(title_of(size), score_rows(rows, columns, results, likes))
                      for size, rows in by_size(results.rows(suite)).items()]  # fmt: skip
            caption = f"Recall {what}: queries answered, %"
            made.append(Table(name, caption, ["", *heads], blocks, [WORDS["scores"]]))
    return made


def sweep_blocks(size: str, rows: Sequence[Identity], results: Results) -> list[Block]:
    """How the rows of a sweep were treated: rate, tokens, parameters, state."""
    made = score_rows(rows, [Column("", RECALL, "higher")], results, ["0.0"])
    tiers = set()
    for row, of in zip(rows, made, strict=True):
        estimate = results.estimate(row, RECALL)
        assert estimate is not None
        runs = [source.content for source in estimate.sources]
        tiers |= {run["tier"] for run in runs}
        tried: dict[float, list[float]] = {}
        for record in results.of(row, "recall"):
            if record.setting == "average":
                tried.setdefault(record.source.content["lr"], []).append(record.validation or 0.0)
        first, told = runs[0], estimate.sources[0].told
        swept = f"best of {len(tried)}" if len(tried) > 1 else "chosen before"
        gates = [run["gate"]["lam"][-1] for run in runs if run.get("gate")]
        lam = f"{mean(mean(x for x in layer if x is not None) for layer in gates):.3f}" if gates else "–"
        of.label.small = ""
        of.cells += [
            Cell(str(len(estimate.by_seed)), hover=told),
            Cell(f"{first['lr']:.3g}", swept, "\n".join(f"{lr:.3g}: valid {mean(a):.3f}" for lr, a in tried.items())),
            Cell(millions(first["tokens"])),
            *(Cell(millions(first["parameters"][part])) for part in ("body", "embeddings")),
            Cell(f"{first['state_bytes'] / 1024:,.1f}", hover="a sequence of 256 tokens, fp32, covariance counted"),
            Cell(f"{first['covariance_bytes'] / 1024:,.1f}" if first["covariance_bytes"] else "–"),
            Cell(lam),
        ]
    usual = TASKS["mad" if size.startswith("MAD") else "mqar"].rows
    wanted = dict.fromkeys(name for tier in sorted(tiers) for name in usual[tier])
    have = {row.system for row in rows if not row.variant}
    labels = [SYSTEMS[name.replace("_", "-")].label for name in wanted if name.replace("_", "-") not in have]
    return [Block(title_of(size), made), *not_run([f"{label}, {size}" for label in labels])]


def millions(count: float) -> str:
    return f"{count / 1e6:,.2f}M" if count < 1e8 else f"{count / 1e6:,.0f}M"
