"""Tables of what `ccq analyze` found."""

from __future__ import annotations

from ccq.report.claims import needle, signed
from ccq.report.collect import Collection, Source
from ccq.report.document import Block, Cell, Row, Table
from ccq.report.paper import Paper
from ccq.report.systems import tokens_label
from ccq.report.tables import MISSING, marks, number

COLUMNS = 16  # that a table of any scores has at most


def intervention_table(found: Collection) -> Table | None:
    """A row a model and change of lam, its scores from all files that ask it other things."""
    notes = []
    sources = found.of("analysis", "intervene")
    asked = list(dict.fromkeys(name for source in sources for row in source.content["rows"] for name in scores_of(row)))
    if {suite for suite, _ in asked} == {"niah"}:  # models may have been asked at other lengths
        asked.sort(key=lambda name: needle(name[1]))
    names = asked[:COLUMNS]
    if len(asked) > COLUMNS:
        notes.append(f"{len(asked) - COLUMNS} more scores are in {', '.join(source.name for source in sources)}.")
    rows: list[tuple[tuple, list[Source], dict]] = []  # whose, from which files, and its scores
    for source in sources:
        for row in source.content["rows"]:
            if "-layers-" in row["intervention"]:
                continue
            lam = {"none": "as trained"}.get(row["intervention"], row["intervention"])
            whose, scores = (source.run, f"{source.title}, lam {lam}"), scores_of(row)
            same = [(mine, known) for who, mine, known in rows if who == whose and not known.keys() & scores.keys()]
            if source.run is not None and same:
                mine, known = same[0]
                mine.append(source)
                known |= scores
            else:
                rows.append((whose, [source], scores))
        if some := sum("-layers-" in row["intervention"] for row in source.content["rows"]):
            notes.append(f"{source.title}: {some} more rows, each with some layers changed, are in {source.name}.")
    if not rows:
        return None
    several = len({suite for suite, _ in asked}) > 1
    head = [f"{suite}: {score}" if several else asked_label(suite, score) for suite, score in names]
    shown = []
    for (_, label), mine, scores in rows:
        told = "\n".join(source.told for source in mine)
        values = [scores.get(name) for name in names]
        cells = [MISSING if x is None else Cell(number(x), hover=told, kind="ours") for x in values]
        shown.append(Row(Cell(f"{label} {marks(mine)}"), cells))
    return Table("Cleaning changed at inference", ["", *head], [Block("", shown)], notes, name="intervene")


def scores_of(row: dict) -> dict[tuple[str, str], float | None]:
    return {(suite, name): value for suite, scores in row["suites"].items() for name, value in scores.items()}


def asked_label(suite: str, score: str) -> str:
    """A score in few words, as the paper's table of needles has them.

    >>> asked_label("niah", "niah_single_1/4096"), asked_label("length", "pg19/4096")
    ('S1 4K', 'pg19/4096')
    """
    if suite == "niah" and score.startswith("niah_single_"):
        task, length = needle(score)
        return f"S{task.removeprefix('niah_single_')} {tokens_label(length)}"
    return score


POINTS = ("projection", "read", "sigma")  # where keys are caught: the paper's way first


def gap(value: float | None) -> str:
    """A model of two layers has no middle third, and a short prompt may lack a group of tokens."""
    return "–" if value is None else signed(value, 3)


def isotropic(part: dict) -> str:
    """The share of keys without structure; several where heads differ in size."""
    shares = part["of_isotropic_keys"]
    return ", ".join(f"{share:.2f}" for share in (shares if isinstance(shares, list) else [shares]))


def gap_table(found: Collection, paper: Paper) -> Table | None:
    """The gap of alignment in the top 16 directions: the paper's models, and every model measured here."""
    sources = found.of("analysis", "alignment")
    if not sources:
        return None
    theirs = []
    for name, title, size, layers in (("gap_qwen3", "Qwen3-4B-Instruct-2507", 128, 36),
                                      ("gap_gated_deltanet", "Gated DeltaNet 500M", 256, 21)):  # fmt: skip
        fact = paper.facts[name]
        values = (POINTS[0], f"{16 / size:.2f}", signed(fact["value"], 3), f"{layers} of {layers}", "–", "–")
        theirs.append(Row(Cell(title), [Cell(x, kind="paper", hover=fact["where"]) for x in values], "paper"))
    ours = []
    for source in sources:
        for point, content in source.content["points"].items():
            part = content["top"]["16"]
            row = part["unique"]
            values = (
                point,
                isotropic(part),
                gap(row["mean"]),
                f"{row['negative_layers']} of {len(row['by_layer'])}",
                ", ".join(gap(x) for x in row["thirds"]),
                gap(part["needle"]["mean"]),
            )
            label = Cell(f"{source.title} {marks([source])}")
            ours.append(Row(label, [Cell(x, hover=source.told, kind="ours") for x in values]))
    head = ["model", "keys", "16/K", "gap", "negative layers", "gap by thirds of depth", "all needle tokens"]
    caption = "Gap of alignment: needle tokens that are unique, less the filler"
    return Table(caption, head, [Block("The paper, its own prompts", theirs), Block("Here", ours)], name="gap")


def control_table(found: Collection) -> Table | None:
    """The gap of what is asked for beside that of what is planted, near or rare: is it more than rarity?"""
    rows = []
    for source in found.of("analysis", "alignment"):
        for point, content in source.content["points"].items():
            # once where 16 directions are an eighth of all
            for part in {tuple(part["directions"]): part for part in content["top"].values()}.values():
                beyond = part.get("novel minus planted")
                if beyond is None:
                    continue
                error = "" if beyond["error_of_mean"] is None else f" ± {beyond['error_of_mean']:.3f}"
                values = (
                    point,
                    str(part["directions"][0]),
                    gap(part["novel"]["mean"]),
                    gap(part["planted"]["mean"]),
                    f"{gap(beyond['mean'])}{error}",
                    f"{beyond['clearly_negative_layers']}, {beyond['clearly_positive_layers']} of "
                    f"{len(beyond['by_layer'])}",
                    gap(part["near"]["mean"]),
                    gap(part["rare"]["mean"]),
                )
                label = Cell(f"{source.title} {marks([source])}")
                rows.append(Row(label, [Cell(x, hover=source.told, kind="ours") for x in values]))
    if not rows:
        return None
    head = ["model", "keys", "top", "new thing, asked for", "planted, not asked for", "difference",
            "layers where it is clearly below, above", "filler around the needle", "rare filler"]  # fmt: skip
    return Table("Gap of alignment beside its controls", head, [Block("", rows)], name="control")


def margin_table(found: Collection) -> Table | None:
    """Needle against distractors at the reading token, without and with cleaning: means over layers and heads."""
    rows = []
    for source in found.of("analysis", "margin"):
        content = source.content
        table = {name: mean([x for layer in layers for x in layer]) for name, layers in content["table"].items()}
        lam = f"{table['lam']:.3f}, {'its own' if content['own_lam'] else 'given'}"
        values = [lam]
        for what, digits in (("mean", 3), ("best", 3), ("rank", 1)):
            values.append(" → ".join(plain(table[f"{name} {what}"], digits) for name in ("without", "with")))
        values += [f"{content[name]} of {content['cells']}" for name in ("wider_cells", "wider_cells_best")]
        label = Cell(f"{source.title} {marks([source])}", f"{content['prompts']} prompts")
        rows.append(Row(label, [Cell(x, hover=source.told, kind="ours") for x in values]))
    if not rows:
        return None
    head = ["model", "lam", "mean less mean", "best less best", "rank of the needle",
            "heads where the mean margin widens", "the best's"]  # fmt: skip
    notes = ["Scores of unit keys at the last token of needle prompts, without → with cleaning; means over layers and "
             "heads. Rank 1: above all distractors."]  # fmt: skip
    title = "Margin of the needle over distractors (not in the paper)"
    return Table(title, head, [Block("", rows)], notes, name="margin")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def plain(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")
