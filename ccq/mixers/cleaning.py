"""Cleaning as a mixer has it: one line between its feature map and its recurrence, and nothing where it is off.

    lam = sigmoid(W q + b)                     from the raw query, all heads together
    q_clean, k_bar = clean_query(q, k, lam)    the backbone reads with one and writes with the other

B batch, N sequences (B of them, or packed ones), T tokens, H heads, K size of a raw query, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from ccq.mixers.base import LayerState, Owner, Sequences
from ccq.mixers.norms import unit
from ccq.ops import Cleaning, CovarianceState, Gate, clean_query, decode_step, gate, sigma_q
from ccq.ops.clean import read_with, reference
from ccq.ops.clean.chunk import CHUNK
from ccq.ops.precision import stats_dtype
from ccq.ops.recurrence import recurrence

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig

DECAY = 0.98  # where a learned decay of the covariance starts: half is left after 34 tokens


class QueryCleaner(Owner):
    """What happens to q and k before they meet the state: nothing, unit length, cleaning, or Comba's read.

        clean               q - lam * Sigma_t q, k; both unit first (normalize="unit") or as they are ("stats");
                            or another `step`, several `steps`, a covariance that forgets (`covariance_decay`);
                            controls: another `direction` than Sigma_t q, lam with a `learned_scale`
        unit_qk             q / |q|, k / |k|: the control without cleaning
        current_key_read    q - d * k of the same token, d learned, one a head, after unit_qk

    For analysis: with `record`, `lam` is that of the last call; with `record_angle` too, `angle` is how far it turned
    the queries, in degrees; `intervention` maps lam to the one that is used.
    """

    gate_weight: Tensor  # [H, H * K]
    gate_bias: Tensor  # [H]
    lam_scale: Tensor  # [H] of lam, where that is learned
    current_key: Tensor  # d [H]
    decay_logit: Tensor  # [H] of what is left of the covariance at each token, where that is learned

    def __init__(self, config: CCQConfig, heads: int, size: int, features: int | None = None) -> None:
        """`size` of a raw query, that the gate sees; `features` of what is cleaned, where a map made them."""
        super().__init__()
        self.heads, self.features = heads, features or size
        self.clean, self.centred, self.normalize = config.clean, config.centred, config.normalize
        self.fixed_lam, self.gate_init = config.fixed_lam, config.gate_init
        self.read: dict[str, Any] = {"step": config.step, "steps": config.steps}
        self.direction, self.learned_scale = config.direction, config.learned_scale
        self.control = config.learned_scale or config.direction != "covariance"
        self.covariance_decay = config.covariance_decay if config.clean else "none"
        self.unit_qk, self.backend = config.unit_qk, config.backend
        self.half_states = config.state_dtype == "bfloat16"
        self.current_key_read = config.current_key_read
        self.plain = not config.clean and not config.current_key_read
        self.has_gate = self.clean and self.fixed_lam is None
        if self.has_gate:
            self.own("gate_weight", heads, heads * size, start=0.0, decays=True)
            self.own("gate_bias", heads, start=logit(config.gate_init), decays=config.decay_gate_bias)
        if self.learned_scale:
            self.own("lam_scale", heads, start=1.0)
        if self.covariance_decay == "learned":
            self.own("decay_logit", heads, start=logit(DECAY))
        if self.current_key_read:
            self.own("current_key", heads, start=config.current_key_init)
        self.record = self.record_angle = False
        self.lam: Tensor | None = None
        self.angle: Tensor | None = None
        self.intervention: Callable[[Tensor], Tensor] | None = None

    def gate(self, q: Float[Tensor, "*B H K"]) -> Float[Tensor, "*B H"]:
        """lam of the raw query, in fp32."""
        if self.fixed_lam is None:
            lam = gate(q, self.gate_weight, self.gate_bias, self.backend)
        else:
            lam = q.new_full(q.shape[:-1], self.fixed_lam, dtype=stats_dtype(q.dtype))
        if self.learned_scale:
            lam = lam * self.lam_scale
        if self.intervention is not None:
            lam = self.intervention(lam)
        if self.record:
            self.lam = lam.detach()
        return lam

    @property
    def by_gate(self) -> bool:
        """Whether the operators may gate by themselves: nobody wants to see or change lam."""
        return self.has_gate and self.intervention is None and not self.record

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Unit q and k, where they are wanted and cleaning will not make them so itself."""
        if self.unit_qk and not (self.clean and self.normalize == "unit"):
            return unit(q), unit(k)
        return q, k

    def log_decay(self, k: Float[Tensor, "*B H F"], g: Tensor | None) -> Float[Tensor, "*B H"] | None:
        """That of the covariance, from the log-decay g of the backbone: the mean of its parts."""
        parts = self.decay_parts(k, g)
        return None if parts is None else parts.mean(-1)

    def decay_parts(self, k: Float[Tensor, "*B H F"], g: Tensor | None) -> Float[Tensor, "*B H D"] | None:
        """The log-decays of a head, from g: one a head, or value head of Mamba2 [*B, H'], or channel [*B, H, F].

        The backbone's is taken as it is: its gradient goes to what the memory forgets, not to the covariance.
        """
        if self.covariance_decay == "learned":
            return F.logsigmoid(self.decay_logit).expand(k.shape[:-1])[..., None]
        if self.covariance_decay == "none":
            return None
        if g is None:  # a backbone that does not forget
            return k.new_zeros(*k.shape[:-1], 1, dtype=stats_dtype(k.dtype))
        g = g.detach().to(stats_dtype(k.dtype))
        return g if g.ndim == k.ndim else g.unflatten(-1, (k.shape[-2], -1))

    def forward(
        self, raw: Float[Tensor, "B T H K"], q: Float[Tensor, "B T H F"], k: Float[Tensor, "B T H F"], seqs: Sequences,
        state: LayerState | None = None, output_state: bool = False, g: Tensor | None = None,
    ) -> tuple[Float[Tensor, "B T H F"], Float[Tensor, "B T H F"], CovarianceState | None]:  # fmt: skip
        """The query to read with, the key to write with, and the covariance after the last token where asked for.

        g is the log-decay of the backbone.
        """
        q, k = self.prepare(q, k)
        covariance = None
        if self.clean:
            lam = Gate(self.gate_weight, self.gate_bias) if self.by_gate and raw is q else self.gate(raw)
            start = None if state is None else state["covariance"]
            how = {**self.how, "initial_state": start, "cu_seqlens": seqs.cu_seqlens, "log_decay": self.log_decay(k, g)}
            if self.record_angle:
                self.angle = self.turned(q, k, lam, how)
            q, k, covariance = self.operator(q, k, lam, output_final_state=output_state, **how)
        return self.without_current_key(q, k), k, covariance

    @property
    def how(self) -> dict[str, Any]:
        """Options of `clean_query`."""
        return {"centred": self.centred, "normalize": self.normalize, "backend": self.backend, **self.read}

    def operator(
        self, q: Tensor, k: Tensor, lam: Any, *, log_decay: Tensor | None, **how: Any
    ) -> tuple[Tensor, Tensor, CovarianceState | None]:
        """`clean_query`, or what a control does in its place, in plain PyTorch."""
        if self.direction == "other head":  # key head h - 1 makes the covariance that h reads
            decay = None if log_decay is None else log_decay.roll(1, -1)
            q, k, state = clean_query(q, k.roll(1, -2), lam, log_decay=decay, **how)
            return q, k.roll(-1, -2), state
        if not self.control:
            return clean_query(q, k, lam, log_decay=log_decay, **how)
        if isinstance(lam, Gate):
            lam = self.gate(q)
        step, normalize = how.pop("step"), how["normalize"]
        how.pop("steps")  # one: the config has checked it
        if self.direction == "mean":
            y, k_bar, state = mean_q(q, k, log_decay, **how)
        else:  # lam may be above 1, which `clean_query` refuses
            y, k_bar, state = sigma_q(q, k, log_decay=log_decay, **how)
        return read_with(step, q, y, lam, normalize), k_bar, state

    @torch.no_grad()
    def turned(self, q: Tensor, k: Tensor, lam: Any, how: dict[str, Any]) -> Float[Tensor, "B T H"]:
        """The angle between q and q_clean in degrees; in fp32, for a small one is lost in a rounded q_clean."""
        high = stats_dtype(q.dtype)
        cleaned, _, _ = self.operator(q.to(high), k.to(high), lam, **how)
        before, after = (F.normalize(x.to(high), dim=-1, eps=1e-12) for x in (q, cleaned))
        return torch.rad2deg(2 * torch.asin(((before - after).norm(dim=-1) / 2).clamp(max=1)))

    def mix(
        self, raw: Float[Tensor, "B T H K"], q: Float[Tensor, "B T H F"], k: Float[Tensor, "B T H F"],
        v: Float[Tensor, "B T Hv V"], seqs: Sequences | None, state: Any, new: LayerState | None,
        g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    ) -> Float[Tensor, "B T Hv V"]:  # fmt: skip
        """Cleaning, then write and read: of all tokens, or without `seqs` of one more, [B, H, K]. As `Mixer.run`."""
        if seqs is None:
            return self.step(raw, q, k, v, state, g, beta, scale)
        q, k, covariance = self(raw, q, k, seqs, state, new is not None, g)
        past = None if state is None else state["recurrent"].to(stats_dtype(q.dtype))
        o, recurrent = recurrence(q, k, v, g, beta, scale, past, new is not None, seqs.cu_seqlens, self.backend)
        if new is not None and recurrent is not None:
            new["recurrent"] = recurrent.bfloat16() if self.half_states else recurrent
            if covariance is not None:
                new["covariance"] = covariance
        return o

    def step(
        self, raw: Tensor, q: Tensor, k: Tensor, v: Tensor, state: LayerState, g: Tensor | None = None,
        beta: Tensor | None = None, scale: float | None = None,
    ) -> Float[Tensor, "B Hv V"]:  # fmt: skip
        """`mix` of one token, in place. It is one call because the states' traffic is what a step costs."""
        if not self.plain:  # else the step makes them unit
            q, k = self.prepare(q, k)
        cleaning = None
        if self.clean and (self.control or self.read["step"] not in reference.FUSED):
            decay = self.log_decay(k, g)
            q, k, new = self.operator(
                q[:, None], k[:, None], self.gate(raw)[:, None], log_decay=None if decay is None else decay[:, None],
                initial_state=state["covariance"], output_final_state=True, **self.how,
            )  # fmt: skip
            q, k = q[:, 0], k[:, 0]
            for old, x in zip(*map(pytree.tree_leaves, (state["covariance"], new)), strict=True):
                old.copy_(x)
        elif self.clean:
            cleaning = Cleaning(
                state["covariance"],
                lam=None if self.by_gate else self.gate(raw),
                gate=Gate(self.gate_weight, self.gate_bias) if self.by_gate else None,
                raw=None if raw is q else raw,
                centred=self.centred,
                normalize=self.normalize,
                log_decay=self.decay_parts(k, g),
                **self.read,
            )
        return decode_step(
            self.without_current_key(q, k), k, v, state["recurrent"], g, beta, scale,
            unit_qk=self.plain and self.unit_qk, cleaning=cleaning, backend=self.backend,
        )  # fmt: skip

    def without_current_key(self, q: Tensor, k: Tensor) -> Tensor:
        return q - (self.current_key[:, None] * k).to(q.dtype) if self.current_key_read else q

    def new_state(self, n: int, device: torch.device | str | None, dtype: torch.dtype) -> LayerState:
        """{"covariance": zeros} where a covariance is kept, {} elsewhere."""
        if not self.clean:
            return {}
        high = stats_dtype(dtype)
        decayed = self.covariance_decay != "none" or self.direction == "mean"
        made = CovarianceState.zeros(n, self.heads, self.features, dtype=high, device=device, decayed=decayed)
        if self.direction == "mean":
            made.second_moment = made.second_moment.new_zeros(n, self.heads, 0, 0)
        return {"covariance": made}

    def flops(self) -> float:
        """Of the chunkwise cleaning and its gate, forward, a token."""
        if not self.clean:
            return 0.0
        size = self.features
        total = 4.0 * self.heads * size * (CHUNK if self.direction == "mean" else size + CHUNK)
        return total + (2.0 * self.gate_weight.numel() if self.has_gate else 0.0)


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def mean_q(
    q: Float[Tensor, "B T H F"], k: Float[Tensor, "B T H F"], log_decay: Float[Tensor, "B T H"] | None, *,
    normalize: str, initial_state: CovarianceState | None, cu_seqlens: Tensor | None = None,
    output_final_state: bool = False, **_: object,
) -> tuple[Float[Tensor, "B T H F"], Float[Tensor, "B T H F"], CovarianceState | None]:  # fmt: skip
    """As `sigma_q`, with m m^T in the place of Sigma_t, m the mean of the keys so far: y = m (m . q).

    The sums of keys and their weights are what linear attention remembers under a key that is always 1. A state has no
    second moment.
    """
    q, k, k_bar = reference.prepare(q, k, normalize)
    one = torch.ones_like(k[..., :1])
    start = None
    if initial_state is not None:
        start = torch.cat([initial_state.key_sum, initial_state.weight[..., None]], -1)[:, :, None]
    sums, final = recurrence(
        one, one, torch.cat([k, one], -1), log_decay, None, 1.0, start, output_final_state, cu_seqlens, "chunk"
    )
    mean = sums[..., :-1] / sums[..., -1:]
    state = None
    if final is not None:
        key_sum, weight = final[:, :, 0].split([k.shape[-1], 1], -1)
        none = key_sum.new_zeros(*key_sum.shape[:2], 0, 0)
        state = CovarianceState(none, key_sum.contiguous(), weight[..., 0].contiguous())
    return mean * (mean * q).sum(-1, keepdim=True), k_bar, state
