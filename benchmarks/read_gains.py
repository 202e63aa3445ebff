"""The figure of docs/reads.md: what each read leaves of a query, by eigenvalue of Sigma.

    python benchmarks/read_gains.py docs/figures/reads.png

In the eigenvectors of Sigma every read multiplies the components of q one by one. Drawn are those factors for a query
that has as much of every eigenvector, over a spectrum like 1, 1/2, 1/3, ...: once with a sum of 0.9, as unit keys have
it, and once with a tenth of that.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from ccq.figures import BLUE, GREEN, GREY, ORANGE, RED, Figure, Panel, save
from ccq.ops.clean.reference import STEPS

SIZE, SUM, RIDGE = 64, 0.9, 0.02


def spectrum(total: float) -> Tensor:
    """Eigenvalues 1, 1/2, ... 1/SIZE, made to sum to `total`."""
    values = 1 / torch.arange(1, SIZE + 1, dtype=torch.float64)
    return values * total / values.sum()


def gains(values: Tensor, step: str, lam: float, steps: int = 1) -> Tensor:
    """q_clean / q, component by component, of a query with equal components; by the package's own steps."""
    q = torch.full_like(values, SIZE**-0.5)
    cleaned = q
    for _ in range(steps):
        cleaned = STEPS[step](cleaned, values * cleaned, torch.tensor([lam], dtype=torch.float64))
    return cleaned / q


def ridge(values: Tensor, mu: float = RIDGE) -> Tensor:
    """(Sigma + mu)^-1 q, its length as q's where Sigma has nothing."""
    return mu / (values + mu)


READS = {
    "paper's step, lam 1": (BLUE, "-", lambda values: gains(values, "scaled", 1.0)),
    "projected, lam 0.6": (RED, "-", lambda values: gains(values, "projected", 0.6)),
    "projected twice, lam 0.45": (ORANGE, "--", lambda values: gains(values, "projected", 0.45, 2)),
    "Mesa, ridge 0.02": (GREEN, ":", ridge),
}


def figure() -> Figure:
    def panel(total: float) -> Panel:
        values = spectrum(total)

        def draw(axes) -> None:
            axes.axhline(0, color=GREY, lw=0.8)
            for colour, dashes, read in READS.values():
                axes.plot(values, read(values), color=colour, ls=dashes, marker="o", ms=3)
            axes.set(xlabel="eigenvalue of Sigma", ylabel="what is left of q there", ylim=(-0.8, 1.1), xscale="log")

        return Panel(f"eigenvalues sum to {total:g}", draw)

    legend = {name: {"color": colour, "ls": dashes, "marker": "o"} for name, (colour, dashes, _) in READS.items()}
    return Figure("reads", "Reads by eigenvalue", "", [panel(SUM), panel(SUM / 10)], legend, 2, (4.2, 3.2))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".png"):
        sys.exit("usage: python benchmarks/read_gains.py FILE.png")
    print(f"Wrote {save(figure(), Path(sys.argv[1]))}")
