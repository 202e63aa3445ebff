"""The memory of the operator: running statistics of the keys of N sequences.

N sequences, H key heads, K key size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(eq=False)  # a field-wise == of tensors has no single truth value
class CovarianceState:
    """Sums over the keys seen so far, from which Sigma_t = C_t / t - s_t s_t^T / t^2.

    Sums, not means: the states of two pieces of one sequence add up to the state of the whole. With a decay of the
    covariance the sums forget, and t is their weight: a fraction, one a head.

    >>> state = CovarianceState.zeros(2, heads=4, key_size=64)
    >>> state.nbytes
    133136
    """

    second_moment: Float[Tensor, "N H K K"]  # C_t = sum of k k^T, symmetric
    key_sum: Float[Tensor, "N H K"]  # s_t = sum of k
    count: Int[Tensor, " N"] | Float[Tensor, "N H"]  # t: keys in int64, or with a decay their weight in C's dtype

    def lower_triangle(self) -> Float[Tensor, "N H K K"]:
        """C_t for a kernel that updates the lower triangle in place and leaves the rest as it is.

        C_t is symmetric, so decoding need move only half of it; `second_moment` mends the other half when asked.
        """
        if not self._lower:  # type: ignore[has-type]  # the lower triangle shall be that of the symmetric part
            self._second_moment.copy_((self._second_moment + self._second_moment.mT) / 2)
            self._lower = True
        return self._second_moment

    def _get_second_moment(self) -> Tensor:
        if self._lower:  # always, not once: a captured graph may have run since
            whole = self._second_moment.tril() + self._second_moment.tril(-1).mT
            if self._second_moment.is_inference() and not torch.is_inference_mode_enabled():
                self.second_moment = whole  # that one must not be changed here
            else:
                self._second_moment.copy_(whole)
        return self._second_moment

    def _set_second_moment(self, value: Tensor) -> None:
        self._second_moment = value
        self._lower = False  # whether only the lower triangle is up to date

    @classmethod
    def zeros(
        cls, n: int, heads: int, key_size: int, *, dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None, decayed: bool = False,
    ) -> CovarianceState:  # fmt: skip
        """The state of `n` sequences before their first token; `decayed`: with weights in the place of counts."""
        weights = torch.zeros(n, heads, dtype=dtype, device=device)
        return cls(
            torch.zeros(n, heads, key_size, key_size, dtype=dtype, device=device),
            torch.zeros(n, heads, key_size, dtype=dtype, device=device),
            weights if decayed else torch.zeros(n, dtype=torch.int64, device=device),
        )

    @property
    def weight(self) -> Float[Tensor, "N H"]:
        """t, in the dtype of the sums."""
        return weight_of(self.count, self.key_sum.shape[1], self.key_sum.dtype)

    def covariance(self, centred: bool = True) -> Float[Tensor, "N H K K"]:
        """Sigma_t itself (the second moment C_t / t if not `centred`); zero where no key was seen."""
        t = torch.where(self.weight > 0, self.weight, 1)[..., None, None]
        sigma = (self.second_moment + self.second_moment.mT) / (2 * t)
        if centred:
            mean = self.key_sum / t[..., 0]
            sigma = sigma - mean[..., :, None] * mean[..., None, :]
        return sigma

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> CovarianceState:
        """Move or cast. A count of keys stays int64 whatever `dtype` is."""
        kind_of = lambda x: dtype if x.is_floating_point() else None  # noqa: E731
        return pytree.tree_map(lambda x: x.to(device, kind_of(x), non_blocking=non_blocking), self)

    def clone(self) -> CovarianceState:
        return pytree.tree_map(torch.clone, self)

    def detach(self) -> CovarianceState:
        return pytree.tree_map(torch.detach, self)

    def index_select(self, indices: Int[Tensor, " M"]) -> CovarianceState:
        """Sequences `indices`, in that order, repeats allowed: what a beam search reorders with."""
        return pytree.tree_map(lambda x: x.index_select(0, indices.to(x.device)), self)

    def __add__(self, other: CovarianceState) -> CovarianceState:
        """The state of both sets of keys together: pieces of a sequence, or ranks that each saw a part."""
        if not isinstance(other, CovarianceState):
            return NotImplemented
        if self.second_moment.shape != other.second_moment.shape:
            raise ValueError(
                f"other: expected a state of shape {tuple(self.second_moment.shape)} to add, "
                f"got {tuple(other.second_moment.shape)}"
            )
        alike = self.count.ndim == other.count.ndim  # else keys of one are added to weights of the other
        count = self.count + other.count if alike else self.weight + other.weight
        return CovarianceState(self.second_moment + other.second_moment, self.key_sum + other.key_sum, count)

    @property
    def nbytes(self) -> int:
        return self._second_moment.nbytes + self.key_sum.nbytes + self.count.nbytes


def weight_of(count: Tensor, heads: int, dtype: torch.dtype) -> Float[Tensor, "N H"]:
    """A count of keys [N], or weights [N, H], as weights."""
    return count if count.is_floating_point() else count.to(dtype).unsqueeze(1).expand(-1, heads)


# a field to dataclasses (init, replace, the pytree) whose reading may have to mend it
CovarianceState.second_moment = property(  # type: ignore[assignment]
    CovarianceState._get_second_moment, CovarianceState._set_second_moment
)
pytree.register_dataclass(CovarianceState)
torch.serialization.add_safe_globals([CovarianceState])  # torch.load reads it by default
