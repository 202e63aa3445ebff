"""Make what ships of trained models: python runs/ship_pico.py --models DIR --runs DIR --data DIR --scored DIR

Of each NAME (gla-pico, gla-unit-pico, ccq-gla-pico): --models has NAME/ as `ccq export RUN OUT --dtype bf16` wrote it,
--runs its run (RECIPE/: log, config, origin), --scored NAME/ as `ccq eval MODEL --suite niah,length --out OUT` left it;
--data has the shards of runs/prepare_pico.sh. Writes into ccq/shipped (or --out): the model, its tokenizer, a card
(README.md, of runs/pico_card.md), results.json with all that the card says, and the manifest with checksums.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from ccq import shipped
from ccq.data.shards import read_index
from ccq.model.info import info
from ccq.train import config as configs
from ccq.train.config import model_config

RECIPES = {"gla-pico": "gla", "gla-unit-pico": "gla_unit", "ccq-gla-pico": "ccq_gla"}
WHAT = {
    "gla-pico": "Gated linear attention, the backbone",
    "gla-unit-pico": "Gated linear attention with queries and keys of unit length, the control of ccq-gla-pico",
    "ccq-gla-pico": "Gated linear attention whose queries are cleaned with the running covariance of the keys (CCQ)",
}
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CARD = Path(__file__).with_name("pico_card.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("models", "runs", "data", "scored"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=shipped.HERE)
    options = parser.parse_args()
    index = read_index(options.data / "train")
    told = {name: facts(name, options, index) for name in RECIPES}
    for name, fact in told.items():
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            shutil.copyfile(options.models / name / file, folder / file)
        (folder / "results.json").write_text(json.dumps(fact, indent=1) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card(name, told), encoding="utf-8")
        shipped.seal(folder, **{key: fact[key] for key in ("steps", "seed", "tokens", "commit", "command")})
    total = sum(path.stat().st_size for name in told for path in (options.out / name).iterdir())
    print(f"Wrote {', '.join(str(options.out / name) for name in told)}: {total / 1e6:.1f} MB together")


def facts(name: str, options: argparse.Namespace, index: dict) -> dict:
    """What is known of a model: how it was trained, on what, and what came out."""
    run = options.runs / RECIPES[name]
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
        result = json.loads((options.scored / name / f"{suite}.json").read_text())
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
            f"\nMean lam at the end, by layer: {', '.join(f'{x:.3f}' for x in own['lam'])}. Weight decay alone, "
            f"without any gradient, would have taken it from 0.010 to {own['lam_of_decay_alone']:.3f}.\n"
        )
    return CARD.read_text(encoding="utf-8").format(
        **own,
        what=WHAT[name]
        + (f"; q, k and v pass a convolution over {own['conv_size']} tokens" if own["conv_size"] else ""),
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
        niah=table(told, "niah", lambda s: f"{s['value']:.0f} [{s['interval'][0]:.0f}, {s['interval'][1]:.0f}]"),
        length=table(told, "length", lambda s: f"{s['value']:.2f}"),
    )


def table(told: dict[str, dict], suite: str, shown: Callable[[dict], str]) -> str:
    scores = {name: fact["evaluation"][suite]["scores"] for name, fact in told.items()}
    groups = [group for group in next(iter(scores.values())) if "/same/" not in group]
    lines = [f"| | {' | '.join(told)} |", "|---" * (len(told) + 1) + "|"]
    for group in groups:
        task, _, length = group.partition("/")
        lines.append(f"| {task}, {int(length):,} | {' | '.join(shown(scores[name][group]) for name in told)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
