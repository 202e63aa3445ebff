"""A row of a table: runs that differ in the seed alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ccq.systems import SIZES, SYSTEMS, WITH_CONVOLUTION, Identity

__all__ = ["SIZES", "WITH_CONVOLUTION", "System", "label_of", "scale_label", "seeds_label", "tokens_label"]


@dataclass(frozen=True)
class System:
    """System, variant and size of an identity."""

    name: str  # of ccq.systems, or what the result calls its model
    variant: str = ""
    size: str = ""

    @property
    def known(self) -> bool:
        return self.name in SYSTEMS

    @property
    def key(self) -> str:
        """As paper.toml and claims.toml name it."""
        return Identity(self.name, self.variant).key

    @property
    def label(self) -> str:
        return Identity(self.name, self.variant).label

    @property
    def order(self) -> tuple:
        return Identity(self.name, self.variant, self.size).order


def label_of(key: str) -> str:
    """
    >>> label_of("ccq-gated-deltanet-uncentred"), label_of("gla, convolution of 4")
    ('CCQ-Gated DeltaNet, uncentred', 'GLA, convolution of 4')
    """
    name, _, variant = key.partition(", ")
    return System(name, variant).label


def seeds_label(seeds: Iterable[int | None]) -> str:
    """
    >>> seeds_label([2, None, 2]), seeds_label([0, 1])
    (', seed 2', ', seeds 0, 1')
    """
    known = list(dict.fromkeys(str(seed) for seed in seeds if seed is not None))
    return f", seed{'s' if len(known) > 1 else ''} {', '.join(known)}" if known else ""


def tokens_label(count: int) -> str:
    """
    >>> tokens_label(512), tokens_label(4096)
    ('512', '4K')
    """
    return f"{count // 1024}K" if count >= 1024 else str(count)


def scale_label(scale: str) -> str:
    """
    >>> scale_label("500m"), scale_label("nano")
    ('500M', 'nano')
    """
    return scale.upper() if scale[:1].isdigit() else scale
