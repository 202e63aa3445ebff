"""What the tests share: inputs drawn from a seed, the fp64 truth, one comparison, one table of tolerances.

B sequences (or N packed ones), T tokens, Hq query heads, Hk key heads, K key size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor

import ccq
import ccq.ops
from ccq import CovarianceState
from ccq.ops import Gate

BACKENDS = ("reference", "chunk")
NORMALIZE = ("unit", "none", "stats")
HALF = (torch.bfloat16, torch.float16)
# what choose.PLAIN takes kernels from, to compare
LAYERS = frozenset({"norm", "add_norm", "gated_norm", "swiglu", "loss", "conv", "linear"})

# Largest relative RMS error against the fp64 reference, by the dtype of the result.
TOLERANCE = {
    # n roundings of u = 2^-53 add up to about u sqrt(n): 3.5e-15 for a sum of 1000 tokens, and both sides round
    torch.float64: 1e-14,
    # u = 2^-24, sums of a chunk of 64 tokens, then of chunks: 5e-7; the truth is fp64 and does not round
    torch.float32: 1e-6,
    # fp32 inside, then one rounding of each element by at most 2^-8 or 2^-11: nothing correct errs more
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
}

# keys: how many directions are ten times stronger than the rest, and the fraction of the energy in the mean
DISTRIBUTIONS = {
    "isotropic": (0, 0.0),
    "few strong directions": (3, 0.0),
    "half mean": (0, 0.5),
    "strong mean": (0, 0.9),
}


def checked(function):
    """The public function with the shapes of its signature checked at each call."""
    return jaxtyped(typechecker=beartype)(function)


clean_query = checked(ccq.clean_query)
clean_query_step = checked(ccq.clean_query_step)
sigma_q = checked(ccq.sigma_q)
correction = torch.no_grad()(checked(ccq.ops.correction))


@dataclass
class Case:
    """Arguments of one call, and the cotangents of q_clean, k_bar, C_T, s_T and the weight n_T."""

    q: Tensor
    k: Tensor
    lam: Tensor
    initial_state: CovarianceState | None
    cu_seqlens: Tensor | None
    cotangents: dict[str, Tensor]
    log_decay: Tensor | None = None
    learned: bool = True  # whether a gradient flows to log_decay

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.lam

    @property
    def where(self) -> dict:
        """The keyword arguments that say what the tokens follow."""
        follows = {"initial_state": self.initial_state, "cu_seqlens": self.cu_seqlens}
        return follows if self.log_decay is None else {**follows, "log_decay": self.log_decay}

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Everything a gradient flows to."""
        named = {"q": self.q, "k": self.k, "lam": self.lam}
        if self.initial_state is not None:
            named |= {"initial C": self.initial_state.second_moment, "initial s": self.initial_state.key_sum}
        if self.log_decay is not None and self.learned:
            named["log_decay"] = self.log_decay
            if self.initial_state is not None:
                named["initial n"] = self.initial_state.count
        return named

    def map(self, function) -> Case:
        """The case with `function` applied to each tensor a gradient flows to."""
        state, log_decay = self.initial_state, self.log_decay
        if state is not None:
            count = function(state.count) if state.count.is_floating_point() else state.count
            state = CovarianceState(function(state.second_moment), function(state.key_sum), count)
        if log_decay is not None:
            log_decay = function(log_decay) if self.learned else function(log_decay).detach()
        made = {"q": function(self.q), "k": function(self.k), "lam": function(self.lam)}
        return replace(self, **made, initial_state=state, log_decay=log_decay)

    def double(self) -> Case:
        """The same numbers, in fp64."""
        return replace(
            self.map(torch.Tensor.double), cotangents={name: x.double() for name, x in self.cotangents.items()}
        )

    def leaves(self) -> Case:
        """The same numbers, as fresh leaves that want a gradient."""
        return self.map(lambda x: x.detach().clone().requires_grad_())

    def tokens(self, begin: int, end: int) -> Case:
        """Tokens begin to end - 1 of a case that is not packed, for what follows another state: it has none."""
        cut = {name: x[:, begin:end] if name in ("q_clean", "k_bar") else x for name, x in self.cotangents.items()}
        q, k, lam = (x[:, begin:end] for x in self.args)
        return Case(q, k, lam, None, None, cut)


def make_case(
    B: int = 2,
    T: int = 65,
    Hq: int = 4,
    Hk: int = 2,
    K: int = 16,
    *,
    dtype: torch.dtype = torch.float64,
    lam_dtype: torch.dtype | None = None,
    keys: str = "isotropic",
    scale: float = 1.0,
    unit: bool = False,
    state: bool = False,
    earlier: int = 0,
    lengths: list[int] | None = None,
    decay: str | None = None,
    seed: int = 0,
) -> Case:
    """Draw a case.

    Args:
        lam_dtype: that of the statistics unless given.
        keys: one of DISTRIBUTIONS.
        scale: the size of an element of q and k.
        unit: divide q and k by their norms, as normalize="none" expects them.
        state: begin with the statistics of `earlier`, 3 more, 6 more, ... unit keys.
        lengths: pack sequences of these lengths; B and T follow from them.
        decay: "given", or "learned" where a gradient flows to it: so much a token that some 2% of a state are left
            at the end. The state is then one of weights. "sudden": also given, and every tenth token or so forgets
            nearly all (e^-20) or all (e^-90) that came before.
    """
    rng = torch.Generator().manual_seed(seed)
    high = torch.float64 if dtype == torch.float64 else torch.float32
    cu_seqlens = None
    sequences = B
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *accumulate(lengths)])
        sequences, B, T = len(lengths), 1, sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    strong, mean_energy = DISTRIBUTIONS[keys]
    spread = torch.ones(K, dtype=torch.float64)
    spread[:strong] = 10
    spread *= (K / spread.square().sum()).sqrt()
    basis = torch.linalg.qr(normal(Hk, K, K)).Q
    mean = unit_vector(normal(Hk, K)) * K**0.5

    def draw_keys(*shape: int) -> Tensor:  # [*shape, Hk, K]
        noise = torch.einsum("...hk,hkl->...hl", normal(*shape, Hk, K) * spread, basis)
        return scale * ((1 - mean_energy) ** 0.5 * noise + mean_energy**0.5 * mean)

    q, k = scale * normal(B, T, Hq, K), draw_keys(B, T)
    if unit:
        q, k = unit_vector(q), unit_vector(k)
    lam = torch.rand(B, T, Hq, generator=rng, dtype=torch.float64)
    initial_state = None
    if state:
        count = torch.arange(sequences) * 3 + earlier
        seen = unit_vector(draw_keys(sequences, int(count.max())))  # [N, t, Hk, K]
        seen = seen * (torch.arange(seen.shape[1]) < count[:, None])[..., None, None]
        moment = torch.einsum("nthk,nthl->nhkl", seen, seen)
        initial_state = CovarianceState(moment.to(high), seen.sum(1).to(high), count)
    cotangents = {
        "q_clean": normal(B, T, Hq, K).to(dtype),
        "k_bar": normal(B, T, Hk, K).to(dtype),
        "C": normal(sequences, Hk, K, K).to(high),
        "s": normal(sequences, Hk, K).to(high),
    }
    made = Case(q.to(dtype), k.to(dtype), lam.to(lam_dtype or high), initial_state, cu_seqlens, cotangents)
    if decay is None:
        return made
    cotangents["n"] = normal(sequences, Hk).to(high)
    log_decay = torch.nn.functional.logsigmoid(normal(B, T, Hk) + math.log(max(lengths or [T]) / 2.5)).to(high)
    if decay == "sudden":
        forgets = torch.rand(B, T, Hk, generator=rng)
        log_decay -= 20.0 * (forgets < 0.1) + 70.0 * (forgets < 0.02)
        log_decay = (
            log_decay * 1024
        ).round() / 1024  # sums of these are exact in fp32: rounding would cost exp its bits
    if initial_state is not None:
        weight = initial_state.weight + torch.rand(sequences, Hk, generator=rng)
        initial_state = CovarianceState(initial_state.second_moment, initial_state.key_sum, weight.to(high))
    return replace(made, log_decay=log_decay, learned=decay == "learned", initial_state=initial_state)


def unit_vector(x: Tensor) -> Tensor:
    """The contract's x * rsqrt(sum x^2 + 1e-6), in the dtype of x."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gradients(case: Case, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """d(sum of outputs times their cotangents) / d(each input), where `case` holds the leaves."""
    outputs = {name: x for name, x in outputs.items() if x.requires_grad}  # the state of no tokens is a constant
    grads = torch.autograd.grad(
        list(outputs.values()),
        list(case.inputs.values()),
        [case.cotangents[name] for name in outputs],
        materialize_grads=True,
    )
    return {f"gradient of {name}": grad for name, grad in zip(case.inputs, grads, strict=True)}


def results(case: Case, backend: str, **options) -> dict[str, Tensor]:
    """All that comes out of the operator: q_clean, k_bar, the final C, s and count, y, and every gradient."""
    leaves = case.leaves()
    q_clean, k_bar, state = clean_query(
        *leaves.args, **leaves.where, output_final_state=True, backend=backend, **options
    )
    outputs = {"q_clean": q_clean, "k_bar": k_bar, **named_state(state)}
    y = correction(case.q, case.k, **case.where, backend=backend, **without_step(options))
    return {**outputs, "count": state.count, "y": y, **gradients(leaves, outputs)}


def named_state(state: CovarianceState) -> dict[str, Tensor]:
    """What of a state has a gradient."""
    named = {"C": state.second_moment, "s": state.key_sum}
    return {**named, "n": state.count} if state.count.is_floating_point() else named


def without_step(options: dict) -> dict:
    """Options of `clean_query` for `correction`."""
    return {name: x for name, x in options.items() if name != "step"}


def truth(
    case: Case, *, centred: bool = True, normalize: str = "unit", k_bar: Tensor | None = None, step: str = "scaled",
    backend: str = "reference",
) -> dict:  # fmt: skip
    """`results` of the reference in fp64.

    With `k_bar`, as it came back in half precision, that is the key of the statistics; its rounding has no gradient.
    """
    case = case.double()
    if k_bar is None:
        return results(case, backend, centred=centred, normalize=normalize, step=step)
    assert normalize == "unit", "k_bar is k itself otherwise"
    leaves = case.leaves()
    q, k = unit_vector(leaves.q), unit_vector(leaves.k)
    k = k + (k_bar.double() - k).detach()
    options = {**leaves.where, "centred": centred, "normalize": "none", "backend": backend}
    q_clean, _, state = clean_query(q, k, leaves.lam, output_final_state=True, step=step, **options)
    outputs = {"q_clean": q_clean, "k_bar": k, **named_state(state)}
    y = correction(q, k, **options)
    return {**outputs, "count": state.count, "y": y, **gradients(leaves, outputs)}


def uncancelled(case: Case, *, normalize: str = "unit", step: str = "scaled", **_) -> dict[str, Tensor]:
    """The size of y, and of the gradient of lam that is made of it, before the mean is taken away: C_t q / t."""
    case = case.double()
    y = correction(case.q, case.k, **case.where, centred=False, normalize=normalize, backend="reference")
    return {"y": y} | ({"gradient of lam": (y * case.cotangents["q_clean"]).sum(-1)} if step == "scaled" else {})


def error(ref: Tensor, got: Tensor, scale: Tensor | None = None) -> float:
    """||got - ref|| / ||scale||, in fp64; `scale` is ref unless given."""
    size = (ref if scale is None else scale).double().norm()
    distance = (got.double() - ref.double()).norm()
    return 0.0 if distance == 0 else (distance / size).item()


def assert_close(name: str, ref: Tensor, got: Tensor, ratio: float, scale: Tensor | None = None) -> None:
    """Fail unless the relative RMS error is within `ratio`. NaN and inf fail; so does another shape."""
    ref, got = ref.detach(), got.detach()
    assert got.shape == ref.shape, f"{name}: expected shape {tuple(ref.shape)}, got {tuple(got.shape)}"
    if ref.numel() == 0:
        return
    assert got.isfinite().all(), f"{name}: {(~got.isfinite()).sum()} of {got.numel()} elements are NaN or infinite"
    relative = error(ref, got, scale)
    rms = (ref if scale is None else scale).double().square().mean().sqrt().item()
    message = f"{name}: relative RMS error {relative:.2e} of magnitude {rms:.2e}, allowed {ratio:.2e}"
    print(message)
    assert relative <= ratio, message


def assert_effect(name: str, without: Tensor, ref: Tensor, got: Tensor, tolerance: float = 0.02) -> None:
    """Fail unless what cleaning changes is in `got`: over many tokens it is less than half precision may err.

    Roundings on the way add up to nothing along ref - without: whatever the size of both, its share in got - without is
    that in ref as got's dtype holds it. (1, or somewhat less where `without` is of that dtype itself, as q is that no
    norm divides: what changes it by less than half a unit is gone.)
    """
    rounded = ref.detach().to(got.dtype)
    without, ref, got, rounded = (x.detach().double() for x in (without, ref, got, rounded))
    effect = ref - without
    share, expected = (((x - without) * effect).sum() / effect.square().sum() for x in (got, rounded))
    assert expected > 0.9, f"{name}: its dtype holds only {expected:.3f} of what cleaning changes"
    assert abs(share - expected) <= tolerance, (
        f"{name}: {share:.3f} of what cleaning changes, expected {expected:.3f} within {tolerance}"
    )


LAYOUTS = {
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second element": lambda x: torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0],
    "backwards in memory": lambda x: x.mT.contiguous().mT,
    "a slice of a wider tensor": lambda x: torch.cat([x, torch.full_like(x, float("nan"))], 2)[:, :, : x.shape[2]],
}


def laid_out_results(plain: Case, layout: str, backend: str, **options) -> dict:
    """`results` without the count, of inputs and cotangents that lie in memory as LAYOUTS says."""
    strided = plain.leaves()
    inputs = {name: LAYOUTS[layout](x) for name, x in strided.inputs.items()}
    assert not any(inputs[name].is_contiguous() for name in ("q", "k"))
    state = strided.initial_state
    state = type(state)(inputs["initial C"], inputs["initial s"], state.count)
    q_clean, k_bar, final = ccq.clean_query(
        inputs["q"], inputs["k"], inputs["lam"], initial_state=state, cu_seqlens=strided.cu_seqlens,
        output_final_state=True, backend=backend, **options,
    )  # fmt: skip
    outputs = {"q_clean": q_clean, "k_bar": k_bar, "C": final.second_moment, "s": final.key_sum}
    grads = torch.autograd.grad(
        list(outputs.values()),
        list(strided.inputs.values()),
        [LAYOUTS[layout](plain.cotangents[name]) for name in outputs],
    )
    return outputs | {f"gradient of {name}": g for name, g in zip(strided.inputs, grads, strict=True)}


def assert_same_results(ref: dict, got: dict, scale: dict | None = None) -> None:
    """Compare two `results` on the magnitude of `scale` where it has one.

    The tolerance of each tensor is that of its dtype, or of the statistics where they are coarser (an fp64 lam).
    """
    assert ref.keys() == got.keys()
    inside = TOLERANCE[got["C"].dtype]
    if "gradient of initial n" in ref:  # of C, s and n the last hardly counts: it is what two large ones leave
        scale = {**(scale or {}), "gradient of initial n": ref["gradient of initial s"].norm(dim=-1)}
    for name in ref:
        if name == "count" and not got[name].is_floating_point():
            assert torch.equal(ref[name], got[name]), f"count: expected {ref[name]}, got {got[name]}"
        else:
            assert_close(name, ref[name], got[name], max(inside, TOLERANCE[got[name].dtype]), (scale or {}).get(name))


def assert_same_state(ref: CovarianceState, got: CovarianceState) -> None:
    if got.count.is_floating_point():
        assert_close("count", ref.weight, got.count, 1e-6)
    else:
        assert torch.equal(ref.count, got.count), f"count: expected {ref.count}, got {got.count}"
    for name in ("second_moment", "key_sum"):
        x = getattr(got, name)
        assert_close(name, getattr(ref, name), x, TOLERANCE[x.dtype])


def make_gate(case: Case) -> Gate:
    """A gate for the queries of a case, opened differently by each head."""
    heads, size = case.q.shape[2:]
    high = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    rng = torch.Generator().manual_seed(3)
    weight = torch.randn(heads, heads * size, generator=rng, dtype=torch.float64) * (heads * size) ** -0.5
    bias = torch.linspace(-3.0, 1.0, heads, dtype=torch.float64)
    return Gate(*(x.to(case.q.device, high).requires_grad_() for x in (weight, bias)))


def to_gpu(case: Case) -> Case:
    state = case.initial_state
    moved = case.map(torch.Tensor.cuda)
    if state is not None:
        moved = replace(moved, initial_state=state.to("cuda"))
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.cuda()
    return replace(moved, cu_seqlens=cu_seqlens, cotangents={n: x.cuda() for n, x in case.cotangents.items()})


def pack(path):
    """The file as results are committed: by zstd, beside its own name."""
    import zstandard

    path.with_name(path.name + ".zst").write_bytes(zstandard.compress(path.read_bytes()))
    path.unlink()
