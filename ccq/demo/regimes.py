"""What cleaning does to one read, in the regime it is made for and in two in which it cannot help.

Nothing is trained. A memory of unit keys is drawn around two dominant directions u1 (most keys) and u2 (some) and a
common mean; one key, the needle, is what the query looks for. Only the geometry differs between the regimes:

    off       the needle lies off u1 and u2, the query overlaps with u1: distractors score high until they are cleaned
    inside    the needle is u1 itself, the query overlaps with u2: cleaning takes more from the needle than from them
    disjoint  the query overlaps with neither: there is nothing to clean

The paper's step and the projected one, q - lam (q . y) / (y . y) y with y = Sigma q, are shown beside each other.

For Sigma = rho u u^T the paper's step moves the margin (needle minus a distractor) by lam * rho * (b - a) * (u . q),
with a and b the overlaps of needle and distractor with u: positive, negative and zero in turn.

R regimes, T stored keys, L values of lam, K key size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

import ccq
from ccq import tables
from ccq.files import read_toml

T, K = 512, 64
NEEDLE = 170  # where the needle is stored
SHARES = (0.7, 0.2)  # of the keys around u1 and u2; the rest point anywhere
MEAN, NOISE = 0.4, 0.25  # lengths, beside a dominant direction of length 1
LAM = [i / 20 for i in range(21)]
STEPS = {"scaled": "the paper's step: q - lam y, y = Sigma q",
         "projected": "the projected step: q - lam (q . y) / (y . y) y"}  # fmt: skip
SHOWN = (0.0, 0.25, 0.5, 0.75, 1.0)
REGIMES = {
    "off": "needle off the dominant directions",
    "inside": "needle on the dominant direction",
    "disjoint": "query off the dominant directions",
}


@dataclass(frozen=True)
class Memory:
    keys: Float[Tensor, "R T K"]  # unit
    query: Float[Tensor, "R K"]  # unit, stands at the last position


@dataclass(frozen=True)
class Result:
    scores: Float[Tensor, "R L T"]  # k_j . q_clean of every stored key, for each lam
    margin: Float[Tensor, "R L"]  # needle minus best distractor
    rank: Tensor  # [R, L] of the needle, 1: it is read above all distractors
    spectrum: Float[Tensor, "R K"]  # of Sigma, largest first


def make_memory(seed: int) -> Memory:
    """The three regimes; they share every key but the needle."""
    generator = torch.Generator().manual_seed(seed)
    u1, u2, mean, own = torch.linalg.qr(torch.randn(K, 4, generator=generator))[0].T
    topic = torch.rand(T, 1, generator=generator)
    sign = torch.randint(0, 2, (T, 1), generator=generator) * 2.0 - 1
    anywhere = normalize(torch.randn(T, K, generator=generator), dim=-1)
    centre = torch.where(topic < SHARES[0], u1, torch.where(topic < sum(SHARES), u2, anywhere))
    noise = torch.randn(T, K, generator=generator) * K**-0.5
    distractors = normalize(MEAN * mean + sign * centre + NOISE * noise, dim=-1)
    needle = torch.stack([own, u1, own])
    keys = distractors.repeat(len(REGIMES), 1, 1)
    keys[:, NEEDLE] = needle
    query = normalize(needle + torch.stack([1.5 * u1, 0.75 * u2, 0 * u1]), dim=-1)
    return Memory(keys, query)


def clean(memory: Memory, step: str = "scaled") -> Result:
    """Run the operator once: regimes are the batch, and query heads with a lam each read one key head."""
    heads = len(LAM)
    q = memory.query[:, None, None].expand(-1, T, heads, -1)
    lam = torch.tensor(LAM).expand(len(REGIMES), T, heads)
    q_clean, k_bar, state = ccq.clean_query(q, memory.keys[:, :, None], lam, step=step, output_final_state=True)
    assert state is not None
    scores = torch.einsum("rlk,rtk->rlt", q_clean[:, -1], k_bar[:, :, 0])  # the query of the last position
    needle = scores[:, :, NEEDLE, None]
    others = scores.index_fill(2, torch.tensor([NEEDLE]), -torch.inf)
    return Result(
        scores,
        margin=needle[..., 0] - others.amax(2),
        rank=1 + (others > needle).sum(2),
        spectrum=torch.linalg.eigvalsh(state.covariance()[:, 0]).flip(1),
    )


def draw(results: dict[str, Result], folder: Path) -> None:
    """scores.png: a row a regime, before, after the paper's step, and the margin against lam."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from ccq.figures import BLUE, GREY, INK, RED, STYLE

    result, place = results["scaled"], torch.arange(1, T + 1)
    others = place != NEEDLE + 1
    plain = {"axes.grid": False, "axes.titlesize": 9, "axes.titleweight": "normal"}
    with matplotlib.rc_context(STYLE | plain):
        figure = Figure(figsize=(10, 7.6), layout=ConstrainedLayoutEngine(w_pad=0.08))
        panels = figure.subplots(len(REGIMES), 3, sharex="col", sharey="col", width_ratios=(1.25, 1.25, 1))
        for (before, after, curve), r, title in zip(panels, range(len(REGIMES)), REGIMES.values(), strict=True):
            before.annotate(title, (0, 1), (-38, 24), "axes fraction", "offset points", size=10.5, weight="bold")
            for axes, at, name in ((before, 0, "before (lam = 0)"), (after, -1, "cleaned (lam = 1)")):
                scores = result.scores[r, at]
                axes.axhline(scores[others].max(), color=BLUE, lw=1, ls="--", zorder=1, label="best distractor")
                axes.scatter(place[others], scores[others], s=7, color=GREY, lw=0, zorder=2, label="stored key")
                axes.scatter(
                    place[~others], scores[~others], s=110, marker="*", color=RED, lw=0, zorder=3, label="needle"
                )
                axes.set_title(f"{name}: needle ranks {int(result.rank[r, at])} of {T}")
                axes.set(xlim=(0, T + 1), ylim=(-1.05, 1.15), ylabel="score k . q_clean")
            curve.axhline(0, color=INK, lw=0.8)
            curve.plot(LAM, result.margin[r], color=BLUE, lw=1.8, label="the paper's step")
            curve.plot(LAM, results["projected"].margin[r], color=RED, lw=1.8, ls="--", label="projected")
            curve.set_title("needle minus best distractor")
            curve.set(xlim=(0, 1), ylabel="margin")
        where = "position of the stored key"
        for axes, label in zip(panels[-1], (where, where, "lam"), strict=True):
            axes.set_xlabel(label)
        panels[0, 2].legend()
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside upper right", ncols=3)
        figure.savefig(folder / "scores.png", dpi=160)


def show(results: dict[str, Result]) -> None:
    """The table, and what may and may not be concluded from it."""
    from rich.console import Console

    console = Console(highlight=False)
    spectrum = results["scaled"].spectrum[0, :4].tolist()
    console.print(f"{T} unit keys of size {K}, one of them the needle, read as k . q_clean")
    console.print(f"Sigma's largest eigenvalues: {', '.join(f'{v:.3f}' for v in spectrum)}")
    for step, result in results.items():
        rows = []
        for lam in SHOWN:
            pairs = zip(result.margin[:, LAM.index(lam)].tolist(), result.rank[:, LAM.index(lam)].tolist(), strict=True)
            cells = [f"[{'bold' if rank == 1 else 'dim'}]{margin:+.3f} ({rank})[/]" for margin, rank in pairs]
            rows.append((f"{lam:g}", *cells))
        title = f"{STEPS[step]}\nneedle minus best distractor (rank of the needle)"
        tables.show(("lam", *REGIMES.values()), rows, title, left=0)
    console.print(read_toml(Path(__file__).with_name("words.toml"))["regimes"])


def main(argv: Sequence[str]) -> int:
    """Given OUT and a seed: OUT/scores.png, and the table on the screen."""
    out, seed = Path(argv[0]), int(argv[1])
    memory = make_memory(seed)
    results = {step: clean(memory, step) for step in STEPS}
    out.mkdir(parents=True, exist_ok=True)
    draw(results, out)
    show(results)
    return 0
