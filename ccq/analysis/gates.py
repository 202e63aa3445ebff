"""How much does a trained model clean, and when? Mean lam by layer and head, its course in training, and how far the
read turns the query: the angle between q and q_clean.

    text        ordinary text: a file, or our filler
    filler      the filler of needle prompts
    needle      the needle sentence
    question    the question at the end
    retrieval   where the answer's tokens are predicted: the last token of the question, and the answer but its last

Weight decay alone, without any gradient, carries sigmoid(bias) from 0.01 to almost a half over the paper's runs: a
curve of lam in training means something only beside the curve of pure decay.

T tokens, H heads.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ccq.analysis import AnalysisError
from ccq.analysis.capture import Read, run, watch
from ccq.analysis.command import describe, finish, load, make_parser, name_of
from ccq.analysis.intervene import cleaners
from ccq.analysis.prompts import Prompt, filler, make_prompts, tokenize
from ccq.files import read_text, stored
from ccq.systems import Identity
from ccq.train.config import read

PLACES = ("text", "filler", "needle", "question", "retrieval")


def measure(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], text: str, bos: bool = False, length: int = 2048
) -> dict:
    """Mean lam of every layer and head in each of PLACES, sigmoid of the gate's bias beside it; and of each layer the
    median and the 95% quantile of the angle between q and q_clean in degrees, over tokens and heads.

    Args:
        text: ordinary text, of which the first `length` tokens are read.
    """
    gates = cleaners(model)
    sums: dict = defaultdict(lambda: defaultdict(float))  # [place][layer]: [H]
    angles: dict = defaultdict(lambda: defaultdict(list))  # [place][layer]: degrees, one a token and head
    numbers: dict = defaultdict(int)
    places: dict[str, np.ndarray] = {}

    def read(read: Read) -> None:
        if read.lam is not None:
            assert read.cleaner is not None
            assert read.cleaner.angle is not None
            lam, angle = (x.double().cpu().numpy() for x in (read.lam, read.cleaner.angle[0]))
            for place, mask in places.items():
                sums[place][read.layer] += lam[mask].sum(0)
                angles[place][read.layer] += angle[mask].ravel().tolist()

    with watch(model, read=read), turning(gates):
        for ids, masks in [ordinary(tokenizer, text, bos, length), *(asked(p, tokenizer, bos) for p in prompts)]:
            places = masks
            for place, mask in masks.items():
                numbers[place] += int(mask.sum())
            run(model, ids)
    layers = sorted(sums["text"])
    return {
        "layers": layers,
        "tokens": dict(numbers),
        "lam": {place: [(sums[place][layer] / numbers[place]).tolist() for layer in layers] for place in PLACES},
        "angle": {
            place: dict(
                zip(
                    ("median", "high"),
                    np.array([np.quantile(angles[place][layer], (0.5, 0.95)) for layer in layers]).T.round(4).tolist(),
                    strict=True,
                )
            )
            for place in PLACES
        },
        "of_bias": [
            torch.sigmoid(gate.gate_bias.detach().double()).tolist() if gate.has_gate else None for gate in gates
        ],
        "gate_init": gates[0].gate_init if gates[0].has_gate else None,
    }


@contextlib.contextmanager
def turning(gates: list) -> Iterator[None]:
    """Have the cleaners keep by how much they turn each query."""
    for gate in gates:
        gate.record_angle = True
    try:
        yield
    finally:
        for gate in gates:
            gate.record_angle, gate.angle = False, None


def ordinary(tokenizer: Any, text: str, bos: bool, length: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    ids = list(tokenizer(text)["input_ids"])[:length]
    if bos and ids[:1] != [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    if not ids:
        raise AnalysisError("text: expected some text, the tokenizer makes no token of it")
    return np.array(ids), {"text": np.ones(len(ids), bool)}


def asked(prompt: Prompt, tokenizer: Any, bos: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A prompt and its answer, and where in them what happens."""
    tokens = tokenize(prompt, tokenizer, bos)
    answer = tokenizer(" " + prompt.answer, add_special_tokens=False)["input_ids"]
    ids = np.concatenate([tokens.ids, np.array(answer, dtype=np.int64)])
    retrieval = np.zeros(len(ids), bool)
    retrieval[len(tokens.ids) - 1 : -1] = True

    def before_answer(mask: np.ndarray) -> np.ndarray:
        return np.concatenate([mask, np.zeros(len(answer), bool)])

    return ids, {
        "filler": before_answer(tokens.groups["distractor"]),
        "needle": before_answer(tokens.groups["needle"]),
        "question": before_answer(tokens.question) & ~retrieval,
        "retrieval": retrieval,
    }


def course(run_folder: Path) -> dict:
    """lam over training from a run's log.jsonl: {"step", "lam" [steps][layers], "decay_alone" [steps] or None}.

    Lines without lam, and a last line that was cut off, are passed over. The curve of pure decay is the log's, or
    comes from the run's config.
    """
    path = run_folder / "log.jsonl" if run_folder.is_dir() else run_folder
    if stored(path) is None:
        raise AnalysisError(f"{path} is not there: expected the folder of a run of `ccq train`, or its log")
    steps, lam, alone = [], [], []
    for line in read_text(path).splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        values = row.get("lam") if isinstance(row, dict) else None
        if not values or not isinstance(row.get("step"), int):
            continue
        values = values if isinstance(values, list) else [values]
        steps.append(row["step"])
        lam.append(values)
        alone.append(row.get("lam_of_decay_alone"))
    if not steps:
        raise AnalysisError(f"{path} has no lam in it: expected the log of a model with cleaning")
    if len({len(row) for row in lam}) > 1:
        raise AnalysisError(f"{path} has lam of {sorted({len(row) for row in lam})} layers: expected one number")
    if any(x is None for x in alone):
        alone = decay_alone(path.parent / "config.json", steps)
    return {"step": steps, "lam": lam, "decay_alone": alone}


def decay_alone(config: Path, steps: list[int]) -> Any:
    """sigmoid(bias) after each of `steps` if no gradient reached it; None where the run's config is not there."""
    if not config.exists():
        return None
    from ccq.train.optimizer import pure_decay

    run = read(config)
    if run.init is not None:  # its gates began somewhere else
        return None
    curve = pure_decay(run)
    return [float(curve[min(step, len(curve) - 1)]) for step in steps]


def main(argv: Sequence[str]) -> int:
    parser = make_parser("gate", __doc__, variants=3, nargs="?")
    parser.add_argument("--text", type=Path, help="a file of ordinary text; by default our filler")
    parser.add_argument("--run", type=Path, help="folder of a run of `ccq train`: lam over its steps")
    arguments = parser.parse_args(argv)
    if arguments.model is None and arguments.run is None:
        parser.error("expected a MODEL, or a run with --run, or both")
    name = arguments.name or name_of(arguments.model or str(arguments.run))
    result: dict[str, Any] = {"kind": "gate"}
    if arguments.run is not None:
        result["training"] = course(arguments.run)
    if arguments.model is not None:
        prompts = make_prompts(arguments.variants, arguments.sentences)
        text = " ".join(filler()) if arguments.text is None else arguments.text.read_text()
        model, tokenizer = load(arguments)
        result |= describe(model, name)
        result |= measure(model, tokenizer, prompts, text, arguments.bos)
        result["settings"] = {
            "variants": arguments.variants,
            "sentences": arguments.sentences,
            "text": "filler" if arguments.text is None else arguments.text.name,
        }
    else:
        config = arguments.run / "config.json"  # the log by itself does not say what it is of
        identity = read(config).identity if config.exists() else Identity(name)
        result |= {"identity": asdict(identity), "model": {"name": name}}
    finish(result, arguments.out)
    if "lam" in result:
        for place in PLACES:
            lam = np.array(result["lam"][place])
            print(f"{place:<10} mean lam {lam.mean():.4f}, by layer {' '.join(f'{x:.3f}' for x in lam.mean(1))}")
        for place in ("text", "retrieval"):
            median, high = (" ".join(f"{x:.2f}" for x in result["angle"][place][name]) for name in ("median", "high"))
            print(f"{place:<10} angle between q and q_clean by layer, degrees: median {median}; 95% below {high}")
    return 0
