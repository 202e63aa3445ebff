"""How much does a trained model clean, and when? Mean lam by layer and head, and the angle between q and q_clean.

    text        ordinary text: a file, or our filler
    filler      the filler of needle prompts
    needle      the needle sentence
    question    the question at the end
    retrieval   where the answer's tokens are predicted: the last token of the question, and the answer but its last

T tokens, H heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ccq.analysis import AnalysisError
from ccq.analysis.capture import Read, run, watch
from ccq.analysis.command import begin, finish, make_parser, path_of
from ccq.analysis.intervene import cleaners
from ccq.analysis.prompts import Prompt, filler, make_prompts, tokenize, with_bos
from ccq.files import read_text

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
    ordinary = with_bos(list(tokenizer(text)["input_ids"])[:length], tokenizer, bos)
    if not ordinary:
        raise AnalysisError("text: expected some text, the tokenizer makes no token of it")
    everything = [(np.array(ordinary), {"text": np.ones(len(ordinary), bool)})]
    everything += [asked(prompt, tokenizer, bos) for prompt in prompts]
    seen: dict = defaultdict(lambda: defaultdict(list))  # [place][layer]: of each prompt lam and angle [2, tokens, H]
    places: dict[str, np.ndarray] = {}

    def look(read: Read) -> None:
        if read.lam is not None and read.cleaner is not None and read.cleaner.angle is not None:
            both = torch.stack([read.lam.double(), read.cleaner.angle[0].double()]).cpu().numpy()
            for place, mask in places.items():
                seen[place][read.layer].append(both[:, mask])

    for gate in gates:
        gate.record_angle = True
    try:
        with watch(model, read=look):
            for ids, places in everything:  # noqa: B007  (`look` reads it)
                run(model, ids)
    finally:
        for gate in gates:
            gate.record_angle, gate.angle = False, None
    layers = sorted(seen["text"])
    result: dict[str, Any] = {"layers": layers, "tokens": {}, "lam": {}, "angle": {}}
    for place in PLACES:
        found = [np.concatenate(seen[place][layer], 1) for layer in layers]
        median, high = np.array([np.quantile(angle, (0.5, 0.95)) for _, angle in found]).T.round(4).tolist()
        result["tokens"][place] = found[0].shape[1]
        result["lam"][place] = [lam.mean(0).tolist() for lam, _ in found]
        result["angle"][place] = {"median": median, "high": high}
    biases = [gate.gate_bias.detach().double() if gate.has_gate else None for gate in gates]
    result["of_bias"] = [None if bias is None else torch.sigmoid(bias).tolist() for bias in biases]
    return result | {"gate_init": gates[0].gate_init if gates[0].has_gate else None}


def asked(prompt: Prompt, tokenizer: Any, bos: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A prompt and its answer, and where in them what happens."""
    tokens = tokenize(prompt, tokenizer, bos)
    answer = tokenizer(" " + prompt.answer, add_special_tokens=False)["input_ids"]
    ids = np.concatenate([tokens.ids, np.array(answer, dtype=np.int64)])
    masks = {"filler": tokens.groups["distractor"], "needle": tokens.groups["needle"], "question": tokens.question}
    places = {place: np.append(mask, np.zeros(len(answer), bool)) for place, mask in masks.items()}
    retrieval = np.zeros(len(ids), bool)
    retrieval[len(tokens.ids) - 1 : -1] = True
    return ids, places | {"question": places["question"] & ~retrieval, "retrieval": retrieval}


def main(argv: Sequence[str]) -> int:
    parser = make_parser("gate", __doc__, variants=3)
    parser.add_argument("--text", type=Path, help="a file of ordinary text; by default our filler")
    arguments = parser.parse_args(argv)
    prompts = make_prompts(arguments.variants, arguments.sentences)
    text = " ".join(filler()) if arguments.text is None else read_text(arguments.text, "replace")
    result, model, tokenizer = begin("gate", arguments)
    path_of(result, arguments.out)
    result |= measure(model, tokenizer, prompts, text, arguments.bos)
    told = {"text": "filler" if arguments.text is None else arguments.text.name}
    result["settings"] = {"variants": arguments.variants, "sentences": arguments.sentences} | told
    finish(result, arguments.out)
    for place in PLACES:
        lam = np.array(result["lam"][place])
        print(f"{place:<10} mean lam {lam.mean():.4f}, by layer {' '.join(f'{x:.3f}' for x in lam.mean(1))}")
    for place in ("text", "retrieval"):
        median, high = (" ".join(f"{x:.2f}" for x in result["angle"][place][name]) for name in ("median", "high"))
        print(f"{place:<10} angle between q and q_clean by layer, degrees: median {median}; 95% below {high}")
    return 0
