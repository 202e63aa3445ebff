"""What q and k become before they meet: themselves, or learned features.

H heads, K size of a head, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.ops.precision import no_autocast, stats_dtype


class Hedgehog(nn.Module):
    """softmax of [2 W x, -2 W x], with W [F / 2, K] learned and shared by the heads.

    W starts semi-orthogonal. Positive features that can be as peaked as a softmax over keys.
    """

    def __init__(self, size: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features // 2, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight.is_meta or getattr(self.weight, "_is_hf_initialized", False):
            return
        drawn = torch.empty_like(self.weight, dtype=stats_dtype(self.weight.dtype))  # no QR in half precision
        with torch.no_grad():
            self.weight.copy_(nn.init.orthogonal_(drawn))

    def forward(self, x: Float[Tensor, "*B H K"]) -> Float[Tensor, "*B H F"]:
        y = F.linear(x, self.weight.to(x.dtype))
        with no_autocast(x):  # which would return fp32
            y = 2 * y.to(stats_dtype(x.dtype))
            return torch.cat([y, -y], -1).softmax(-1).to(x.dtype)


class ElementwiseProduct(nn.Module):
    """(W1 x + b1) * (W2 x + b2): what fla's linear attention does unless told otherwise."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Float[Tensor, "*B H K"]) -> Float[Tensor, "*B H K"]:
        return self.layer1(x) * self.layer2(x)


def make_feature_map(name: str, size: int, half_features: int) -> tuple[nn.Module, int]:
    """The map called `name` for heads of `size`, and how many features it gives."""
    if name == "identity":
        return nn.Identity(), size
    if name == "elementwise_product":
        return ElementwiseProduct(size), size
    return Hedgehog(size, 2 * half_features), 2 * half_features
