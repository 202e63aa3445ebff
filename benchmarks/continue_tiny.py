"""Is a trained GLA better with cleaning put into it, after as much further training as without?

    python benchmarks/continue_tiny.py            # minutes on a CPU; writes benchmarks/study/continue_tiny.json
    python benchmarks/continue_tiny.py --quick    # a few steps of one seed, writes nothing: does the script work?

GLA is trained on recall at size tiny, exported, and trained on from there: as it is, with cleaning put in by
`ccq convert --clean`, and of that the gates alone. All three take the same further batches.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from ccq import cli
from ccq.files import write_json
from ccq.provenance import provenance

FIRST, THEN = 600, 400  # steps
SEEDS = (0, 1, 2)
ROWS = {"gla": ("model", []), "ccq-gla": ("cleaned", []), "gates alone": ("cleaned", ["--train", "cleaner"])}
RUNTIME = ["--runtime.device", "cpu", "--runtime.no-tensorboard", "--runtime.validate-every", "100000"]


def ccq(*arguments: str) -> None:
    code = cli.main(arguments)
    if code:
        raise SystemExit(code)


def measured(run: Path) -> dict[str, float]:
    """Validation after the last step."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    last = [row for row in rows if "valid_loss" in row][-1]
    return {name: last[name] for name in ("valid_loss", "valid_accuracy")}


def one_seed(folder: Path, seed: int, first: int, then: int) -> dict[str, dict[str, float]]:
    ccq("train", "gla_tiny", "--run-dir", f"{folder}/first", "--steps", f"{first}", "--seed", f"{seed}", *RUNTIME)
    ccq("export", f"{folder}/first", f"{folder}/model")
    ccq("convert", f"{folder}/model", f"{folder}/cleaned", "--clean")
    found = {"begun": measured(folder / "first")}
    for row, (init, more) in ROWS.items():
        run = folder / row.replace(" ", "-")
        further = ["--steps", f"{then}", "--seed", f"{1000 + seed}", "--optimizer.lr", "3e-3", *more, *RUNTIME]
        ccq("train", "gla_tiny", "--init", f"{folder}/{init}", "--run-dir", f"{run}", *further)
        found[row] = measured(run)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)  # for tensors so small
    with tempfile.TemporaryDirectory() as folder:
        found = {
            str(seed): one_seed(Path(folder) / str(seed), seed, *((3, 2) if quick else (FIRST, THEN)))
            for seed in (SEEDS[:1] if quick else SEEDS)
        }
    for seed, rows in found.items():
        print(f"seed {seed}: " + ", ".join(f"{row} {x['valid_loss']:.4f}" for row, x in rows.items()))
    if not quick:
        write_json(
            Path(__file__).parent / "study" / "continue_tiny.json",
            {"steps": [FIRST, THEN], "seeds": found, **provenance()},
        )


if __name__ == "__main__":
    main()
