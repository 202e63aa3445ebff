"""Make what ships of trained models: python runs/ship_pico.py --models DIR --runs DIR --data DIR --scored DIR

Of each NAME (gla-pico, gla-unit-pico, ccq-gla-pico): --models has NAME/ as `ccq export RUN OUT --dtype bf16` wrote it,
--runs NAME/ its run (log, config, origin), --scored NAME/ as `ccq eval MODEL --suite niah,length --out OUT` left it;
--data has the shards of runs/prepare_pico.sh. --plain-runs and --plain-scored have the same of three models without a
convolution: they do not ship, but what came of them is told. Writes into ccq/shipped (or --out): the model, a
card (README.md, of runs/pico_card.md), results.json with all that the card says, and the manifest with
checksums. The tokenizer is one for all, beside them.

After a change of runs/pico_card.md: python runs/ship_pico.py --cards, which needs no run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ccq import shipped
from ccq.data.shards import read_index
from ccq.model.info import info
from ccq.train import config as configs
from ccq.train.config import model_config

WHAT = {
    "gla-pico": "Gated linear attention, the backbone",
    "gla-unit-pico": "Gated linear attention with unit queries and keys, the control of ccq-gla-pico",
    "ccq-gla-pico": "Gated linear attention with unit queries and keys and query cleaning (CCQ)",
}
SAME = ("steps", "seed", "tokens", "learning_rate", "window", "batch_tokens", "data")  # where models are trained alike
FILES = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
OLD, NEW = "--system.", "--runtime."  # what options of how a run runs were called, and are
CARD = Path(__file__).with_name("pico_card.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("models", "runs", "data", "scored", "plain-runs", "plain-scored"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--out", type=Path, default=shipped.HERE)
    parser.add_argument("--cards", action="store_true", help="only write the cards in --out again")
    options = parser.parse_args()
    if options.cards:
        write_cards(options.out)
        return
    if missing := [name for name in ("models", "runs", "data", "scored") if getattr(options, name) is None]:
        parser.error(f"expected {', '.join(f'--{name}' for name in missing)}")
    index = read_index(options.data / "train")
    told = {name: facts(name, options.runs / name, options.scored / name, index) for name in WHAT}
    if options.plain_runs and options.plain_scored:
        for name, fact in told.items():
            plain = facts(name, options.plain_runs / name, options.plain_scored / name, index)
            if plain["conv_size"] or any(plain[key] != fact[key] for key in SAME):
                raise SystemExit(f"{options.plain_runs / name} is not {name} without a convolution, trained alike")
            kept = ("command", "commit", "date", "parameters", "lam", "valid_perplexity", "evaluation")
            fact["without_convolution"] = {key: plain[key] for key in kept}
    (options.out / shipped.TOKENIZER).mkdir(parents=True, exist_ok=True)
    for name, file in itertools.product(told, TOKENIZER):  # one for all: trained on the same tokens
        copy, mine = options.out / shipped.TOKENIZER / file, options.models / name / file
        if name != next(iter(told)) and copy.read_bytes() != mine.read_bytes():
            raise SystemExit(f"{mine} is not that of {next(iter(told))}: models that ship share one tokenizer")
        shutil.copyfile(mine, copy)
    for name, fact in told.items():
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            shutil.copyfile(options.models / name / file, folder / file)
        (folder / "results.json").write_text(json.dumps(fact, indent=1) + "\n", encoding="utf-8")
    write_cards(options.out)
    total = sum(path.stat().st_size for name in (*told, shipped.TOKENIZER) for path in (options.out / name).iterdir())
    print(f"Wrote {', '.join(str(options.out / name) for name in told)}: {total / 1e6:.1f} MB together")


def write_cards(root: Path) -> None:
    """The card of each model from the results of all, and its manifest."""
    told = {name: json.loads((root / name / "results.json").read_text(encoding="utf-8")) for name in WHAT}
    for name, fact in told.items():
        (root / name / "README.md").write_text(card(name, told), encoding="utf-8")
        seal(root / name, **{key: fact[key] for key in ("steps", "seed", "tokens", "commit", "command")})


def seal(folder: Path, **facts: object) -> dict:
    """Write the manifest of what lies in `folder`, and of the tokenizer beside it, with `facts` beside the checksums;
    what ships is sealed last."""
    own = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != shipped.MANIFEST]
    files = {
        os.path.relpath(path, folder).replace(os.sep, "/"): {
            "bytes": path.stat().st_size,
            "sha256": shipped.sha256(path),
        }
        for path in (*own, *sorted((folder.parent / shipped.TOKENIZER).iterdir()))
    }
    content = {"name": folder.name, **facts, "files": files}
    (folder / shipped.MANIFEST).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return content


def facts(name: str, run: Path, scored: Path, index: dict) -> dict:
    """What is known of a model: how it was trained, on what, and what came out."""
    config = configs.read(run / "config.json")
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    last = {key: value for row in rows for key, value in row.items()}  # the newest of each
    if last["step"] != config.steps:
        raise SystemExit(f"{run} is at step {last['step']} of {config.steps}: it is not finished")
    origin = json.loads((run / "provenance.json").read_text())[-1]
    batch_tokens = config.data.batch * config.data.length
    model = model_config(config.model)
    size = info(model, config.data.length)
    scores = {}
    for suite in ("niah", "length"):
        result = json.loads((scored / f"{suite}.json").read_text())
        for score in result["scores"].values():
            score.pop("by_depth", None)
            score.pop("loss_by_position", None)
        scores[suite] = {key: result[key] for key in ("scores", "samples", "settings", "notes", "model", "commit")}
    return {
        "name": name,
        **{key: origin[key] for key in ("command", "commit", "date", "versions")},
        "hardware": origin.get("gpu") or origin.get("cpu"),
        "steps": config.steps,
        "seed": config.seed,
        "tokens": config.steps * batch_tokens,
        "epochs": config.steps * batch_tokens / index["tokens"],
        "learning_rate": config.optimizer.lr,
        "window": config.data.length,
        "batch_tokens": batch_tokens,
        "parameters": {"body": size.body, "embedding": size.embedding},
        "conv_size": model.conv_size,
        **{key: last.get(key) for key in ("loss", "valid_loss", "valid_perplexity", "lam", "lam_of_decay_alone")},
        "data": {key: index[key] for key in ("tokens", "documents", "needle_tokens", "needle_documents", "settings")},
        "evaluation": scores,
    }


def card(name: str, told: dict[str, dict]) -> str:
    """README.md of a model; its tables have all of them side by side."""
    own = told[name]
    data, needles = own["data"], own["data"]["settings"]["needles"]
    gate = ""
    if own["lam"]:
        gate = (
            f"\nMean lam after training, by layer: {', '.join(f'{x:.3f}' for x in own['lam'])}. Weight decay alone, "
            f"without any gradient, would have moved it from 0.010 to {own['lam_of_decay_alone']:.3f}.\n"
        )
    return CARD.read_text(encoding="utf-8").format(
        **own,
        what=WHAT[name]
        + (f", with a convolution over {own['conv_size']} tokens for q, k and v" if own["conv_size"] else ""),
        today=own["command"].replace(OLD, NEW),
        renamed=f"At that commit, options `{NEW}*` were called `{OLD}*`.\n" if OLD in own["command"] else "",
        body=own["parameters"]["body"] / 1e6,
        embedding=own["parameters"]["embedding"] / 1e6,
        needle_documents=data["needle_documents"],
        documents=data["documents"],
        needle_share=data["needle_tokens"] / data["tokens"],
        shortest=needles["length"][0],
        longest=needles["length"][1],
        forms=", ".join(needles["forms"]),
        millions=own["tokens"] / 1e6,
        gate=gate,
        perplexities=", ".join(f"{n} {fact['valid_perplexity']:.2f}" for n, fact in told.items()),
        samples=next(iter(own["evaluation"]["niah"]["scores"].values()))["n"],
        needles=found(told),
        plain=plain(told),
        lowest=lowest(told),
        niah=table(told, "niah", lambda s: f"{s['value']:.0f} [{s['interval'][0]:.0f}, {s['interval'][1]:.0f}]"),
        length=table(told, "length", lambda s: f"{s['value']:.2f}"),
    )


def values(fact: dict, suite: str) -> dict[str, dict]:
    """Scores by task and length; those of the same tokens at every length are beside them in results.json."""
    return {group: score for group, score in fact["evaluation"][suite]["scores"].items() if "/same/" not in group}


def found(told: dict[str, dict]) -> str:
    """Which of them retrieve at all, and what one may think of that."""
    best = {name: max(score["value"] for score in values(fact, "niah").values()) for name, fact in told.items()}
    none = [name for name, value in best.items() if value < 5]
    able = [name for name in told if name not in none]
    said = []
    if none:
        said.append(
            f"**{' and '.join(none)} did not learn to retrieve**, although trained like the others. With one run "
            "each this may be chance: it says nothing about unit norms or about cleaning."
        )
    for one, other in itertools.combinations(able, 2):
        a, b = (values(told[name], "niah") for name in (one, other))
        apart = [x for x in a if a[x]["interval"][1] < b[x]["interval"][0] or b[x]["interval"][1] < a[x]["interval"][0]]
        said.append(
            f"The intervals of {one} and {other} overlap in "
            + (f"all but {len(apart)} of {len(a)} rows: {', '.join(apart)}." if apart else f"all {len(a)} rows.")
        )
    return " ".join(said)


def lowest(told: dict[str, dict]) -> str:
    """Who has the lowest perplexity how often."""
    scores = {name: values(fact, "length") for name, fact in told.items()}
    groups = list(next(iter(scores.values())))
    first = [min(told, key=lambda name: scores[name][group]["value"]) for group in groups]
    counts = ", ".join(f"{name} {first.count(name)}" for name in told)
    return f"How often each model has the lowest perplexity, of {len(groups)} rows: {counts}."


def plain(told: dict[str, dict]) -> str:
    """What came of the same models without a convolution."""
    if not all("without_convolution" in fact for fact in told.values()):
        return ""
    other = [fact["without_convolution"] for fact in told.values()]
    best = ", ".join(f"{max(score['value'] for score in values(fact, 'niah').values()):.0f}" for fact in other)
    perplexities = ", ".join(f"{fact['valid_perplexity']:.2f}" for fact in other)
    return (
        "\nThe paper's GLA has no convolution. The same three models without it, trained in the same way, retrieved "
        f"{best} per cent in their best rows, with perplexities of {perplexities} on held-out text. They do not ship; "
        "`results.json` has their scores.\n"
    )


def table(told: dict[str, dict], suite: str, shown: Callable[[dict], str]) -> str:
    scores = {name: values(fact, suite) for name, fact in told.items()}
    lines = [f"| | {' | '.join(told)} |", "|---" * (len(told) + 1) + "|"]
    for group in next(iter(scores.values())):
        task, _, length = group.partition("/")
        lines.append(f"| {task}, {int(length):,} | {' | '.join(shown(scores[name][group]) for name in told)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
