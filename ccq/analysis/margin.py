"""Where does cleaning widen the margin between a needle and what surrounds it? Scores with and without it.

At the last token of a prompt, for each query head:

    score without    s_j = k_j . q            score with    s_j - lam k_j . y,  y = Sigma q: the paper's step
                                              projected     s_j - lam (q . y) / (y . y) k_j . y
    margin           mean of s over the needle minus mean over the distractors; or best minus best

q and k are of unit length, as the cleaning takes them. A model that does not clean, ours or any with softmax
attention, is measured as if it did, with a lam that is given. Both steps have the same lam and all keys alike in Sigma,
whichever the model has. Forgetting (decays, the delta rule) and the value side
are left out: this is what the read begins with.

T tokens, H query heads, Hk key heads, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ccq.analysis import AnalysisError
from ccq.analysis.capture import Read, run, watch
from ccq.analysis.command import begin, finish, make_parser, path_of
from ccq.analysis.prompts import Prompt, Tokens, each, make_prompts
from ccq.ops import correction
from ccq.ops.clean.reference import STEPS
from ccq.ops.precision import unit
from ccq.report.collect import Collection
from ccq.report.results import mean
from ccq.report.table import WORDS, Block, Table, analysis_row

READS = {"with": "scaled", "projected": "projected"}  # what results call a read, and its step


def scores(
    q: Float[Tensor, "T H K"], k: Float[Tensor, "T Hk K"], lam: Float[Tensor, " H"], centred: bool = True
) -> dict[str, Float[Tensor, "H T"]]:
    """Scores of all keys at the last token, "without" cleaning and by each of READS, in fp64."""
    qn, kn = unit(q.double()), unit(k.double())
    group = q.shape[1] // k.shape[1]
    y = correction(qn[None], kn[None], centred, "none")[0, -1]  # Sigma_T q_T [H, K]
    keys = kn.repeat_interleave(group, 1)
    queries = {"without": qn[-1]}
    queries |= {name: STEPS[step](qn[-1], y, lam.double()[:, None]) for name, step in READS.items()}
    return {name: torch.einsum("thk,hk->ht", keys, query) for name, query in queries.items()}


def margins(s: Float[Tensor, "H T"], needle: np.ndarray, distractor: np.ndarray) -> dict[str, np.ndarray]:
    """Of each head: mean and best margin, and the rank of the best needle key among the distractors (1: above all)."""
    s = s.cpu()
    ours, others = s[:, torch.from_numpy(needle)], s[:, torch.from_numpy(distractor)]
    best = ours.amax(1)
    rank = (1 + (others > best[:, None]).sum(1)).double()
    found = {"mean": ours.mean(1) - others.mean(1), "best": best - others.amax(1), "rank": rank}
    return {name: x.numpy() for name, x in found.items()}


def measure(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], lam: float | None = None, bos: bool = False
) -> dict[str, Any]:
    """Margins of each layer and head, means over the prompts; `lam` for a model that has none of its own."""
    found: dict[int, list[dict]] = {}
    tokens: Tokens

    def look(read: Read) -> None:
        if lam is not None:
            used = torch.full(read.q.shape[1:2], float(lam), device=read.q.device)
        elif read.lam is not None:
            used = read.lam[-1]
        else:
            raise AnalysisError("lam: the model has no cleaning; expected a lam to measure it with (--lam)")
        needle = tokens.groups["novel"] if tokens.groups["novel"].any() else tokens.groups["needle"]
        row = {"lam": used.double().cpu().numpy()}
        for name, s in scores(read.q, read.k, used, read.cleaner is None or read.cleaner.centred).items():
            row |= {f"{name} {what}": x for what, x in margins(s, needle, tokens.groups["distractor"]).items()}
        found.setdefault(read.layer, []).append(row)

    with watch(model, read=look):
        for tokens in each(prompts, tokenizer, bos):
            run(model, tokens.ids)
    if not found:
        raise AnalysisError(f"{type(model).__name__}: its attention does not go through AttentionInterface")
    layers = sorted(found)
    table: dict[str, list] = {
        name: [np.mean([row[name] for row in found[layer]], 0).round(6).tolist() for layer in layers]
        for name in found[layers[0]][0]
    }
    result: dict[str, Any] = {"layers": layers, "prompts": len(prompts), "own_lam": lam is None}
    for name, prefix in (("with", ""), ("projected", "projected_")):
        for what, wider in (("mean", "wider_cells"), ("best", "wider_cells_best")):
            shift = list(map(np.subtract, table[f"{name} {what}"], table[f"without {what}"]))
            cells = np.concatenate(shift)
            result |= {"cells": len(cells), f"{prefix}{wider}": int((cells > 0).sum())}
            result[f"{prefix}shift_{what}"] = [row.round(6).tolist() for row in shift]
    return result | {"table": table}


def own_prompt(text: str, needle: str) -> Prompt:
    """A prompt of the user's own, in which `needle` stands once."""
    if not needle or text.count(needle) != 1:
        raise AnalysisError(f"needle: expected a piece that occurs once in the prompt, got {needle!r}")
    begin = text.index(needle)
    span = (begin, begin + len(needle))
    return Prompt("own", text, needle, span, span, (), (len(text), len(text)))


def main(argv: Sequence[str]) -> int:
    parser = make_parser("margin", __doc__, variants=3)
    parser.add_argument("--prompt", help="your own prompt; its last token reads")
    parser.add_argument("--needle", help="the part of --prompt to find")
    parser.add_argument("--lam", type=float, help="lam from 0 to 1, instead of the model's own")
    arguments = parser.parse_args(argv)
    if arguments.lam is not None and not 0 <= arguments.lam <= 1:
        parser.error(f"--lam: expected a number from 0 to 1, got {arguments.lam}")
    if (arguments.prompt is None) != (arguments.needle is None):
        parser.error("--prompt, --needle: expected both or none")
    own = None if arguments.prompt is None else [own_prompt(arguments.prompt, arguments.needle)]
    prompts = own or make_prompts(arguments.variants, arguments.sentences)
    result, model, tokenizer = begin("margin", arguments)
    path_of(result, arguments.out)
    result |= {"lam": arguments.lam, **measure(model, tokenizer, prompts, arguments.lam, arguments.bos)}
    finish(result, arguments.out)
    for step, prefix in (("the paper's", ""), ("the projected", "projected_")):
        print(
            f"{step} step widens the mean margin in {result[f'{prefix}wider_cells']} of {result['cells']} cells (layer "
            f"and head), and the best against the best in {result[f'{prefix}wider_cells_best']}"
        )
    return 0


def tables(found: Collection) -> list[Table]:
    """Needle against distractors at the reading token, without and with cleaning: means over layers and heads."""
    rows = []
    for source in found.of("analysis", "margin"):
        content = source.content
        table = {name: mean(x for layer in layers for x in layer) for name, layers in content["table"].items()}
        values = [f"{table['lam']:.3f}, {'its own' if content['own_lam'] else 'given'}"]
        for what, digits in (("mean", 3), ("best", 3), ("rank", 1)):
            told = (f"{table[f'{name} {what}']:.{digits}f}".replace("-", "−") for name in ("without", *READS)
                    if f"{name} {what}" in table)  # fmt: skip
            values.append(" → ".join(told))
        values += [f"{content[name]} of {content['cells']}" for name in ("wider_cells", "wider_cells_best")]
        rows.append(analysis_row(source.title, [source], values, f"{content['prompts']} prompts"))
    if not rows:
        return []
    head = ["model", "lam", "mean less mean", "best less best", "rank of the needle",
            "heads with a larger mean margin", "the best's"]  # fmt: skip
    notes = [WORDS["margin"]]
    if any("projected mean" in source.content["table"] for source in found.of("analysis", "margin")):
        notes.append("A third number: with the projected step, the same lam.")
    title = "Margin of the needle over distractors (not in the paper)"
    return [Table("margin", title, head, [Block("", rows)], notes)]
