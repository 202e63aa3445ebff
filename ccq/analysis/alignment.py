"""Do needle keys lie off the directions in which keys vary most? The paper's diagnostic, on any causal LM.

For each key head, with k_t of unit length, mean m and Sigma their centred covariance over the prompt:

    a_t = |U^T (k_t - m)|^2 / |k_t - m|^2          U: the top eigenvectors of Sigma, 16 or an eighth of the head size
    gap = mean of a over a group of tokens - mean of a over the distractors

A negative gap is what the cleaning assumes. Keys without any structure have a = 16/K.

T tokens, Hk key heads, K head size.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ccq import tables as screen
from ccq.analysis import AnalysisError
from ccq.analysis.capture import POINTS, Projection, Read, run, watch
from ccq.analysis.command import begin, finish, make_parser, path_of
from ccq.analysis.prompts import GROUPS, Prompt, Tokens, each, make_prompts
from ccq.ops import sigma_q
from ccq.ops.precision import unit
from ccq.report.collect import Collection
from ccq.report.paper import load as papers
from ccq.report.table import Block, Cell, Row, Table, analysis_row, signed
from ccq.systems import Identity

TOP = 16
BINS = 40  # of the histograms, from 0 to 1
SPECTRUM = 64  # eigenvalues that are kept of a layer


def covariance(k: Float[Tensor, "T Hk K"]) -> tuple[Float[Tensor, "Hk K K"], Float[Tensor, "Hk K"]]:
    """Centred covariance (divided by T - 1) and mean of the keys of each head, in fp64."""
    k = k.double()
    mean = k.mean(0)
    x = k - mean
    return torch.einsum("thk,thl->hkl", x, x) / (k.shape[0] - 1), mean


def shares(
    k: Float[Tensor, "T Hk K"], sigma: Float[Tensor, "Hk K K"], mean: Float[Tensor, "Hk K"]
) -> tuple[Float[Tensor, "T Hk K"], Float[Tensor, "Hk K"]]:
    """a_t for every number of top directions from 1 to K, and the eigenvalues of sigma, the largest first.

    NaN where a key is the mean itself: it has no direction.
    """
    values, vectors = torch.linalg.eigh(sigma.double())
    x = k.double() - mean.double()
    energy = torch.einsum("thk,hkl->thl", x, vectors.flip(-1)).square()
    return energy.cumsum(-1) / x.square().sum(-1, keepdim=True), values.flip(-1)


def tops(size: int) -> dict[str, int]:
    """Numbers of top directions: the paper's, and one that is the same share of every head."""
    return {"16": min(TOP, size), "eighth": max(1, size // 8)}


@dataclass
class Point:
    """What was seen at one point of capture, over prompts and layers."""

    sizes: set[int] = field(default_factory=set)
    # [top][group][layer]: for each prompt the mean of each head
    level: dict = field(default_factory=lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(list))))
    counts: dict = field(default_factory=lambda: defaultdict(lambda: defaultdict(lambda: np.zeros(BINS, np.int64))))
    spectrum: dict = field(default_factory=lambda: defaultdict(list))  # [layer]: for each prompt [Hk, K]

    def add(
        self, layer: int, k: Float[Tensor, "T Hk K"], tokens: Tokens, sigma: Tensor | None = None, mean: Any = None
    ) -> None:
        if sigma is None:
            sigma, mean = covariance(k)
        share, values = shares(k, sigma, mean)
        self.sizes.add(k.shape[-1])
        self.spectrum[layer].append((values / values.sum(-1, keepdim=True)).cpu().numpy())
        for top, count in tops(k.shape[-1]).items():
            a = share[..., count - 1].cpu().numpy()
            for group, mask in tokens.groups.items():
                chosen = a[mask]
                known = np.isfinite(chosen)
                self.level[top][group][layer].append(_mean(chosen, 0))
                self.counts[top][group] += np.histogram(chosen[known].clip(0, 1), BINS, (0, 1))[0]


class Observer:
    """Reduces the keys of each layer as they come."""

    tokens: Tokens  # of the prompt that is run

    def __init__(self) -> None:
        self.points: dict[str, Point] = defaultdict(Point)

    def project(self, projection: Projection, k: Tensor) -> None:
        self.points["projection"].add(projection.layer, unit(k.double()), self.tokens)

    def read(self, read: Read) -> None:
        self.points["read"].add(read.layer, unit(read.k.double()), self.tokens)
        if read.lam is not None and read.cleaner is not None:
            own, q, k, decay = read.cleaner, read.q[None], read.k[None], read.log_decay
            how: Any = {"output_final_state": True, "backend": own.backend, "log_decay": decay}
            _, k_bar, state = sigma_q(q, k, own.centred, own.normalize, **how)
            assert state is not None
            centre = state.key_sum[0] / state.weight[0, :, None] * own.centred
            keys = k_bar[0] if own.normalize == "unit" else unit(k_bar[0])
            self.points["operator"].add(read.layer, keys, self.tokens, state.covariance(own.centred)[0], centre)


def measure(model: Any, tokenizer: Any, prompts: Sequence[Prompt], bos: bool = False) -> dict:
    """Run the prompts, one at a time, and return what the result file holds of them."""
    observer = Observer()
    rows = []
    with watch(model, observer.project, observer.read):
        for prompt, tokens in zip(prompts, each(prompts, tokenizer, bos), strict=True):
            observer.tokens = tokens
            run(model, tokens.ids)
            sizes = {name: int(mask.sum()) for name, mask in tokens.groups.items()}
            rows.append({"kind": prompt.kind, "answer": prompt.answer, "tokens": len(tokens.ids), "groups": sizes})
    if "projection" not in observer.points:
        raise AnalysisError(f"{type(model).__name__} ran without calling any of its key projections")
    points = {name: observer.points[name] for name in POINTS if name in observer.points}
    told = {name: {"what": POINTS[name], **summary(point)} for name, point in points.items()}
    return {"prompts": rows, "groups": GROUPS, "points": told}


def untrained(model: Any, seed: int = 0) -> Any:
    """A model of the same config with fresh weights: the control for all that training could have put into keys."""
    like = next(model.parameters())
    torch.manual_seed(seed)
    return type(model)(model.config).to(like.device, like.dtype).eval()


def summary(point: Point) -> dict:
    """Numbers of one point: by layer, by head, pooled."""
    sizes = sorted(point.sizes)
    found: dict[str, Any] = {"head_sizes": sizes, "layers": sorted(point.spectrum), "top": {}}
    for top, level in point.level.items():
        directions = [tops(size)[top] for size in sizes]
        isotropic = [count / size for count, size in zip(directions, sizes, strict=True)]
        part: dict[str, Any] = {
            "directions": directions,
            "of_isotropic_keys": isotropic[0] if len(isotropic) == 1 else isotropic,
            "distractor": {"by_layer": rounded([_mean(heads) for _, heads in sorted(level["distractor"].items())])},
        }
        part |= {group: gaps(level[group], level["distractor"]) for group in GROUPS if group != "distractor"}
        part["novel minus planted"] = gaps(level["novel"], level["planted"])
        part["histogram"] = {group: counts.tolist() for group, counts in point.counts[top].items()}
        found["top"][top] = part
    spectra = [np.concatenate(values).mean(0)[:SPECTRUM] for _, values in sorted(point.spectrum.items())]
    found["spectrum"] = {"by_layer": rounded(spectra)}  # shares of the trace, over prompts and heads
    return found


def gaps(group: dict[int, list[np.ndarray]], other: dict[int, list[np.ndarray]]) -> dict:
    """mean over `group` minus mean over `other`, of each prompt and head, and what becomes of that."""
    by_layer = [np.stack(group[layer]) - np.stack(other[layer]) for layer in sorted(group)]  # [prompts, Hk] each
    by_head = [_mean(gap, 0) for gap in by_layer]
    by_prompt = np.stack([_mean(gap, 1) for gap in by_layer])  # [layers, prompts]
    layer_means = _mean(by_prompt, 1)
    spread, error = np.array([deviation(row) for row in by_prompt]).T
    cells = np.concatenate(by_head)
    cells = cells[np.isfinite(cells)]
    return {
        "mean": rounded(_mean(layer_means)),
        "error_of_mean": rounded(deviation(_mean(by_prompt, 0))[1]),  # of each prompt, over layers
        "negative_layers": int((layer_means < 0).sum()),
        "clearly_negative_layers": int((layer_means < -2 * error).sum()),
        "clearly_positive_layers": int((layer_means > 2 * error).sum()),
        "negative_cells": int((cells < 0).sum()),
        "cells": len(cells),
        "thirds": rounded([_mean(part) for part in np.array_split(layer_means, 3)]),
        "by_layer": rounded(layer_means),
        "deviation_by_layer": rounded(spread),  # between prompts
        "by_head": rounded(by_head),
    }


def deviation(x: np.ndarray) -> tuple[float, float]:
    """Of the known values their deviation and the error of their mean; NaN below two."""
    known = x[np.isfinite(x)]
    spread = float(known.std(ddof=1)) if len(known) > 1 else np.nan
    return spread, spread / max(len(known), 1) ** 0.5


def _mean(x: Any, axis: int | None = None) -> Any:
    """The mean of what is known; NaN where nothing is, of which NumPy's would warn."""
    return torch.as_tensor(np.asarray(x, dtype=np.float64)).nanmean(axis).numpy()


def rounded(x: Any) -> Any:
    """Six digits are more than a prompt's noise; what is not known is null."""
    if isinstance(x, list) or np.ndim(x):
        return [rounded(part) for part in x]
    return round(float(x), 6) if np.isfinite(x) else None


def main(argv: Sequence[str]) -> int:
    parser = make_parser("alignment", __doc__, variants=4)
    parser.add_argument("--untrained", action="store_true", help="use random weights: a gap without learning")
    parser.add_argument("--figures", type=Path, help="folder for the figures (default: --out)")
    arguments = parser.parse_args(argv)
    prompts = make_prompts(arguments.variants, arguments.sentences)
    result, model, tokenizer = begin("alignment", arguments)
    if arguments.untrained:
        model = untrained(model)
        result["identity"] = asdict(Identity(**result["identity"]).varied("untrained"))
        result["model"]["name"] = arguments.name or f"{result['model']['name']}, untrained"
    path_of(result, arguments.out)
    start = time.perf_counter()
    result |= measure(model, tokenizer, prompts, arguments.bos)
    settings = ("variants", "sentences", "bos", "untrained")
    result["settings"] = {name: getattr(arguments, name) for name in settings}
    result["seconds"] = round(time.perf_counter() - start, 1)
    finish(result, arguments.out, arguments.figures)
    show(result)
    return 0


def show(result: dict) -> None:
    rows = []
    for point, content in result["points"].items():
        for part in content["top"].values():
            for group in ("unique", "needle", "novel", "planted", "near", "rare", "novel minus planted"):
                row = part[group]
                if row["mean"] is not None:
                    thirds = " ".join("     -" if x is None else f"{x:+.3f}" for x in row["thirds"])
                    layers = f"{row['negative_layers']} of {len(row['by_layer'])}"
                    top = "/".join(map(str, part["directions"]))
                    rows.append((point, group, top, f"{row['mean']:+.3f}", layers, thirds))
    columns = ("keys", "tokens", "top", "mean gap", "negative layers", "by thirds of depth")
    screen.show(columns, rows, f"gap of alignment: {result['model']['name']}", left=2, width=100)


def shown(value: float | None) -> str:
    """A model of two layers has no middle third, and a short prompt may lack a group of tokens."""
    return "–" if value is None else signed(value, 3)


def tables(found: Collection) -> list[Table]:
    """The gap in the top 16 directions, the paper's models and every model measured here; and what is asked for beside
    what is planted, near or rare: is it more than rarity?"""
    theirs, ours, controls = [], [], []
    for fact in (papers().facts["gap_qwen3"], papers().facts["gap_gated_deltanet"]):
        layers = f"{fact.layers} of {fact.layers}"
        told = ("projection", f"{16 / fact.key_size:.2f}", str(fact), layers, "–", "–")
        theirs.append(Row(Cell(fact.model), [Cell(x, kind="paper", hover=fact.where) for x in told], "paper"))
    sources = found.of("analysis", "alignment")
    for source, point, tops_of in ((s, name, x["top"]) for s in sources for name, x in s.content["points"].items()):
        part = tops_of["16"]
        row, shares = part["unique"], part["of_isotropic_keys"]  # several where heads differ in size
        isotropic = ", ".join(f"{share:.2f}" for share in (shares if isinstance(shares, list) else [shares]))
        negative, thirds = f"{row['negative_layers']} of {len(row['by_layer'])}", ", ".join(map(shown, row["thirds"]))
        values = (point, isotropic, shown(row["mean"]), negative, thirds, shown(part["needle"]["mean"]))
        ours.append(analysis_row(source.title, [source], values))
        for part in {tuple(part["directions"]): part for part in tops_of.values()}.values():  # 16 may be an eighth
            if beyond := part.get("novel minus planted"):
                error = "" if beyond["error_of_mean"] is None else f" ± {beyond['error_of_mean']:.3f}"
                clear = f"{beyond['clearly_negative_layers']}, {beyond['clearly_positive_layers']}"
                novel, planted, near, rare = (shown(part[x]["mean"]) for x in ("novel", "planted", "near", "rare"))
                difference, layers = shown(beyond["mean"]) + error, f"{clear} of {len(beyond['by_layer'])}"
                of_part = (point, str(part["directions"][0]), novel, planted, difference, layers, near, rare)
                controls.append(analysis_row(source.title, [source], of_part))
    head = ["model", "keys", "16/K", "gap", "negative layers", "gap by thirds of depth", "all needle tokens"]
    caption = "Alignment gap: unique needle tokens minus filler"
    gap = Table("gap", caption, head, [Block("The paper, its own prompts", theirs), Block("Here", ours)])
    head = ["model", "keys", "top", "new thing, asked for", "planted, not asked for", "difference",
            "layers clearly below, above zero", "filler around the needle", "rare filler"]  # fmt: skip
    control = Table("control", "Alignment gap and its controls", head, [Block("", controls)])
    return [*([gap] if ours else []), *([control] if controls else [])]
