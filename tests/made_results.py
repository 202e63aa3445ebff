"""Results in the formats that `ccq train`, `ccq eval`, `ccq analyze` and `ccq bench` write, with numbers made here."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from ccq import shipped
from ccq.evaluate import harness, longbench
from ccq.evaluate.results import write_rows
from ccq.evaluate.statistics import average, summary
from ccq.files import write_json
from ccq.systems import OFF, SIZES, UNCHANGED, Identity, recipe_name

BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "results"
SYSTEMS = ("transformer", "gla", "gla-unit", "gated-deltanet", "ccq-gla", "ccq-gated-deltanet")


def origin(commit="1" * 40, ccq="0.1.0", dirty=False):
    versions = {"ccq": ccq, "python": "3.11.7", "torch": "2.11.0"}
    return {"command": "ccq eval model --suite niah", "commit": commit, "dirty": dirty, "gpu": "NVIDIA H200",
            "date": "2026-11-14T10:00:00+00:00", "versions": versions}  # fmt: skip


def identity(name: str, folder: Path | None = None) -> dict:
    """That of <system>-<size>[-seed<n>][-repeat<m>], of the run that `folder` lies in, or of a foreign model."""
    from ccq.train.config import read

    name, _, lam = name.partition(", lam ")
    run = next((part for part in (folder.parents if folder else ()) if (part / "config.json").exists()), None)
    words = re.fullmatch(rf"(.+)[-_]({'|'.join(SIZES)})(?:[-_]seed(\d+))?(?:[-_]repeat(\d*))?", name)
    if name in shipped.names():
        made = Identity(**json.loads((shipped.root() / name / "config.json").read_text())["identity"])
    elif words:
        seed = None if words[3] is None else int(words[3])
        made = Identity(words[1].replace("_", "-"), "", words[2], seed, 0 if words[4] is None else int(words[4] or 1))
    else:
        made = read(run / "config.json").identity if run else Identity(name)
    return asdict(made.varied({"": "", "off": OFF, "none": UNCHANGED}[lam]))


def named(name: str) -> dict:
    """What an analysis says of its model."""
    return {"identity": identity(name), "model": {"name": name}}


def evaluation(
    folder: Path, suite: str, groups: dict[str, tuple[float, str]], name: str, n: int = 20, **changes
) -> dict:
    """OUT/SUITE.json and .jsonl whose scores are near those asked for; `groups`: {group: (value, aggregate)}."""
    rng = random.Random(f"{folder.name} {suite}")
    rows, scores = [], {}
    for group, (value, aggregate) in groups.items():
        if aggregate == "mean":
            right = round(value / 100 * n)
            mine = [{"id": f"{group}/{i}", "group": group, "score": int(i < right)} for i in range(n)]
        else:
            mine = [
                {
                    "id": f"{group}/{i}",
                    "group": group,
                    "score": 100 * np.log(value) * rng.uniform(0.9, 1.1),
                    "weight": 100,
                }
                for i in range(n)
            ]
        rows += mine
        scores[group] = summary(mine, aggregate)
    for group, score in scores.items():
        if suite == "length" and "/same/" not in group:
            score |= {"windows": score["n"], "few": score["n"] < 20}
    whole = {"lm": harness.AVERAGE, "mqar": tuple(groups)}.get(suite, ())
    if whole and set(whole) <= groups.keys():
        scores["average"] = average({g: [r for r in rows if r["group"] == g] for g in whole})
    if suite == "longbench":
        scores["average/8192"] = average({g: [r for r in rows if r["group"] == g] for g in groups})
    content = {
        "suite": suite, "finished": True, "limit": None, "quick_look": False, "scores": scores,
        "samples": {"hash": f"hash of {suite}", "count": len(rows), "requests": len(rows)}, "settings": {}, "notes": [],
        "identity": identity(name, folder),
        "model": {"name": name, "hash": "0" * 64, "dtype": "bfloat16", "lam": "off" if "lam off" in name else None},
        "tokenizer": {"hash": None}, "seconds": 1.0,
        **origin(),
    }  # fmt: skip
    content |= changes
    write_rows(folder / f"{suite}.jsonl", rows)
    write_json(folder / f"{suite}.json", content)
    return content


def trials(
    root: Path, suite: str, scores: dict[str, dict], seeds=(0, 1, 2), size: str = "nano", variant: str = "", **changes
) -> None:
    """An evaluation of each system and seed; `scores`: {system: groups}."""
    for system, groups in scores.items():
        for name in (f"{system}-{size}-seed{seed}" for seed in seeds):
            told = identity(name) | {"variant": variant}
            evaluation(root / f"{name} {variant}".strip(), suite, groups, name, identity=told, **changes)


def rows_in(name: str) -> list[dict]:
    """Of a committed benchmark."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text())["rows"]


def suites(quality: float) -> dict[str, dict[str, tuple[float, str]]]:
    """Scores of every suite; `quality` from 0 to 1."""
    found: dict = {"lm": {}, "niah": {}, "length": {}, "longbench": {}, "mqar": {}}
    for name in (*harness.AVERAGE, "lambada_openai"):
        found["lm"][name] = (30 + 20 * quality, "mean")
    found["lm"]["lambada_openai/perplexity"] = (40 - 10 * quality, "perplexity")
    for length in (4096, 8192):
        found["lm"][f"wikitext/{length}/word_perplexity"] = (40 - 8 * quality - length / 4096, "perplexity")
    for task in (1, 2, 3):
        for length in (1024, 2048, 4096, 8192):
            found["niah"][f"niah_single_{task}/{length}"] = (max(0, 100 * quality - 4 * task * length / 1024), "mean")
    for corpus in ("govreport", "code"):
        for length in (4096, 12288, 20480):
            value = 30 - 8 * quality + (1.2 - quality) * length / 4096
            found["length"][f"{corpus}/{length}"] = (value, "perplexity")
    for task in longbench.PAPERS:
        found["longbench"][f"{task}/8192"] = (5 + 10 * quality, "mean")
    for length, pairs in ((64, 4), (128, 32), (256, 64)):
        found["mqar"][f"{length}-{pairs}"] = (max(0, 100 * quality - pairs / 4), "mean")
    return found


def quality_of(system: str, seed: int) -> float:
    base = {"transformer": 0.5, "gla": 0.4, "gla-unit": 0.55, "gated-deltanet": 0.7,
            "ccq-gla": 0.75, "ccq-gated-deltanet": 0.7}[system]  # fmt: skip
    return base + 0.02 * (seed if system.startswith("ccq") else -seed)


def training_run(folder: Path, recipe_name: str, seed: int, logged: int, steps: int = 600) -> None:
    """The folder of a run that got as far as `logged`."""
    from ccq.recipes import recipe
    from ccq.train.config import identified, to_json

    config = recipe(recipe_name)
    config.seed, config.steps = seed, steps
    config = identified(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))
    (folder / "data.json").write_text(json.dumps({"path": None, "valid_path": None}))
    with (folder / "log.jsonl").open("w") as file:
        for step in range(10, logged + 1, 10):
            record = {"step": step, "loss": 5 * 0.99**step + 0.1 * seed, "lr": 1e-3, "tokens_per_second": 1e4}
            if config.model.clean:
                record |= {"lam": [0.01 + step / 6000, 0.02 + step / 3000], "lam_of_decay_alone": 0.01 + step / 12000}
            file.write(json.dumps(record) + "\n")
            if step % 100 == 0:
                file.write(json.dumps({"step": step, "valid_loss": 1.0, "valid_accuracy": step / steps}) + "\n")


def text_run(
    folder: Path, recipe_name: str, seed: int, perplexity: float, lr: float = 2e-3, steps: int = 600, **told
) -> None:
    """The folder of a finished run on text; `told` is of its identity."""
    from ccq.recipes import recipe
    from ccq.train.config import identified, to_json

    config = recipe(recipe_name)
    config.seed, config.steps, config.optimizer.lr = seed, steps, lr
    config.identity = replace(config.identity, **told)
    config = identified(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))
    (folder / "provenance.json").write_text(json.dumps([{"step": 0, **origin(), "command": "ccq train"}]))
    rows = [{"step": steps // 2, "valid_perplexity": 2 * perplexity}, {"step": steps, "valid_perplexity": perplexity}]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def alignment(path: Path, name: str, untrained: bool = False) -> dict:
    """The real summary of made-up keys: the needle stands off the one direction in which the others vary."""
    from ccq.analysis.alignment import Point, summary
    from ccq.analysis.prompts import GROUPS
    from ccq.ops.precision import unit

    rng = torch.Generator().manual_seed(0)
    point = Point()
    groups = {group: np.zeros(60, bool) for group in GROUPS}
    groups["distractor"][:40] = True
    for group in GROUPS:
        if group != "distractor":
            groups[group][50:56] = True
    for _ in range(3):
        for layer in range(4):
            k = torch.randn(60, 2, 32, generator=rng, dtype=torch.float64)
            k[:40, :, :4] *= 4
            point.add(layer, unit(k), SimpleNamespace(groups=groups))
    content = {"kind": "alignment", "identity": identity(name, path),
               "model": {"name": name, "class": "LlamaForCausalLM", "parameters": 1000},
               "points": {"projection": {"what": "at the projection", **summary(point)}}, "prompts": [{}] * 3,
               "settings": {"untrained": untrained}, "provenance": origin()}  # fmt: skip
    write_json(path, content)
    return content


def margin(path: Path) -> dict:
    """Two layers of two heads."""
    table = {"lam": [[0.5, 0.5], [0.5, 0.5]]}
    for name, shift in (("without", 0.0), ("with", 0.1)):
        table |= {f"{name} mean": [[0.1 + shift, 0.2], [0.3, 0.4]], f"{name} best": [[-0.5 + shift, 0.1], [0.1, 0.1]],
                  f"{name} rank": [[9.0 - 50 * shift, 2.0], [1.0, 1.0]]}  # fmt: skip
    content = {"kind": "margin", "identity": identity("ccq-gla-nano-seed0"),
               "model": {"name": "ccq-gla-nano-seed0"}, "lam": None, "layers": [0, 1], "prompts": 3,
               "own_lam": True, "cells": 4, "wider_cells": 1, "wider_cells_best": 1, "table": table,
               "provenance": origin()}  # fmt: skip
    write_json(path, content)
    return content


RECALL = {"gla": 0.6, "gla_unit": 0.7, "gla_unit_equal_state": 0.72, "ccq_gla": 0.72, "ccq_gla_open": 0.8,
          "gated_deltanet": 0.9, "ccq_gated_deltanet": 0.9, "transformer": 0.99}  # fmt: skip
SLICES = ((64, 4, 50), (128, 32, 50), (1024, 256, 50))


def recall_run(row: str, lr: float, seed: int, steps: int, repeat: int = 0, size: str = "mqar") -> dict:
    """A run as `ccq sweep` writes it; the middle rate is the best."""
    import dataclasses

    from ccq.recipes import recipe
    from ccq.train.config import identified
    from ccq.train.recall import scores_of

    config = recipe(recipe_name(row, size))
    config.seed, config.steps = seed, steps
    rng = np.random.default_rng([seed, repeat, len(row)])
    quality = RECALL[row] - {1e-3: 0.2, 3.16e-3: 0.0, 1e-2: 0.1}[lr] + 0.01 * seed * (-1 if "ccq" in row else 1)
    right = [rng.binomial(pairs, quality, size=n) for _, pairs, n in SLICES]
    asked = [pairs * n for _, pairs, n in SLICES]
    ends = list(range(steps // 4, steps + 1, steps // 4))
    gate = {"step": ends, "lam": [[0.01 * (n + 1), 0.02 * (n + 1)] for n in range(4)],
            "of_decay_alone": [0.01, 0.012, 0.015, 0.02]} if config.model.clean else None  # fmt: skip
    return {
        "name": f"{row}-{size}-lr{lr:.2e}-seed{seed}-steps{steps}-r{repeat}", "row": row, "size": size,
        "identity": asdict(replace(identified(config).identity, repeat=repeat)),
        "lr": lr, "seed": seed, "repeat": repeat, "steps": steps, "tokens": 256 * 128 * steps, "skipped": 0,
        "parameters": {"body": 100_000, "embeddings": 1_048_576}, "state_bytes": 8192 + 4096 * bool(gate),
        "covariance_bytes": 4096 * bool(gate), "model": dataclasses.asdict(config.model),
        "valid": {"accuracy": quality, "slices": []}, "test": scores_of(SLICES, right, asked),
        "curve": {"step": ends, "loss": [5.0, 3.0, 2.0, 1.0], "valid_step": [0, *ends],
                  "valid_accuracy": [0.0, *(quality * (n + 1) / 4 for n in range(4))], "valid_by_slice": []},
        "gate": gate, "commit": "1" * 40, "dirty": False, "date": "2026-11-14",
    }  # fmt: skip


def sweep(path: Path, runs: list[dict], tier: str, missing: tuple[str, ...] = ()) -> None:
    write_json(path, {"kind": "mqar_sweep", "tier": tier, "size": "mqar", "protocol": {}, "provenance": origin(),
                      "chosen": {}, "failed": [], "missing": list(missing), "runs": runs})  # fmt: skip


def make_everything(root: Path) -> None:
    """Results of every kind: six systems, three seeds of all but one."""
    for system in SYSTEMS:
        for seed in (0,) if system == "transformer" else (0, 1, 2):
            for suite, groups in suites(quality_of(system, seed)).items():
                evaluation(root / f"{system}-nano-seed{seed}", suite, groups, f"{system}-nano-seed{seed}")
    training_run(root / "runs" / "gla_tiny", "gla_tiny", 0, 600)
    training_run(root / "runs" / "ccq_gla_tiny", "ccq_gla_tiny", 0, 600)
    alignment(root / "analysis" / "alignment_smollm.json", "SmolLM2-135M")
    write_json(root / "analysis" / "gate_x.json", {
        "kind": "gate", "identity": identity("ccq-gla-nano-seed0"),
        "model": {"name": "ccq-gla-nano-seed0"}, "layers": [0, 1],
        "lam": {place: [[0.1, 0.2], [0.3, value]] for place, value in
                (("text", 0.2), ("filler", 0.2), ("needle", 0.3), ("question", 0.3), ("retrieval", 0.6))},
        "provenance": origin(),
    })  # fmt: skip
    rows = [{"intervention": name, "suites": {"niah": {"niah_single_1/4096": value, "niah_single_1/8192": value}}}
            for name, value in (("none", 50.0), ("off", 47.0))]  # fmt: skip
    write_json(root / "analysis" / "intervene.json",
               {"kind": "intervene", "identity": identity("ccq-gated-deltanet-nano"),
                "model": {"name": "ccq-gated-deltanet-nano"}, "rows": rows,
                "provenance": origin()})  # fmt: skip
    trained = []
    for system in ("gla", "gla-unit", "ccq-gla", "gated-deltanet", "ccq-gated-deltanet", "transformer"):
        for length in (2048, 4096, 8192):
            rate = {"gla": 48e3, "gla-unit": 48e3, "ccq-gla": 46e3}.get(system, 45e3)
            trained.append({"system": system, "size": "1.3b", "length": length, "tokens": 32768, "dtype": "bf16",
                            "step_ms": {"median": 1.0, "low": 1.0, "high": 1.0}, "tokens_per_second": rate,
                            "peak_gib": 60.0, "mfu": 0.4})  # fmt: skip
    write_json(root / "bench" / "train_h200.json", {**origin(), "bench": "train", "note": None, "rows": trained})
    for name in ("decode_h200", "decode_op_h200", "layer_h200", "op_h200", "prefill_h200", "operator_cpu",
                 "data_prepare"):  # fmt: skip
        shutil.copy(BENCHMARKS / f"{name}.json", root / "bench" / f"{name}.json")
    margin(root / "analysis" / "margin.json")
    for seed in (0, 1, 2):
        text_run(root / "runs" / f"gla_unit_pico_seed{seed}", "gla_unit_pico", seed, 30.0 + seed)
        text_run(root / "runs" / f"ccq_gla_pico_seed{seed}", "ccq_gla_pico", seed, 29.0 + 1.1 * seed)
    text_run(root / "runs" / "ccq_gla_pico_seed0_repeat1", "ccq_gla_pico", 0, 29.2, repeat=1)
    text_run(root / "runs" / "sweep" / "ccq_gla_pico_seed9", "ccq_gla_pico", 9, 99.0, lr=4e-3, steps=60)
    rates = (1e-3, 3.16e-3, 1e-2)
    first = [recall_run(row, lr, 0, 2000) for row in RECALL for lr in rates]
    sweep(root / "mqar_rows.json", [*first, *(recall_run("ccq_gla", rates[1], 0, 2000, n) for n in (1, 2))], "rows")
    main = ("gla", "gla_unit", "ccq_gla", "ccq_gla_open", "gated_deltanet", "ccq_gated_deltanet")
    sweep(root / "mqar_seeds.json", [recall_run(row, rates[1], seed, 10_000) for row in main for seed in (1, 2, 3)],
          "seeds")  # fmt: skip
