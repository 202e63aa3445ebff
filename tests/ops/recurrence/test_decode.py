"""`decode_step`: a layer's decode step, token by token, against the whole sequence computed in fp64."""

from __future__ import annotations

import pytest
import torch
from helpers import TOLERANCE, assert_close, assert_same_state, checked, clean_query, make_case, unit_vector
from torch import Tensor

import ccq.ops
from ccq import CovarianceState
from ccq.ops import Cleaning

BACKENDS = ["chunk", "triton"]
STEPS = 5
HALF = torch.float16
# name: (decay, delta rule, value heads a key head)
WRITES = {
    "linear attention": (None, False, 1),
    "retnet": ("scalar", False, 1),
    "gla": ("channel", False, 1),
    "mamba2": ("scalar", False, 2),
    "deltanet": (None, True, 1),
    "gated deltanet": ("scalar", True, 1),
    "gated deltanet, grouped": ("scalar", True, 3),
    "gla, grouped": ("channel", False, 2),
    "kda": ("channel", True, 1),
    "kda, grouped": ("channel", True, 2),
}
CLEANINGS = {
    "none": None,
    "unit": {"unit_qk": True},
    "clean": {"normalize": "unit"},
    "uncentred": {"normalize": "unit", "centred": False},
    "stats": {"normalize": "stats"},
    "unit already": {"normalize": "none"},
    "projected": {"normalize": "unit", "step": "projected"},
    "projected, decayed": {"normalize": "unit", "step": "projected", "log_decay": True},
    "decayed, uncentred": {"normalize": "stats", "centred": False, "log_decay": True},
    "projected twice, decayed": {"normalize": "unit", "step": "projected", "steps": 2, "log_decay": True},
    "three steps": {"normalize": "none", "steps": 3},
}
decode_step = torch.no_grad()(checked(ccq.ops.decode_step.__wrapped__))


def draw(writes: str, K: int, V: int, dtype: torch.dtype, T: int = STEPS, B: int = 2, H: int = 2, device="cpu"):
    """[B, T, ...] inputs of T steps."""
    decay, delta, group = WRITES[writes]
    rng = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    shape = {None: None, "scalar": (B, T, H * group), "channel": (B, T, H, K)}[decay]
    g = None if shape is None else torch.nn.functional.logsigmoid(normal(*shape)).float()
    beta = torch.sigmoid(normal(B, T, H * group)).to(dtype) if delta else None
    q, k = unit_vector(normal(B, T, H, K)), unit_vector(normal(B, T, H, K))  # the delta rule wants |k| <= 1
    inputs = (q.to(dtype), k.to(dtype), normal(B, T, H * group, V).to(dtype), g, beta)
    recurrent = normal(B, H * group, K, V).float()
    return [None if x is None else x.to(device) for x in inputs], recurrent.to(device)


@pytest.mark.parametrize("writes", ["gla", "gated deltanet"])
def test_autocast_does_not_reach_the_memory(writes):
    """Autocast would write into an fp32 state what a product in half precision read from it."""
    (q, k, v, g, beta), recurrent = draw(writes, 16, 24, torch.float32, T=1)
    inputs = [x if x is None else x[:, 0] for x in (q, k, v, g, beta)]
    found = []
    for enabled in (False, True):
        state = recurrent.clone()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append((ccq.ops.decode_step(*inputs[:3], state, *inputs[3:], backend="chunk"), state))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def loop(q, k, v, g, beta, state, scale) -> tuple[Tensor, Tensor]:
    """The recurrence, in fp64, written as the equations are."""
    group = v.shape[2] // q.shape[2]
    outputs = []
    for t in range(q.shape[1]):
        rows = []
        for b in range(q.shape[0]):
            for h in range(v.shape[2]):
                s, q_t, k_t, v_t = state[b, h], q[b, t, h // group], k[b, t, h // group], v[b, t, h]
                if g is not None:
                    s = torch.diag(g[b, t, h // group].exp()) @ s if g.ndim == 4 else g[b, t, h].exp() * s
                if beta is not None:
                    v_t = beta[b, t, h] * (v_t - s.T @ k_t)
                state[b, h] = s + torch.outer(k_t, v_t)
                rows.append(scale * state[b, h].T @ q_t)
        outputs.append(torch.stack(rows).view(v.shape[0], v.shape[2], -1))
    return torch.stack(outputs, 1), state


def check(writes, cleaning, K, V, dtype, backend, device="cpu", **sizes):
    inputs, recurrent = draw(writes, K, V, dtype, device=device, **sizes)
    q, _, v, *_ = inputs
    B, T, H, _ = q.shape
    options = dict(CLEANINGS[cleaning] or {})
    unit_qk = options.pop("unit_qk", False)
    rng = torch.Generator().manual_seed(2)
    weight = torch.randn(H, H * K, generator=rng).to(device)
    bias = torch.randn(H, generator=rng).to(device)
    # the truth: clean the whole sequence, then loop
    case = make_case(B=B, T=1, Hq=H, Hk=H, K=K, dtype=dtype, state=True)
    start = case.initial_state.to(device=device, dtype=torch.float32)
    decay = torch.nn.functional.logsigmoid(torch.randn(B, T, H, generator=rng)).to(device)
    if decays := options.pop("log_decay", False):
        start = CovarianceState(start.second_moment, start.key_sum, start.weight + 0.5)
    double = [None if x is None else x.cpu().double() for x in inputs]
    if options:
        lam = torch.sigmoid(double[0].flatten(2) @ weight.cpu().double().T + bias.cpu().double())
        initial, faded = start.to("cpu", torch.float64), decay.cpu().double() if decays else None
        double[0], double[1], end = clean_query(
            *double[:2], lam, initial_state=initial, output_final_state=True, backend="reference", log_decay=faded,
            **options,
        )  # fmt: skip
    elif unit_qk:
        double[0], double[1] = unit_vector(double[0]), unit_vector(double[1])
    expected, state = loop(*double, recurrent.cpu().double(), K**-0.5)

    covariance = start.clone()
    got = []
    for t in range(T):
        at = [None if x is None else x[:, t] for x in inputs]
        log_decay = decay[:, t] if decays else None
        how = Cleaning(covariance, gate=(weight, bias), log_decay=log_decay, **options) if options else None
        got.append(decode_step(*at[:3], recurrent, *at[3:], unit_qk=unit_qk, cleaning=how, backend=backend))
    coarse = dtype != torch.float32 and (unit_qk or options)  # q_clean and k_bar are rounded to the dtype
    assert got[0].dtype == v.dtype
    assert_close("o", expected, torch.stack(got, 1).cpu(), max(TOLERANCE[dtype] * (2 if coarse else 1), 1e-6))
    assert_close("recurrent", state, recurrent.cpu(), TOLERANCE[dtype if coarse else torch.float32])
    if options and not (coarse and options["normalize"] == "unit"):
        assert_same_state(end, covariance.to("cpu"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("cleaning", ["none", "clean"])
def test_every_write_matches_the_loop(writes, cleaning, backend, nan_in_fresh_memory):
    check(writes, cleaning, 16, 24, torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cleaning", CLEANINGS)
def test_every_cleaning_matches_the_loop(cleaning, backend, nan_in_fresh_memory):
    check("gated deltanet", cleaning, 16, 24, torch.float32, backend)


@pytest.mark.parametrize("cleaning", ["clean", "projected twice, decayed"])
@pytest.mark.parametrize("K", [20, 72, 192])  # one partial block; several blocks of the covariance, the last partial
def test_awkward_key_sizes_match_the_loop(K, cleaning, nan_in_fresh_memory):
    check("gla", cleaning, K, 40, torch.float32, "triton", T=3, H=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_matches_the_loop(backend):
    check("gla", "clean", 16, 24, torch.float16, backend)


# Triton's interpreter cuts bf16 off instead of rounding it
@pytest.mark.parametrize(("backend", "dtype"), [("chunk", torch.bfloat16), ("chunk", HALF), ("triton", HALF)], ids=str)
def test_the_covariance_is_of_the_key_that_is_written(backend, dtype):
    """Of k_bar as it is rounded: C - k_bar k_bar^T and s - k_bar are exactly 0 after one step, in the memory too."""
    (q, k, v, _, _), recurrent = draw("linear attention", 16, 8, dtype, T=1)
    seen, written = CovarianceState.zeros(2, 2, 16), torch.zeros_like(recurrent)
    decode_step(q[:, 0], k[:, 0], v[:, 0], written, cleaning=Cleaning(seen, lam=torch.ones(2, 2)), backend=backend)
    k_bar = ccq.clean_query(q, k, torch.ones(2, 1, 2), backend="chunk")[1][:, 0].float()
    assert torch.equal(seen.second_moment, k_bar[..., :, None] * k_bar[..., None, :])
    assert torch.equal(seen.key_sum, k_bar)
    assert torch.equal(written, k_bar[..., :, None] * v[:, 0].float()[..., None, :])


def check_half_state(writes, backend, device="cpu"):
    """Each step from the same rounded state: what it reads is not rounded, what it leaves is, once."""
    inputs, state = draw(writes, 20, 12, torch.float32, device=device)
    half = state.bfloat16()
    truncates = (backend, device) == ("triton", "cpu")  # as Triton's interpreter does, and no GPU
    for t in range(STEPS):
        exact = [None if x is None else x[:, t : t + 1].double() for x in inputs]
        ref, after = loop(*exact, half.double(), 20**-0.5)
        q, k, v, g, beta = (None if x is None else x[:, t] for x in inputs)
        o = decode_step(q, k, v, half, g, beta, backend=backend)
        assert half.dtype == torch.bfloat16
        assert_close("o", ref[:, 0], o, TOLERANCE[torch.float32])
        assert_close("state", after, half.double(), 2**-7 if truncates else 2**-8)
        assert truncates or (half == after.bfloat16()).double().mean() > 0.99  # fp32 may be across a tie


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("writes", ["gla", "gated deltanet, grouped"])
def test_a_state_in_bf16_is_rounded_once_a_step(writes, backend, nan_in_fresh_memory):
    check_half_state(writes, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("writes", ["gla", "gated deltanet, grouped"])
def test_a_state_in_bf16_is_rounded_once_a_step_on_a_gpu(writes):
    check_half_state(writes, "triton", "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_given_lam_and_another_query_for_the_gate(backend):
    (q, k, v, g, _), recurrent = draw("gla", 16, 8, torch.float32, T=1)
    raw, weight, bias = torch.randn(2, 2, 24), torch.randn(2, 48), torch.randn(2)
    lam = ccq.ops.gate(raw, weight, bias)
    results = []
    for how in ({"lam": lam}, {"gate": (weight, bias), "raw": raw}):
        states = recurrent.clone(), CovarianceState.zeros(2, 2, 16)
        o = decode_step(
            q[:, 0], k[:, 0], v[:, 0], states[0], g[:, 0], cleaning=Cleaning(states[1], **how), backend=backend
        )
        results.append(o)
    assert_close("o", results[0], results[1], 1e-6)


def test_the_covariance_is_whole_whenever_it_is_looked_at():
    """The kernel keeps the lower triangle only; an asymmetric start counts by its symmetric part."""
    (q, k, v, g, _), recurrent = draw("gla", 72, 8, torch.float32, T=4)
    start = make_case(B=2, T=1, Hq=2, Hk=2, K=72, state=True).initial_state.to(dtype=torch.float32)
    start.second_moment = start.second_moment + torch.randn(72, 72).tril(-1)
    states = {backend: start.clone() for backend in BACKENDS}
    for t in range(4):
        for backend, state in states.items():
            how = Cleaning(state, lam=torch.full((2, 2), 0.5))
            decode_step(q[:, t], k[:, t], v[:, t], recurrent.clone(), g[:, t], cleaning=how, backend=backend)
        whole = states["triton"].clone() if t % 2 else states["triton"]  # a copy, and the state itself
        chunk = states["chunk"].second_moment
        assert torch.equal(whole.second_moment, whole.second_moment.mT)
        assert_close("C", (chunk + chunk.mT) / 2, whole.second_moment, 1e-6)


def test_bad_arguments_are_named():
    (q, k, v, g, beta), recurrent = draw("gated deltanet", 16, 8, torch.float32, T=1)
    q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g, beta))
    call = ccq.ops.decode_step
    with pytest.raises(ValueError, match=r"k: expected the shape of q"):
        call(q, k[:1], v, recurrent)
    with pytest.raises(ValueError, match=r"v: expected shape \[2, Hv, V\], Hv a multiple of q's 2 heads"):
        call(q, k, v[:, :1], recurrent)
    with pytest.raises(ValueError, match=r"recurrent: expected torch.float32 of shape"):
        call(q, k, v, recurrent.double())
    with pytest.raises(ValueError, match=r"g: expected shape"):
        call(q, k, v, recurrent, g[:, :1])
    with pytest.raises(ValueError, match=r"beta: expected shape"):
        call(q, k, v, recurrent, g, beta[:1])
    with pytest.raises(ValueError, match=r"either lam or gate"):
        call(q, k, v, recurrent, cleaning=Cleaning(CovarianceState.zeros(2, 2, 16)))
    with pytest.raises(ValueError, match=r"q: expected a float tensor"):
        call(q.long(), k, v, recurrent)


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "V", "B", "H"), [(256, 512, 1, 6), (256, 512, 8, 6), (128, 64, 4, 1), (96, 80, 3, 2)])
@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("cleaning", ["none", "clean", "stats"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_real_sizes_match_the_loop(writes, cleaning, dtype, K, V, B, H):
    check(writes, cleaning, K, V, dtype, "triton", device="cuda", B=B, H=H, T=3)


@pytest.mark.gpu
def test_a_captured_step_decodes_as_an_eager_one():
    (q, k, v, g, beta), recurrent = draw("gated deltanet", 256, 512, torch.bfloat16, T=8, H=6, device="cuda")
    states = [recurrent.clone(), CovarianceState.zeros(2, 6, 256, device="cuda")]
    weight, bias = torch.randn(6, 6 * 256, device="cuda"), torch.zeros(6, device="cuda")

    def step(x, s):
        how = Cleaning(s[1], gate=(weight, bias))
        return ccq.ops.decode_step(*x[:3], s[0], *x[3:], cleaning=how)

    tokens = [[x[:, t].contiguous() for x in (q, k, v, g, beta)] for t in range(8)]
    eager = torch.stack([step(x, states) for x in tokens])
    static = [x.clone() for x in tokens[0]]
    captured = [recurrent.clone(), CovarianceState.zeros(2, 6, 256, device="cuda")]
    warm = [recurrent.clone(), CovarianceState.zeros(2, 6, 256, device="cuda")]
    captured[1].lower_triangle()
    step(static, warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(static, captured)
    got = []
    for x in tokens:
        for a, b in zip(static, x, strict=True):
            a.copy_(b)
        graph.replay()
        got.append(out.clone())
        captured[1].second_moment.sum()  # looking at it between steps harms nothing
    assert torch.equal(torch.stack(got), eager)
    assert torch.equal(captured[1].second_moment, states[1].second_moment)
    assert captured[1].count.tolist() == [8, 8]


def one_token(B=2, H=2, K=16, V=8):
    (q, k, v, g, _), recurrent = draw("gla", K, V, torch.float32, T=1, B=B, H=H)
    return (q[:, 0], k[:, 0], v[:, 0], recurrent, g[:, 0]), CovarianceState.zeros(B, H, K)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("one sequence of two", r"second_moment: expected shape \(2, 2, 16, 16\), got \(1, 2, 16, 16\)"),
        ("three heads", r"second_moment: expected shape \(2, 2, 16, 16\), got \(2, 3, 16, 16\)"),
        ("fp64", "second_moment: expected torch.float32"),
        ("lam of another shape", r"lam: expected shape"),
        ("lam of 5", "lam: expected values from 0 to 1"),
        ("a narrow gate", r"weight: expected shape \(2, 32\)"),
        ("a raw query of other heads", r"cleaning.raw: expected shape"),
        ("normalize", "Did you mean 'unit'"),
        ("keys in bf16", "k: expected q's dtype"),
    ],
)
def test_a_cleaning_that_does_not_fit_is_refused(what, words, backend):
    (q, k, *rest), seen = one_token()
    by = {"lam": torch.full((2, 2), 0.5)}
    if what == "one sequence of two":
        seen = seen.index_select(torch.tensor([0]))
    elif what == "three heads":
        seen = CovarianceState.zeros(2, 3, 16)
    elif what == "fp64":
        seen = seen.to(dtype=torch.float64)
    elif what == "lam of another shape":
        by = {"lam": torch.full((2, 7, 2), 0.5)}
    elif what == "lam of 5":
        by = {"lam": torch.full((2, 2), 5.0)}
    elif what == "a narrow gate":
        by = {"gate": (torch.zeros(2, 31), torch.zeros(2))}
    elif what == "a raw query of other heads":
        by = {"gate": (torch.zeros(2, 32), torch.zeros(2)), "raw": torch.zeros(2, 4, 8)}
    elif what == "normalize":
        by |= {"normalize": "unti"}
    else:
        k = k.bfloat16()
    with pytest.raises((ValueError, TypeError), match=words):
        ccq.ops.decode_step(q, k, *rest, cleaning=Cleaning(seen, **by), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequence_at_all(backend):
    arguments, seen = one_token(B=0)
    out = decode_step(*arguments, cleaning=Cleaning(seen, lam=torch.zeros(0, 2)), backend=backend)
    assert out.shape == (0, 2, 8)


def test_a_covariance_of_inference_mode_can_be_read_outside():
    arguments, _ = one_token()
    with torch.inference_mode():
        seen = CovarianceState.zeros(2, 2, 16)
        ccq.ops.decode_step(*arguments, cleaning=Cleaning(seen, lam=torch.zeros(2, 2)), backend="triton")
    key = torch.nn.functional.normalize(arguments[1], dim=-1)
    torch.testing.assert_close(seen.clone().second_moment, key[..., :, None] * key[..., None, :], rtol=0, atol=1e-6)
    assert seen.second_moment.mT.equal(seen.second_moment)
