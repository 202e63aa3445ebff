"""The chunkwise recurrence against a token loop in fp64 and against what fla and transformers compute.

B sequences (or N packed ones), T tokens, H query and key heads, Hv value heads, K key size, V value size.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from itertools import accumulate, pairwise, product

import pytest
import torch
from helpers import TOLERANCE, assert_close, checked, unit_vector
from torch import Tensor

import ccq.ops.recurrence as module
from ccq.ops import BackendUnavailableError
from ccq.ops.recurrence import chunk, flops
from ccq.ops.recurrence.chunk import CHUNK

recurrence = checked(module.recurrence)
pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

KINDS = ("plain", "scalar", "channel", "delta", "gated delta", "channel delta")
DECAYS = (0.0, -1e-4, -5.0, -50.0)
LENGTHS = (1, 2, 3, 63, 64, 65, 100, 257)
PACKED = ([3, 0, 65], [0, 64, 1, 130], [5, 70, 0, 0], [0, 0], [1], [64, 64], [2, 129, 2, 66, 128])


def token_loop(q, k, v, g=None, beta=None, scale=None, initial_state=None, cu_seqlens=None) -> tuple[Tensor, Tensor]:
    """The definition, token by token; everything here in fp64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    decay = None
    if g is not None:
        decay = g.exp()[..., None, None] if g.ndim == 3 else g.repeat_interleave(group, 2).exp()[..., None]
    borders = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, finals = [], []
    for n, (begin, end) in enumerate(pairwise(borders)):
        if initial_state is None:
            S = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
        else:
            S = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        for t in range(begin, end):
            if decay is not None:
                S = S * decay[:, t]
            u = v[:, t]
            if beta is not None:
                u = beta[:, t, :, None] * (u - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
            S = S + k[:, t, :, :, None] * u[:, :, None, :]
            outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        finals.append(S)
    o = torch.stack(outputs, 1) if outputs else v * 1
    return o, torch.cat(finals)


def make_case(
    kind: str, T: int = 65, B: int = 2, H: int = 2, G: int = 1, K: int = 8, V: int = 6, *,
    lengths: list[int] | None = None, state: bool = False, decays: tuple[float, ...] | None = None, seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Arguments of one call, fp64. `decays`: drawn from these by each token, instead of smoothly."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    case: dict[str, Tensor] = {}
    sequences = B
    if lengths is not None:
        case["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)])
        sequences, B, T = len(lengths), 1, sum(lengths)
    delta = "delta" in kind
    q, k = normal(B, T, H, K), normal(B, T, H, K)
    case |= {"q": q, "k": unit_vector(k) if delta else k, "v": normal(B, T, H * G, V)}
    if kind not in ("plain", "delta"):
        shape = (B, T, H, K) if "channel" in kind else (B, T, H * G)
        if decays is None:
            case["g"] = -normal(*shape).square() / 4
        else:
            case["g"] = torch.tensor(decays, dtype=torch.float64)[torch.randint(len(decays), shape, generator=rng)]
    if delta:
        case["beta"] = normal(B, T, H * G).sigmoid()
    if state:
        case["initial_state"] = normal(sequences, H * G, K, V)
    return case


def results(run, case: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Output, final state if there is one, and the gradient of every input through both, for cotangents drawn from the
    seed."""
    rng = torch.Generator().manual_seed(seed)
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in case.items()}
    made = {name: x for name, x in zip(("o", "state"), run(**leaves), strict=True) if x is not None}
    cotangents = [torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x) for x in made.values()]
    inputs = {name: x for name, x in leaves.items() if x.requires_grad}
    outputs = [(x, dx) for x, dx in zip(made.values(), cotangents, strict=True) if x.requires_grad]
    values, cotangents = zip(*outputs, strict=True)  # the state of no tokens is a constant
    grads = torch.autograd.grad(values, list(inputs.values()), cotangents, materialize_grads=True)
    return made | {f"gradient of {n}": x for n, x in zip(inputs, grads, strict=True)}


def ours(**case) -> tuple[Tensor, Tensor]:
    return recurrence(**case, output_final_state=True)


def cast(case: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in case.items()}


def assert_same(ref: dict[str, Tensor], got: dict[str, Tensor], ratio: float) -> None:
    assert ref.keys() == got.keys()
    for name in ref:
        assert_close(name, ref[name], got[name], ratio)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_chunkwise_is_the_token_loop(kind, T):
    case = make_case(kind, T, B=1 if T > 100 else 2, state=T % 2 == 1)
    ref = results(token_loop, case)
    # a chunk adds in another order than the loop, and the solve multiplies roundings up to a few times
    assert_same(ref, results(ours, case), 10 * TOLERANCE[torch.float64])
    assert_same(ref, results(ours, cast(case, torch.float32)), 10 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("lengths", PACKED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_separate(kind, lengths):
    case = make_case(kind, lengths=lengths, H=1, state=len(lengths) % 2 == 0)
    assert_same(results(token_loop, case), results(ours, case), 10 * TOLERANCE[torch.float64])


@pytest.mark.parametrize("decay", [*((d,) for d in DECAYS), DECAYS], ids=str)
@pytest.mark.parametrize("kind", ["scalar", "channel", "gated delta", "channel delta"])
def test_no_decay_overflows_or_drowns_its_neighbour(kind, decay):
    """Sums of 64 times -50 beside steps of 1e-4: in fp32 a difference of such sums has no digits left of the step."""
    case = make_case(kind, T=130, B=1, decays=decay, state=True)
    ref = results(token_loop, case)
    assert_same(ref, results(ours, case), 10 * TOLERANCE[torch.float64])
    assert_same(ref, results(ours, cast(case, torch.float32)), 10 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", KINDS)
def test_value_heads_share_a_key_head(kind):
    case = make_case(kind, T=70, H=2, G=3, state=True)
    assert_same(results(token_loop, case), results(ours, case), 10 * TOLERANCE[torch.float64])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_may_be_cut_anywhere(kind):
    case = make_case(kind, T=100)
    whole, final = recurrence(**case, output_final_state=True)
    for cut in (1, 37, 64, 99):
        state, parts = None, []
        for piece in (slice(0, cut), slice(cut, None)):
            tokens = {name: x[:, piece] for name, x in case.items()}
            o, state = recurrence(**tokens, initial_state=state, output_final_state=True)
            parts.append(o)
        assert_close(f"o, cut at {cut}", whole, torch.cat(parts, 1), 10 * TOLERANCE[torch.float64])
        assert_close(f"state, cut at {cut}", final, state, 10 * TOLERANCE[torch.float64])


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_leave_the_state(kind):
    case = make_case(kind, T=0, state=True)
    got = results(ours, case)
    assert got["o"].shape == (2, 0, 2, 6)
    assert torch.equal(got["state"], case["initial_state"])
    assert got["gradient of q"].shape == case["q"].shape
    case.pop("initial_state")
    state = recurrence(**case, output_final_state=True)[1]
    assert not state.any()
    assert recurrence(**case)[1] is None


def test_the_initial_state_is_left_alone():
    case = make_case("scalar", T=3, state=True)
    before = case["initial_state"].clone()
    _, state = recurrence(**case, output_final_state=True)
    state.zero_()
    assert torch.equal(case["initial_state"], before)
    none = {name: x[:, :0] if name != "initial_state" else x for name, x in case.items()}
    recurrence(**none, output_final_state=True)[1].zero_()
    assert torch.equal(case["initial_state"], before)


def test_half_precision_is_fp32_inside():
    case = cast(make_case("gated delta", T=65), torch.bfloat16)
    g, beta = case["g"].float(), case["beta"].float()
    o, state = recurrence(**case | {"g": g, "beta": beta}, output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        under, _ = recurrence(**case | {"g": g, "beta": beta})
    assert torch.equal(o, under)
    ref, ref_state = token_loop(**cast(case, torch.float64))
    assert_close("o", ref, o, TOLERANCE[torch.bfloat16])
    assert_close("state", ref_state, state, 10 * TOLERANCE[torch.float32])


# What others compute. Theirs is fp32 throughout, so both sides round.


@pytest.fixture(scope="module")
def fla():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its kernels do not run here
        return importlib.import_module("fla.ops")


def others(kind: str):
    """(name, function of our arguments) of implementations nobody here wrote."""
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla, naive_recurrent_simple_gla
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    def options(initial_state):
        return {"initial_state": initial_state, "output_final_state": True}

    if kind == "channel":
        yield "fla naive", lambda q, k, v, g, initial_state: naive_recurrent_gla(q, k, v, g, **options(initial_state))
    if kind == "scalar":
        for f in (naive_recurrent_simple_gla, naive_chunk_simple_gla):
            yield f.__name__, lambda q, k, v, g, initial_state, f=f: f(q, k, v, g, **options(initial_state))
    if kind == "delta":
        yield (
            "fla delta_rule_recurrence",
            lambda q, k, v, beta, initial_state: (
                lambda o, S: (o.transpose(1, 2), S)
            )(*delta_rule_recurrence(*(x.transpose(1, 2) for x in (q, k, v, beta)), **options(initial_state))),
        )  # fmt: skip
    if kind == "channel delta":
        for f, more in ((naive_recurrent_kda, {}), (naive_chunk_kda, {"chunk_size": 50})):
            yield (
                f.__name__,
                lambda q, k, v, g, beta, initial_state, f=f, more=more: f(
                    q, k, v, g, beta, **options(initial_state), **more
                ),
            )
    if kind == "gated delta":
        for f in (naive_recurrent_gated_delta_rule, naive_chunk_gated_delta_rule):
            yield (
                f.__name__,
                lambda q, k, v, g, beta, initial_state, f=f: f(q, k, v, g=g, beta=beta, **options(initial_state)),
            )
        for wrapped in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
            # with fla installed transformers calls its kernels under this name; the plain function is underneath
            f = inspect.unwrap(wrapped)
            assert "torch" in f.__name__
            assert "transformers" in f.__code__.co_filename
            yield (
                f"qwen3-next {f.__name__}",
                lambda q, k, v, g, beta, initial_state, f=f: f(q, k, v, g=g, beta=beta, **options(initial_state)),
            )


@pytest.mark.parametrize("kind", KINDS[1:])
def test_same_as_other_implementations(fla, kind):
    case = cast(make_case(kind, T=100, K=16, V=32, state=True), torch.float32)
    got = results(ours, case)
    for name, run in others(kind):
        print(name)
        assert_same(results(run, case), got, 1e-5)


def test_same_as_transformers_mamba2_scan():
    """S_t = exp(A dt) S + dt B x^T, y = C S: k = B, v = dt x, q = C, g = A dt, scale 1, heads in groups."""
    from transformers.models.mamba2 import modeling_mamba2

    rng = torch.Generator().manual_seed(0)
    B, T, heads, P, groups, N = 2, 77, 6, 8, 2, 16
    x, b, c = (torch.randn(B, T, h, s, generator=rng) for h, s in ((heads, P), (groups, N), (groups, N)))
    dt, A = torch.rand(B, T, heads, generator=rng), -torch.rand(heads, generator=rng)
    scan = inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)
    ref, ref_state = scan(x, dt, A, b, c, chunk_size=16, return_final_states=True)
    o, state = recurrence(c, b, x * dt[..., None], g=A * dt, scale=1.0, output_final_state=True)
    assert_close("o", ref, o, 1e-5)
    assert_close("state", ref_state, state.mT, 1e-5)


# Dispatch, costs, complaints


def test_fla_is_refused_where_it_cannot_run():
    with pytest.raises(BackendUnavailableError, match="cannot run recurrence on cpu"):
        recurrence(**make_case("plain", T=3), backend="triton")


def fake(monkeypatch, package: str, name: str, calls: list) -> None:
    """fla's function replaced by ours: what is tested is the call, since no kernel runs here."""

    def stand_in(q, k, v, *rest, scale, initial_state, output_final_state, cu_seqlens, **options):
        calls.append(name)
        assert isinstance(scale, float)
        # fla's layout of states may be another where nobody sees it
        assert options.pop("state_v_first", None) == (None if name == "chunk_delta_rule" else not output_final_state)
        assert initial_state is None or output_final_state
        grouping = name in ("chunk_gated_delta_rule", "chunk_kda")
        assert options == ({"use_qk_l2norm_in_kernel": False} if grouping else {})
        assert q.shape[2] == v.shape[2] or grouping, "only these group value heads"
        g, beta = {"chunk_delta_rule": (None, rest[0])}.get(name) or (rest + (None,))[:2]
        assert g is None or g.ndim == (4 if name in ("chunk_gla", "chunk_kda") else 3)
        if name == "chunk_kda":  # its decays are the value heads', ours the key heads'
            assert g.shape == (*v.shape[:3], q.shape[3])
            g = g[:, :, :: v.shape[2] // q.shape[2]]
        tail = (initial_state, output_final_state, cu_seqlens)
        return chunk.run(q, k, v, g, beta, scale, *tail)

    monkeypatch.setattr(importlib.import_module(package), name, stand_in)


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("plain", torch.float32, "chunk_simple_gla"),
        ("scalar", torch.float32, "chunk_simple_gla"),
        ("channel", torch.float32, "chunk_gla"),
        ("delta", torch.bfloat16, "chunk_delta_rule"),
        ("delta", torch.float32, "chunk_gated_delta_rule"),  # fla's delta rule without a decay refuses fp32
        ("gated delta", torch.float32, "chunk_gated_delta_rule"),
        ("channel delta", torch.float32, "chunk_kda"),
    ],
)
@pytest.mark.parametrize("group", [1, 2])
def test_fla_is_called_as_it_asks(fla, monkeypatch, kind, dtype, expected, group):
    calls: list[str] = []
    for package, name in (
        ("fla.ops.gla", "chunk_gla"),
        ("fla.ops.simple_gla", "chunk_simple_gla"),
        ("fla.ops.delta_rule", "chunk_delta_rule"),
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        ("fla.ops.kda", "chunk_kda"),
    ):
        fake(monkeypatch, package, name, calls)
    for state in (True, False):
        case = make_case(kind, T=5, G=group, state=state)
        case = {n: x.to(torch.float32 if n in ("g", "beta", "initial_state") else dtype) for n, x in case.items()}
        run = functools.partial(recurrence, output_final_state=state)
        ref = results(run, case)
        with monkeypatch.context() as patch:
            patch.setattr(module, "choose", lambda *_: "fla")
            assert_same(ref, results(run, case), 1e-2 if dtype == torch.bfloat16 else 1e-6)
    if group == 2 and kind == "delta":
        expected = "chunk_gated_delta_rule"
    assert set(calls) == {expected}


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("lengths", [[3, 0, 65, 130, 0], [0, 7], [5, 6]], ids=str)
def test_flash_qla_sees_no_empty_sequence(fla, monkeypatch, lengths, state):
    """It refuses them, and wants decays in fp32. Their state stays what it was, or zero."""
    from ccq.ops.recurrence import fla as through_fla

    def refuses_empty(q, k, v, g, beta, *, scale, initial_state=None, output_final_state, cu_seqlens, **_):
        assert cu_seqlens.diff().min() > 0
        assert g.dtype == torch.float32
        return chunk.run(q, k, v, g.to(q), beta, scale, initial_state, output_final_state, cu_seqlens)

    monkeypatch.setattr(importlib.import_module("fla.ops.gated_delta_rule"), "chunk_gated_delta_rule", refuses_empty)
    case = cast(make_case("gated delta", lengths=lengths, V=128, state=state), torch.float32)
    run = functools.partial(recurrence, output_final_state=True)
    ref = results(run, case)
    monkeypatch.setattr(module, "choose", lambda *_: "flash-qla")
    monkeypatch.setattr(through_fla, "qla_refuses", lambda call: None)
    assert_same(ref, results(run, case), 1e-6)
    half = (
        cast(case, torch.bfloat16) | {"initial_state": case["initial_state"]} if state else cast(case, torch.bfloat16)
    )
    run(**half)


def test_flops_count_the_matrix_products(monkeypatch):
    """Against PyTorch's own counter: of the products of the additive form, in full chunks."""
    from torch.utils.flop_counter import FlopCounterMode

    case = make_case("plain", T=4 * CHUNK, B=1, H=2, K=16, V=32)
    with FlopCounterMode(display=False) as counter:
        recurrence(**case)
    assert counter.get_total_flops() == flops(2, 16, 32) * 4 * CHUNK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 5, 8)}, r"q: expected shape \[B, T, H, K\], got \(2, 5, 8\)"),
        ({"k": torch.zeros(2, 5, 2, 7)}, r"k: expected the shape of q \(2, 5, 2, 8\), got \(2, 5, 2, 7\)"),
        ({"v": torch.zeros(2, 5, 3, 8)}, r"v: expected shape \[2, 5, Hv, V\], Hv a multiple of q's 2 heads"),
        ({"g": torch.zeros(2, 5, 1)}, r"g: expected shape \(2, 5, 2\) or \(2, 5, 2, 8\), got \(2, 5, 1\)"),
        ({"beta": torch.zeros(2, 5, 3)}, r"beta: expected shape \(2, 5, 2\), got \(2, 5, 3\)"),
        ({"initial_state": torch.zeros(2, 2, 8, 5)}, "initial_state: expected torch.float32 of shape"),
        ({"initial_state": torch.zeros(2, 2, 8, 6).double()}, "initial_state: expected torch.float32 of shape"),
        (
            {"cu_seqlens": torch.tensor([0, 5])},
            "cu_seqlens: expected sequences packed in a batch of 1, got a batch of 2",
        ),
        ({"backend": "chunks"}, "Did you mean 'chunk'"),
    ],
)
def test_errors_name_the_argument(change, message):
    case = cast(make_case("plain", T=5), torch.float32)
    with pytest.raises(ValueError, match=message):
        module.recurrence(**case | change)


def test_dtypes_must_agree():
    case = cast(make_case("plain", T=5), torch.float32)
    with pytest.raises(TypeError, match=r"v: expected q's dtype torch.float32, got torch.float64"):
        module.recurrence(**case | {"v": case["v"].double()})


def test_borders_are_checked():
    case = make_case("plain", lengths=[3, 2])
    for borders, message in (([0, 3, 6], "end at T = 5"), ([1, 5], "start at 0"), ([0, 4, 3, 5], "no decrease")):
        with pytest.raises(ValueError, match=message):
            recurrence(**case | {"cu_seqlens": torch.tensor(borders)})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_fla_on_a_gpu_is_the_same(kind, group, dtype):
    """fla's kernels, dense and packed with an empty sequence, with states and without, against plain PyTorch: all
    outputs and gradients."""
    for state, shape in product((True, False), ({"T": 100}, {"lengths": [3, 0, 65, 130]})):
        case = make_case(kind, K=32, V=64, G=group, state=state, **shape)
        full = ("g", "beta", "initial_state")
        case = {n: x.to(dtype if x.is_floating_point() and n not in full else x.dtype) for n, x in case.items()}
        case = {n: x.float() if n in full else x for n, x in case.items()}
        ref, got = (
            results(functools.partial(module.recurrence, output_final_state=state, backend=backend), given)
            for backend, given in (("chunk", case), ("triton", {n: x.cuda() for n, x in case.items()}))
        )
        # its products are TF32 (2^-11) or bf16 (2^-8), some of them one after another
        assert_same({n: x.cuda() for n, x in ref.items()}, got, 2**-7 if dtype == torch.float32 else 2**-5)
