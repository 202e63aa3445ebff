"""Mesa's read against its definition, solved token by token in fp64, and against what fla computes.

B sequences (or N packed ones), T tokens, H heads, K key size, V value size.
"""

from __future__ import annotations

import warnings
from itertools import accumulate, pairwise

import pytest
import torch
from helpers import assert_close, unit_vector
from torch import Tensor

from ccq import sigma_q
from ccq.ops.choose import Call, choose
from ccq.ops.recurrence.mesa import CHUNK, conjugate_gradient, flops, mesa, mesa_step


def make_case(T: int = 70, B: int = 2, H: int = 2, K: int = 8, V: int = 6, mean: float = 0.0, state: bool = False):
    """Arguments in fp64. `mean`: how much the keys and queries of a head have in common."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    shared = mean * normal(H, K)
    case = {
        "q": unit_vector(normal(B, T, H, K) + shared), "k": unit_vector(normal(B, T, H, K) + shared),
        "v": normal(B, T, H, V), "g": -normal(B, T, H).square() / 20, "beta": normal(B, T, H).sigmoid(),
        "ridge": 0.25 + normal(H, K).square(),
    }  # fmt: skip
    if state:
        keys = normal(B, H, K, K)
        case["initial_state"] = torch.cat([keys @ keys.mT / K, normal(B, H, K, V)], -1)
    return case


def token_loop(q, k, v, g, beta, ridge, steps=None, initial_state=None) -> tuple[Tensor, Tensor]:
    """The definition; `steps` None: the system is solved exactly."""
    size = q.shape[-1]
    memory = q.new_zeros(*q.shape[:1], *q.shape[2:], size + v.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(q.shape[1]):
        write = beta[:, t, :, None] * k[:, t]
        memory = g[:, t].exp()[..., None, None] * memory
        memory = memory + write[..., None] * torch.cat([k[:, t], v[:, t]], -1)[..., None, :]
        system = memory[..., :size] + torch.diag_embed(ridge)
        x = torch.linalg.solve(system, q[:, t]) if steps is None else krylov(system, q[:, t], steps)
        outputs.append(torch.einsum("bhk,bhkv->bhv", x, memory[..., size:]))
    return torch.stack(outputs, 1), memory


def krylov(A: Tensor, q: Tensor, steps: int) -> Tensor:
    """What conjugate gradient finds: of the span of q, A q, ..., the x whose A-norm error is least."""
    basis = torch.stack([torch.linalg.matrix_power(A, i) @ q[..., None] for i in range(steps)], -1)[..., 0, :]
    small = basis.mT @ A @ basis
    return (basis @ torch.linalg.solve(small, basis.mT @ q[..., None]))[..., 0]


def gradients(run, case: dict[str, Tensor], **options) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in case.items()}
    arguments = dict(leaves)
    if "initial_state" in leaves:  # H is symmetric, and only so is its gradient one
        keys, values = leaves["initial_state"].tensor_split([case["k"].shape[-1]], -1)
        arguments["initial_state"] = torch.cat([(keys + keys.mT) / 2, values], -1)
    o, state = run(**arguments, **options)
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x) for x in (o, state)]
    grads = torch.autograd.grad((o, state), list(leaves.values()), weights)
    return {"o": o, "state": state, **{f"gradient of {n}": x for n, x in zip(leaves, grads, strict=True)}}


def ours(**arguments):
    return mesa(**arguments, output_final_state=True)


@pytest.mark.parametrize(("T", "steps"), [(1, 2), (3, 1), (63, 3), (65, 2), (130, 2)])
def test_few_steps_are_the_best_of_what_they_span(T, steps):
    """Outputs, states and every gradient: those of the steps that were taken, not of the solution they go to."""
    case = make_case(T, B=1, H=1, state=T % 2 == 1)
    ref, got = gradients(token_loop, case, steps=steps), gradients(ours, case, steps=steps)
    for name in ref:
        assert_close(name, ref[name], got[name], 1e-9)


@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_many_steps_solve_the_system(mean, dtype, close):
    """30 of them for 8 channels: those behind the last one that helps change nothing, in gradients too."""
    case = make_case(T=70, B=1, mean=mean)
    ref = gradients(token_loop, case)
    got = gradients(ours, {name: x.to(dtype) for name, x in case.items()}, steps=30)
    for name in ref:
        assert_close(name, ref[name], got[name].double(), close)


def test_the_residual_falls_below_1e_6():
    rng = torch.Generator().manual_seed(0)
    A = torch.randn(5, 128, 128, generator=rng, dtype=torch.float64)
    A, q = A @ A.mT / 128 + 0.25 * torch.eye(128), torch.randn(5, 128, generator=rng, dtype=torch.float64)
    for dtype, steps in ((torch.float64, 60), (torch.float32, 60)):
        x = conjugate_gradient(lambda p: (A.to(p.dtype) @ p[..., None])[..., 0], q.to(dtype), steps).double()
        assert ((A @ x[..., None])[..., 0] - q).norm() < 1e-6 * q.norm()


def test_two_steps_span_what_one_projected_step_does_and_one_step_only_rescales():
    case = make_case(T=40, B=1, H=1, V=8)
    case |= {"g": torch.zeros(1, 40, 1).double(), "beta": torch.ones(1, 40, 1).double()}
    case["ridge"] = torch.full((1, 8), 0.5, dtype=torch.float64)
    H = torch.cumsum(case["k"][0, :, 0, :, None] * case["k"][0, :, 0, None, :], 0)  # [T, K, K]
    system, q = H + 0.5 * torch.eye(8), case["q"][0, :, 0]
    one, two = (conjugate_gradient(lambda p: (system @ p[..., None])[..., 0], q, n) for n in (1, 2))
    y = sigma_q(case["q"], case["k"], centred=False, normalize="none")[0][0, :, 0]
    along = (one * q).sum(-1, keepdim=True) / q.square().sum(-1, keepdim=True)
    assert_close("one step", along * q, one, 1e-12)
    span, _ = torch.linalg.qr(torch.stack([q, y], -1))
    assert_close("two steps", (span @ (span.mT @ two[..., None]))[..., 0], two, 1e-9)
    projected = q - 0.7 * (q * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True) * y
    assert_close("projected", (span @ (span.mT @ projected[..., None]))[..., 0], projected, 1e-12)


def test_same_as_fla():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its kernels do not run here
        from fla.ops.mesa_net.naive import naive_mesa_net_CG, naive_mesa_net_exact

    case = {name: x.float() for name, x in make_case(T=100, V=8).items()}  # its values are as long as its keys
    ref, keys, values = naive_mesa_net_exact(**{"lamb" if n == "ridge" else n: x for n, x in case.items()})
    o, state = ours(**case, steps=30)
    assert_close("o", ref, o, 1e-4)
    assert_close("state", torch.cat([keys, values], -1), state, 1e-5)
    theirs = {"lamb" if n == "ridge" else n: x for n, x in case.items()}
    for steps in (1, 2):  # it adds 1e-5 to what it divides by
        ref, _, _ = naive_mesa_net_CG(**theirs, chunk_size=20, max_CG_iteration=steps)
        assert_close(f"{steps} steps", ref, mesa(**case, steps=steps)[0], 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("state", [False, True], ids=["empty", "continued"])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_kernels_of_fla_on_a_gpu_give_the_values_and_gradients_of_fp64(mean, state):
    case = make_case(T=300, K=64, V=64, mean=mean, state=state)
    half = {n: x if n in ("g", "beta", "ridge", "initial_state") else x.bfloat16() for n, x in case.items()}
    ref = gradients(ours, {n: x.double() for n, x in half.items()}, steps=30)
    on_gpu = {n: (x if x.dtype == torch.bfloat16 else x.float()).cuda() for n, x in half.items()}
    assert choose("mesa", Call.of(on_gpu["q"])) == "fla"
    for name, x in gradients(ours, on_gpu, steps=30).items():
        assert_close(name, ref[name], x.cpu(), 2e-2)


@pytest.mark.parametrize("lengths", [[3, 0, 65], [0, 64, 1, 130], [0, 0], [5]], ids=str)
def test_packed_sequences_are_separate(lengths):
    case = make_case(sum(lengths), B=1)
    borders = torch.tensor([0, *accumulate(lengths)])
    o, state = ours(**case, steps=2, cu_seqlens=borders)
    parts, states = [], []
    for begin, end in pairwise(borders.tolist()):
        own = {name: x if name == "ridge" else x[:, begin:end] for name, x in case.items()}
        y, final = ours(**own, steps=2)
        parts.append(y)
        states.append(final)
    assert_close("o", torch.cat(parts, 1), o, 1e-12)
    assert_close("state", torch.cat(states), state, 1e-12)


@pytest.mark.parametrize("steps", [2, 30])
def test_steps_of_one_token_continue_a_prefill(steps):
    case = make_case(T=40)
    whole, final = ours(**case, steps=steps)
    ridge = case.pop("ridge")
    _, state = ours(**{name: x[:, :30] for name, x in case.items()}, ridge=ridge, steps=steps)
    for t in range(30, 40):
        o = mesa_step(*(x[:, t] for x in case.values()), ridge, steps, state)
        assert_close(f"token {t}", whole[:, t], o, 1e-11)
    assert_close("state", final, state, 1e-12)


def test_a_query_of_zeros_reads_zero_and_has_a_gradient():
    case = make_case(T=5)
    case["q"] = torch.zeros_like(case["q"])
    got = gradients(ours, case, steps=3)
    assert not got["o"].any()
    assert all(x.isfinite().all() for x in got.values())


def test_half_precision_is_fp32_inside():
    case = {name: x.bfloat16() if name in "qkv" else x.float() for name, x in make_case(T=65).items()}
    o, state = ours(**case, steps=4)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(o, mesa(**case, steps=4)[0])
    ref, _ = token_loop(**{name: x.double() for name, x in case.items()}, steps=4)
    assert_close("o", ref, o.double(), 2**-8)


def test_flops_count_the_matrix_products():
    from torch.utils.flop_counter import FlopCounterMode

    case = make_case(T=4 * CHUNK, B=1, K=16, V=8)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        mesa(**case, steps=3)
    assert counter.get_total_flops() == flops(2, 16, 8, 3) * 4 * CHUNK
