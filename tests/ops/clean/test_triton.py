"""The Triton kernels against the fp64 reference: interpreted on a CPU at small sizes, on a GPU at real ones.

Interpreted, the tiles are 16 tokens and the chunks 32, so that 70 tokens already cross every kind of border.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from helpers import (
    DISTRIBUTIONS,
    LAYOUTS,
    NORMALIZE,
    assert_close,
    assert_effect,
    assert_same_results,
    clean_query,
    clean_query_step,
    correction,
    error,
    laid_out_results,
    make_case,
    results,
    to_gpu,
    truth,
    uncancelled,
    unit_vector,
    without_step,
)
from scripts import script

from ccq import CovarianceState
from ccq.ops import BackendUnavailableError, choose
from ccq.ops.clean import chunk

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
from ccq.ops.clean.triton import launch
from ccq.ops.clean.triton.configs import PASSES

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only where there is no GPU")
on_gpu = pytest.mark.gpu

SHAPES = [
    {"T": 70, "B": 2, "Hq": 2, "Hk": 1, "K": 16},
    {"T": 33, "B": 1, "Hq": 2, "Hk": 2, "K": 33},
    {"T": 1, "B": 1, "Hq": 1, "Hk": 1, "K": 7},
    {"lengths": [0, 40, 3, 0, 0, 17, 0], "Hq": 2, "Hk": 1, "K": 16},
]
MODES = [{"normalize": n, "centred": c} for n, c in (("unit", True), ("stats", True), ("none", False), ("unit", False))]


@interpreted
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("state", [True, False], ids=["continued", "begun"])
def test_interpreted_kernels_match_reference(shape, state):
    mode = MODES[(shape + 2 * state) % len(MODES)]  # every mode with every kind of shape would take minutes
    case = make_case(**SHAPES[shape], state=state, dtype=torch.float32, unit=mode["normalize"] == "none")
    assert_same_results(truth(case, **mode), results(case, "triton", **mode), uncancelled(case, **mode))


# Beside the paper's read: the step, the decay, and with which shape, mode and state
READ_SHAPES = [{"T": 45, "B": 1, "Hq": 2, "Hk": 1, "K": 16}, {"lengths": [0, 35, 2], "Hq": 1, "Hk": 1, "K": 16}]
READS = [
    ("projected", None, 1, 1, False),
    ("projected", "given", 0, 0, False),
    ("projected", "given", 1, 2, True),
    ("projected", "learned", 0, 0, True),
    ("projected", "learned", 1, 3, False),
    ("scaled", "learned", 0, 1, True),
    ("scaled", "given", 1, 0, True),
    ("scaled", "sudden", 0, 0, False),
]


@interpreted
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize(("step", "decay", "shape", "mode", "state"), READS)
def test_interpreted_kernels_match_reference_in_every_read(step, decay, shape, mode, state):
    mode = {**MODES[mode], "step": step}
    unit = mode["normalize"] == "none"
    case = make_case(**READ_SHAPES[shape], state=state, dtype=torch.float32, unit=unit, decay=decay, earlier=3)
    assert_same_results(truth(case, **mode), results(case, "triton", **mode), uncancelled(case, **mode))


PLAIN: dict = {}  # results by shape and mode: every layout is compared with them


def plain_results(shape, normalize, case):
    if (shape, normalize) not in PLAIN:
        PLAIN[shape, normalize] = results(case, "triton", normalize=normalize)
    return PLAIN[shape, normalize]


@interpreted
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize(
    ("layout", "normalize", "shape"),
    [(layout, "unit", shape) for layout in LAYOUTS for shape in ({"T": 20, "B": 2}, {"lengths": [3, 0, 17]})]
    + [("a slice of a wider tensor", n, {"T": 20, "B": 2}) for n in NORMALIZE if n != "unit"],
    ids=str,
)
def test_layout_in_memory_changes_no_bit(layout, normalize, shape):
    plain = make_case(**shape, Hq=4, Hk=2, K=7, state=True, dtype=torch.float32, unit=normalize == "none")
    ref = plain_results(str(shape), normalize, plain)
    for name, x in laid_out_results(plain, layout, "triton", normalize=normalize).items():
        assert torch.equal(x, ref[name]), name


@interpreted
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("keys", ["few strong directions", "strong mean"])
def test_interpreted_kernels_match_reference_in_fp16(keys):
    case = make_case(T=50, B=1, Hq=1, Hk=1, K=16, dtype=torch.float16, keys=keys)
    got = results(case, "triton")
    assert_same_results(truth(case, k_bar=got["k_bar"]), got, uncancelled(case))


@interpreted
@pytest.mark.parametrize(
    ("changed", "why"), [({"dtype": torch.float64}, "float64"), ({"dtype": torch.float32, "K": 257}, "257")], ids=str
)
def test_kernels_refuse_what_they_cannot_hold(changed, why):
    case = make_case(B=1, T=2, Hq=1, Hk=1, **changed)
    with pytest.raises(BackendUnavailableError, match=why):
        clean_query(*case.args, backend="triton")


@interpreted
def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    choose.forget()
    case = make_case(B=1, T=2, dtype=torch.float32)
    with pytest.raises(BackendUnavailableError, match="cpu are not on an NVIDIA GPU"):
        clean_query(*case.args, backend="triton")
    choose.forget()


# On a GPU


# Largest relative RMS error of the kernels, products in the dtype: half a step of bf16 is 2^-9, and a score that passed
# two products carries three such roundings; fp32 goes through three tf32 products, fp16 through one (10 bits)
GPU_TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1.5e-3, torch.float32: 5e-6}
GPU_SHAPES = [
    {"T": 1000, "B": 2, "Hq": 6, "Hk": 6, "K": 256},
    {"T": 65, "B": 3, "Hq": 4, "Hk": 2, "K": 128},
    {"T": 515, "B": 1, "Hq": 6, "Hk": 1, "K": 96},
    {"T": 64, "B": 1, "Hq": 2, "Hk": 2, "K": 16},
    {"lengths": [0, 700, 3, 0, 0, 129, 64, 0], "Hq": 4, "Hk": 2, "K": 64},
    {"lengths": [500, 0, 3, 300], "Hq": 4, "Hk": 2, "K": 256},
]


def has_hopper_kernels() -> bool:
    return choose.hopper_refuses(choose.Call(torch.device("cuda"), torch.bfloat16, 256, 4096)) is None


HOPPER_SHAPES = [
    {"T": 1000, "B": 2, "Hq": 4, "Hk": 2, "K": 256},
    {"T": 777, "B": 3, "Hq": 2, "Hk": 2, "K": 128},
    {"T": 128, "B": 1, "Hq": 1, "Hk": 1, "K": 256},
    {"T": 4100, "B": 2, "Hq": 6, "Hk": 6, "K": 256},  # several tiles a program
    {"T": 1000, "B": 2, "Hq": 4, "Hk": 2, "K": 64},
    {"lengths": [1, 63, 0, 64, 65, 128, 129, 700, 0], "Hq": 4, "Hk": 2, "K": 256},
    {"lengths": [0, 300, 3, 2000, 5, 190], "Hq": 6, "Hk": 6, "K": 128},
    {"lengths": [700, 0, 1, 129, 64, 4000], "Hq": 6, "Hk": 3, "K": 64},
]


@on_gpu
@pytest.mark.parametrize("dtype", GPU_TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", range(len(GPU_SHAPES)))
@pytest.mark.parametrize("state", [True, False], ids=["continued", "begun"])
def test_kernels_match_fp64(dtype, shape, state):
    compare_with_fp64(GPU_SHAPES[shape], MODES[(shape + 2 * state) % len(MODES)], state, dtype)


@on_gpu
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("shape", range(len(HOPPER_SHAPES)))
@pytest.mark.parametrize("state", [True, False], ids=["continued", "begun"])
def test_hopper_kernels_match_fp64(mode, shape, state):
    shape = HOPPER_SHAPES[shape]
    if not has_hopper_kernels():
        pytest.skip("not a Hopper GPU with Triton 3.8")
    compare_with_fp64(shape, mode, state, torch.bfloat16)


@on_gpu
@pytest.mark.parametrize("dtype", GPU_TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [0, 2, 4, 5])
@pytest.mark.parametrize(("step", "decay", "mode", "state"), [(x[0], x[1], x[3], x[4]) for x in READS])
def test_kernels_match_fp64_in_every_read(step, decay, mode, state, shape, dtype):
    mode = {**MODES[mode], "step": step}
    compare_with_fp64(GPU_SHAPES[shape], mode, state, dtype, decay, keys="few strong directions")


@on_gpu
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("shape", range(len(HOPPER_SHAPES)))
@pytest.mark.parametrize(("step", "decay"), [("projected", None), ("projected", "given"), ("scaled", "learned"),
                                             ("scaled", "sudden")])  # fmt: skip
def test_hopper_kernels_match_fp64_in_every_read(step, decay, mode, shape):
    if not has_hopper_kernels():
        pytest.skip("not a Hopper GPU with Triton 3.8")
    shape, mode = HOPPER_SHAPES[shape], {**mode, "step": step}
    # where a sequence continues, a decay has a gradient (of the first weight), and dk is the plain kernels'
    state = shape["B"] > 1 if "B" in shape else step == "projected"
    compare_with_fp64(shape, mode, state, torch.bfloat16, decay, keys="few strong directions")


@on_gpu
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("step", "decay"), [("scaled", None), ("projected", "given")])
def test_neighbours_of_a_packed_sequence_change_nothing(size, step, decay):
    lengths = [1, 63, 64, 65, 3, 1, 128, 129, 700, 2, 300, 5]
    assert_neighbours_change_nothing(lengths, size, torch.bfloat16, step, decay)


def assert_neighbours_change_nothing(lengths, size, dtype, step, decay):
    """What packed sequences give is the same, to the bit, where every second one and its gradients are NaN."""
    state = decay is None  # else dk is the plain kernels'
    case = make_case(lengths=lengths, Hq=2, Hk=1, K=size, state=state, dtype=dtype, decay=decay, earlier=3)
    case = to_gpu(case) if torch.cuda.is_available() else case
    case = replace(case, cu_seqlens=case.cu_seqlens.int())
    second = torch.tensor([n % 2 == 1 for n, length in enumerate(lengths) for _ in range(length)])
    nan = torch.where(second, float("nan"), 0.0).to(case.q)[None, :, None, None]
    cotangents = {name: x + nan if name in ("q_clean", "k_bar") else x for name, x in case.cotangents.items()}
    spoilt = replace(case, q=case.q + nan, k=case.k + nan, lam=case.lam + nan[..., 0], cotangents=cotangents)
    ref, got = (results(x, "triton", step=step) for x in (case, spoilt))
    for name in ("q_clean", "k_bar", "gradient of q", "gradient of k", "gradient of lam"):
        assert torch.equal(ref[name][:, ~second], got[name][:, ~second]), name
        assert got[name][:, second].isnan().any(-1).all(), f"{name}: NaN went astray"
    for name in ("C", "s", *(("gradient of initial C", "gradient of initial s") if state else ())):
        assert torch.equal(ref[name][::2], got[name][::2]), name


def compare_with_fp64(shape, mode, state, dtype, decay=None, keys="isotropic"):
    """Against the chunkwise backend in fp64, which the suite proves equal to the reference."""
    unit = mode["normalize"] == "none"
    # of its first key a sequence has no covariance: what a projected step makes of that y is rounding
    earlier = 3 if "step" in mode else 0
    case = make_case(**shape, state=state, dtype=dtype, unit=unit, decay=decay, keys=keys, earlier=earlier)
    case = to_gpu(case) if torch.cuda.is_available() else case
    got = results(case, "triton", **mode)
    rounded = mode["normalize"] == "unit" and dtype != torch.float32
    k_bar = got["k_bar"] if rounded else None
    ref = truth(case, k_bar=k_bar, backend="chunk", **mode)
    without = truth(replace(case, lam=torch.zeros_like(case.lam)), k_bar=k_bar, backend="chunk", **mode)
    for name in ("q_clean", "gradient of q", "gradient of k"):
        assert_effect(name, without[name], ref[name], got[name])
    double = case.double()
    y = correction(double.q, double.k, **double.where, backend="chunk", **without_step(mode) | {"centred": False})
    scale = {"y": y}
    if "step" not in mode:
        scale["gradient of lam"] = (y * double.cotangents["q_clean"]).sum(-1)
    if "gradient of initial n" in ref:
        scale["gradient of initial n"] = ref["gradient of initial s"].norm(dim=-1)
    for name, x in ref.items():
        if name == "count" and decay is None:
            assert torch.equal(x, got[name])
        else:
            allowed = GPU_TOLERANCE[dtype] * (2 if name in CANCELLED else 1)
            assert_close(name, x, got[name], allowed, scale.get(name))


# What two sums of the two signs leave: a decay, or a mean, that fades C, s and n alike changes nothing
CANCELLED = ("gradient of log_decay", "gradient of initial s")


@on_gpu
@pytest.mark.parametrize("keys", DISTRIBUTIONS)
def test_bf16_correction_errs_by_no_more_than_its_roundings(keys):
    """At most twice what rounding q, k and the scores to bf16 costs, and 5e-3 of |C q| / t; y = 0 is far outside."""
    case = to_gpu(make_case(B=1, T=2048, Hq=2, Hk=2, K=256, dtype=torch.bfloat16, keys=keys))
    k_bar = clean_query(*case.args, backend="triton")[1].double()
    q = unit_vector(case.q.double())
    ref = correction(q, k_bar, normalize="none", backend="chunk")
    scale = correction(q, k_bar, normalize="none", centred=False, backend="chunk")
    got = correction(case.q, case.k, backend="triton")
    off = error(ref, got, scale)
    rounded = error(ref, chunk_with_rounded_scores(q.bfloat16(), k_bar.float()), scale)
    allowed = min(2 * rounded, 5e-3)
    assert off <= allowed, f"error {off:.2e}, roundings alone {rounded:.2e}"
    assert error(ref, torch.zeros_like(got), scale) > allowed, "y = 0 must not pass"


@pytest.mark.parametrize(
    ("backend", "size"), [("chunk", 64), *(pytest.param("triton", size, marks=on_gpu) for size in (64, 128, 256))]
)
def test_direction_of_what_a_long_projected_step_leaves(backend, size):
    """Keys that vary alike in all directions, lam = 0.9: a tenth of q is left, so roundings weigh ten times as much."""
    case = make_case(B=1, T=2048, Hq=2, Hk=2, K=size, dtype=torch.bfloat16, keys="isotropic")
    case = replace(case, lam=torch.full_like(case.lam, 0.9))
    case = to_gpu(case) if backend == "triton" else case
    got, k_bar, _ = clean_query(*case.args, backend=backend, step="projected")
    q = unit_vector(case.q.double())
    ref, _, _ = clean_query(q, k_bar.double(), case.lam, normalize="none", step="projected", backend="chunk")
    late = slice(4 * size, None)  # before that the keys have a few strong directions
    cosine = torch.nn.functional.cosine_similarity(got.double()[:, late], ref[:, late], dim=-1)
    assert ref[:, late].norm(dim=-1).mean() < 0.5, "the step is not long"
    angle = torch.acos(cosine.clamp(max=1))
    assert angle.mean() < 0.01


def chunk_with_rounded_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The chunkwise algorithm with q, k and the scores in bf16 and states in fp32."""
    keys = chunk.chunk_keys(k, None, chunk.Past())
    x = chunk.to_grouped_chunks(q.float(), keys)
    p = chunk.scores(keys, x).bfloat16().float()
    y = (p.flatten(2, 3) @ keys.k + x.flatten(2, 3) @ keys.before).view_as(x) / keys.t
    m = (x * keys.key_sum).sum(-1, keepdim=True) / keys.t
    return chunk.from_grouped_chunks(y - m / keys.t * keys.key_sum, keys, q)


@on_gpu
@pytest.mark.parametrize("shape", [{"B": 2, "T": 1000}, {"lengths": [1, 63, 500, 0, 436, 1000]}], ids=str)
def test_equal_inputs_give_equal_bits(shape):
    case = to_gpu(make_case(**shape, Hq=6, Hk=6, K=256, dtype=torch.bfloat16, state=True))
    ref = results(case, "triton")
    for _ in range(30):
        got = results(case, "triton")
        for name, x in ref.items():
            assert torch.equal(x, got[name]), name


@on_gpu
@pytest.mark.parametrize("name", PASSES)
def test_every_config_gives_the_same_numbers(name, monkeypatch):
    case = to_gpu(make_case(B=1, T=700, Hq=4, Hk=2, K=256, dtype=torch.bfloat16))
    ref = results(case, "triton")
    pick = launch.pick
    tried = 0
    kinds = (False, True) if has_hopper_kernels() else (False,)
    candidates = script("benchmarks/tune.py").candidates
    for config in [config for hopper in kinds for config in candidates(name, torch.bfloat16, 256, hopper)]:

        def forced(n, *sizes, c=config, hopper=False, **options):  # y by itself is for the others to compute
            wanted = n == name and (hopper or not c.hopper)
            return c if wanted else pick(n, *sizes, hopper=hopper, **options)

        monkeypatch.setattr(launch, "pick", forced)
        got = results(case, "triton")
        tried += 1
        for key, x in ref.items():
            if key != "count":
                assert_close(f"{config} {key}", x, got[key], GPU_TOLERANCE[torch.bfloat16])
    assert tried > 1


@on_gpu
@pytest.mark.parametrize(
    "shape",
    [
        {"B": 1, "T": 70_000, "H": 1, "K": 64},  # over 65,536 tokens
        {"B": 600, "T": 64, "H": 128, "K": 16},  # over 65,535 programs
        {"B": 1, "T": 1_500_000, "H": 6, "K": 256},  # offsets past 2^31
        {"B": 1, "T": 1_500_000, "H": 6, "K": 256, "first": 700_001},  # likewise, in the second of two packed sequences
    ],
    ids=str,
)
def test_long_shapes(shape):
    B, T, H, K = (shape[x] for x in "BTHK")
    first = shape.get("first", 0)  # token of the last sequence
    cu_seqlens = torch.tensor([0, first, T], device="cuda") if first else None
    rng = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(B, T, H, K, device="cuda", dtype=torch.bfloat16, generator=rng) for _ in range(2))
    lam = torch.rand(B, T, H, device="cuda", generator=rng)
    with torch.no_grad():
        q_clean, k_bar, state = clean_query(q, k, lam, cu_seqlens=cu_seqlens, output_final_state=True, backend="triton")
    tail = 64
    keys = k_bar[-1, first : T - tail]
    before = CovarianceState(  # the last sequence up to its tail, in fp64
        torch.stack([keys[:, h].double().T @ keys[:, h].double() for h in range(H)])[None],
        keys.double().sum(0)[None],
        torch.tensor([len(keys)], device="cuda"),
    )
    q_unit = unit_vector(q[-1:, T - tail :].double())
    ref, _, final = clean_query(
        q_unit, k_bar[-1:, T - tail :].double(), lam[-1:, T - tail :], normalize="none", initial_state=before,
        output_final_state=True, backend="chunk",
    )  # fmt: skip
    assert_close("q_clean", ref, q_clean[-1:, T - tail :], GPU_TOLERANCE[torch.bfloat16])
    assert_close("C", final.second_moment, state.second_moment[-1:], 1e-5)
    assert state.count.tolist() == ([first, T - first] if first else [T] * B)


@on_gpu
def test_step_under_a_cuda_graph_continues_prefill():
    case = to_gpu(make_case(B=3, T=40, Hq=6, Hk=6, K=256, dtype=torch.bfloat16))
    whole = clean_query(*case.args, output_final_state=True, backend="triton")
    state = clean_query(*(x[:, :20] for x in case.args), output_final_state=True, backend="triton")[2]
    token = [x[:, 20].clone() for x in case.args]
    with torch.no_grad():
        clean_query_step(*token, state.clone(), inplace=True)  # compile outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q_clean, _, _ = clean_query_step(*token, state, inplace=True)
    state_before = clean_query(*(x[:, :20] for x in case.args), output_final_state=True, backend="triton")[2]
    for name in ("second_moment", "key_sum", "count"):
        getattr(state, name).copy_(getattr(state_before, name))
    for t in range(20, 40):
        for x, y in zip(token, case.args, strict=True):
            x.copy_(y[:, t])
        graph.replay()
        assert_close("q_clean", whole[0][:, t], q_clean, GPU_TOLERANCE[torch.bfloat16])
    assert_close("C", whole[2].second_moment, state.second_moment, 1e-5)
    assert torch.equal(whole[2].count, state.count)
