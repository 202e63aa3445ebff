"""The chunkwise backend against the fp64 reference: outputs, the correction, the final state, every gradient."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BACKENDS,
    DISTRIBUTIONS,
    HALF,
    LAYOUTS,
    NORMALIZE,
    TOLERANCE,
    assert_close,
    assert_same_results,
    clean_query,
    correction,
    laid_out_results,
    make_case,
    results,
    truth,
    uncancelled,
    unit_vector,
)

from ccq.ops.chunks import make_layout
from ccq.ops.clean import chunk

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

LENGTHS = [{"T": T} for T in (0, 1, 2, 3, 63, 64, 65, 127, 128, 129)] + [{"T": 1000, "B": 1, "Hq": 2, "Hk": 1}]
# a number has no direction: with K = 1 all the gradient of q / |q| comes from the 1e-6, so q must be of its size
KEY_SIZES = [{"K": 1, "scale": 1e-3}] + [{"K": K} for K in (7, 33, 64)]
HEADS = [{"Hq": Hq, "Hk": Hk} for Hq, Hk in ((1, 1), (6, 1))]  # (4, 2) is the default
PACKED = [
    {"lengths": lengths}
    for lengths in ([0, 3, 65], [64, 0, 63], [5, 70, 0], [0, 1, 0, 0, 130, 2, 0], [200, 0, 129], [0, 0], [0])
]
MODES = [
    pytest.param(
        {"centred": centred, "normalize": normalize}, id=f"{normalize}-{'centred' if centred else 'uncentred'}"
    )
    for normalize in NORMALIZE
    for centred in (True, False)
]


def name_of(shape: dict) -> str:
    return "-".join(f"{key}={value}" for key, value in shape.items())


def check(shape: dict, mode: dict) -> None:
    """Compare all that comes out of the chunkwise backend with the truth."""
    case = make_case(**shape, unit=mode["normalize"] == "none")
    got = results(case, "chunk", **mode)
    rounded = case.q.dtype in HALF and mode["normalize"] == "unit"
    ref = truth(case, **mode, k_bar=got["k_bar"] if rounded else None)
    dtypes = {"q_clean": case.q, "k_bar": case.k} | {f"gradient of {name}": x for name, x in case.inputs.items()}
    for name, x in dtypes.items():
        assert got[name].dtype == x.dtype, f"{name}: expected {x.dtype}, got {got[name].dtype}"
    assert_same_results(ref, got, uncancelled(case, **mode))


@pytest.mark.parametrize("shape", LENGTHS + KEY_SIZES + HEADS + PACKED, ids=name_of)
@pytest.mark.parametrize("state", [True, False], ids=["continued", "begun"])
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]])  # the rest below
def test_chunk_matches_reference(shape, state, mode):
    check({**shape, "state": state}, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", [True, False], ids=["continued", "begun"])
@pytest.mark.parametrize("lengths", [None, [0, 70, 0, 65, 0]], ids=["batch", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_chunk_matches_reference_in_every_mode_and_dtype(mode, state, lengths, dtype):
    check({"T": 70, "K": 7, "state": state, "lengths": lengths, "dtype": dtype}, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", [True, False], ids=["continued", "begun"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pieces_that_fit_a_cache_match_reference(mode, state, dtype, monkeypatch):
    monkeypatch.setattr(chunk, "CHUNK", 8)
    monkeypatch.setattr(chunk, "PIECE", 1)  # four chunks at a time
    case = {"T": 70, "K": 7, "state": state, "dtype": dtype}
    assert len(chunk.pieces(make_case(**case).q, None)) == 3
    check(case, mode)


@pytest.mark.parametrize("keys", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_chunk_matches_reference_for_all_keys(keys, dtype):
    check({"T": 130, "K": 16, "keys": keys, "dtype": dtype}, {"centred": True, "normalize": "unit"})


@pytest.mark.parametrize("keys", ["isotropic", "half mean", "strong mean"])
def test_fp32_correction_errs_by_less_than_1e6_of_what_cancels(keys):
    case = make_case(B=1, T=2048, Hq=1, Hk=1, K=64, dtype=torch.float32, keys=keys)
    ref = correction(case.q.double(), case.k.double(), backend="reference")
    got = correction(case.q, case.k, backend="chunk")
    assert got.dtype == torch.float32
    assert_close("y", ref, got, 1e-6, uncancelled(case)["y"])


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("keys", DISTRIBUTIONS)
def test_half_precision_k_bar_is_the_rounded_unit_key(dtype, keys):
    case = make_case(T=130, dtype=dtype, keys=keys)
    k_bar = clean_query(*case.args, backend="chunk")[1]
    exact = unit_vector(case.k.double())
    # fp32 may round to a neighbour where the exact value lies between two: a thousandth more than half a step
    normal = exact.abs().clamp(min=torch.finfo(dtype).smallest_normal)
    step = torch.finfo(dtype).eps * normal.log2().floor().exp2()
    off = ((k_bar.double() - exact).abs() / step).max().item()
    assert off <= 0.501, f"k_bar: {off:.3f} steps of {dtype} away from the unit key"


@pytest.mark.parametrize("lam_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_lam_of_any_dtype_gets_a_gradient_of_its_dtype(dtype, lam_dtype):
    check({"T": 5, "K": 7, "dtype": dtype, "lam_dtype": lam_dtype}, {"centred": True, "normalize": "stats"})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_lam_is_not_rounded_to_the_dtype_of_q(backend, dtype):
    """One key again and again, uncentred: y = q, so that a lam rounded to 1 would leave nothing of it."""
    x = torch.ones(1, 3, 1, 4, dtype=dtype) / 2
    lam = torch.full((1, 3, 1), 1 - 1e-4)
    q_clean = clean_query(x, x, lam, centred=False, normalize="none", backend=backend)[0]
    assert_close("q_clean", (1 - lam.double())[..., None] * x.double(), q_clean, TOLERANCE[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("lengths", [None, [3, 0, 67]], ids=["batch", "packed"])
def test_layout_in_memory_does_not_matter(layout, normalize, lengths):
    plain = make_case(T=70, K=7, state=True, lengths=lengths, unit=normalize == "none")
    got = laid_out_results(plain, layout, "chunk", normalize=normalize)
    ref = results(plain, "chunk", normalize=normalize)
    assert_same_results({name: ref[name] for name in got}, got)


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_gradient_may_be_one_number_expanded(normalize):
    case = make_case(T=70, K=7, state=True, unit=normalize == "none")
    for name, x in case.cotangents.items():
        case.cotangents[name] = torch.tensor(0.5, dtype=x.dtype).expand(x.shape)
    assert_same_results(
        truth(case, normalize=normalize),
        results(case, "chunk", normalize=normalize),
        uncancelled(case, normalize=normalize),
    )


@pytest.mark.parametrize("wanted", ["q_clean", "k_bar", "C", "s"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_on_one_output_alone(wanted, mode):
    case = make_case(T=70, K=7, state=True, unit=mode["normalize"] == "none")
    case.cotangents = {name: x if name == wanted else torch.zeros_like(x) for name, x in case.cotangents.items()}
    ref = truth(case, **mode)
    leaves = case.leaves()
    q_clean, k_bar, final = clean_query(*leaves.args, **leaves.where, output_final_state=True, backend="chunk", **mode)
    output = {"q_clean": q_clean, "k_bar": k_bar, "C": final.second_moment, "s": final.key_sum}[wanted]
    grads = torch.autograd.grad(
        output, list(leaves.inputs.values()), case.cotangents[wanted], materialize_grads=True
    )  # autograd passes None, not zeros, for the outputs that the loss does not see
    for name, got in zip(leaves.inputs, grads, strict=True):
        assert_close(name, ref[f"gradient of {name}"], got, TOLERANCE[got.dtype])


def test_outputs_without_state_are_those_with_it():
    case = make_case(T=70)
    *with_state, state = clean_query(*case.args, output_final_state=True, backend="chunk")
    *without, nothing = clean_query(*case.args, backend="chunk")
    assert nothing is None
    assert state is not None
    for ref, got in zip(with_state, without, strict=True):
        assert torch.equal(ref, got)


@pytest.mark.parametrize("normalize", ["none", "stats"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_k_bar_is_k_itself_unless_unit(normalize, backend):
    case = make_case(T=3, unit=True)
    assert clean_query(*case.args, normalize=normalize, backend=backend)[1] is case.k


def test_chunk_is_what_auto_runs_on_a_cpu():
    case = make_case(T=130)
    for ref, got in zip(clean_query(*case.args, backend="chunk"), clean_query(*case.args), strict=True):
        assert ref is got is None or torch.equal(ref, got)


@pytest.mark.parametrize("lengths", [[4] * 500, [5] * 400, [100] * 20, [300] * 7, [3] * 900 + [1000], [0, 7, 0, 129]])
def test_chunks_of_packed_sequences_are_mostly_full(lengths):
    """Thousands of short sequences in chunks of 128 would be 30 times the work. Also: how many chunks of each rank."""
    borders = torch.tensor([0, *lengths]).cumsum(0)
    layout = make_layout(1, sum(lengths), borders, borders.device, 128)
    assert sum(layout.counts) * layout.size <= 2 * (sum(lengths) + len(lengths))
    chunks = [-(-n // layout.size) for n in lengths]
    assert layout.counts == [sum(n > rank for n in chunks) for rank in range(max(chunks))]
