"""The custom op as PyTorch uses it: tracing, compiling, autocast, what autograd keeps."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from helpers import BACKENDS, NORMALIZE, TOLERANCE, Case, assert_close, make_case, make_gate, results
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ccq import CovarianceState, clean_query, clean_query_step
from ccq.ops import correction, gate

SHAPES = {
    "begun": {"T": 5},
    "continued": {"T": 5, "state": True},
    "packed": {"lengths": [0, 66, 1]},
    "packed, continued": {"lengths": [0, 66, 1], "state": True},
    "nothing": {"T": 0, "state": True},
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def op_arguments(
    case: Case, *, normalize: str = "unit", centred: bool = True, final: bool = True, gated: bool = False,
    step: str = "scaled",
) -> tuple:  # fmt: skip
    """The case as torch.ops.ccq.clean_query takes it, its tensors leaves."""
    leaves = case.leaves()
    state = leaves.initial_state
    tensors = (None, None, None) if state is None else (state.second_moment, state.key_sum, state.count)
    by = (None, *make_gate(case)) if gated else (leaves.lam, None, None)
    how = (centred, normalize, step, "chunk", final, step == "projected")
    return leaves.q, leaves.k, *by, leaves.log_decay, *tensors, leaves.cu_seqlens, *how


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "nothing"])
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_op_passes_opcheck(shape, normalize):
    case = make_case(Hq=2, Hk=1, K=3, unit=normalize == "none", **SHAPES[shape])
    for gated in (False, True):
        torch.library.opcheck(torch.ops.ccq.clean_query.default, op_arguments(case, normalize=normalize, gated=gated))


@pytest.mark.parametrize("changed", [{"centred": False}, {"final": False}, {"step": "projected"}], ids=str)
@pytest.mark.parametrize("decay", [None, "learned"])
def test_op_passes_opcheck_with(changed, decay):
    case = make_case(Hq=2, Hk=1, K=3, T=5, state=True, dtype=torch.bfloat16, decay=decay)
    torch.library.opcheck(torch.ops.ccq.clean_query.default, op_arguments(case, **changed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_fake_outputs_are_like_the_real_ones(shape, normalize, final, dtype):
    case = make_case(Hq=2, Hk=1, K=3, dtype=dtype, **SHAPES[shape])
    arguments = op_arguments(case, normalize=normalize, final=final, gated=not final)
    real = torch.ops.ccq.clean_query(*arguments)
    fake = torch.ops.ccq.clean_query(*(x.to("meta") if isinstance(x, Tensor) else x for x in arguments))
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        assert y.is_meta


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_op_never_returns_an_input(normalize, shape, dtype):
    case = make_case(Hq=2, Hk=1, K=3, dtype=dtype, **SHAPES[shape])
    arguments = op_arguments(case, normalize=normalize, gated=normalize == "unit")
    with torch.no_grad():
        outputs = torch.ops.ccq.clean_query(*arguments)
    inputs = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, Tensor) and x.numel()}
    storages = [x.untyped_storage().data_ptr() for x in outputs if x.numel()]
    assert not inputs & set(storages)
    assert len(storages) == len(set(storages)), "two outputs share memory"


class Calls(TorchDispatchMode):
    """What our operators are given and return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        if func.namespace == "ccq":
            self.seen.append((func, args, outputs))
        return outputs


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shape", ["begun", "continued", "packed, continued"])
@pytest.mark.parametrize("step", ["scaled", "projected"])
def test_forward_and_backward_return_new_memory_as_compilers_are_told(normalize, centred, shape, step):
    """Also of the layout that attention layers have, [B, H, T, K] seen as [B, T, H, K]: a compiler trusts the strides
    of the fake outputs, and that no output is an input."""
    case = make_case(Hq=2, Hk=1, K=3, **SHAPES[shape], decay="learned" if step == "projected" else None)
    turned = {x: getattr(case, x).transpose(1, 2).contiguous().transpose(1, 2) for x in ("q", "k")}
    leaves = replace(case, **turned).leaves()
    with Calls() as calls:
        q_clean, k_bar, final = clean_query(
            *leaves.args, **leaves.where, centred=centred, normalize=normalize, output_final_state=True,
            backend="chunk", step=step,
        )  # fmt: skip
        outputs = [x for x in (q_clean, k_bar, final.second_moment, final.key_sum) if x.requires_grad]
        like = [torch.randn_like(x) for x in outputs]  # strided as they are
        inputs = [x for x in leaves.inputs.values() if x.requires_grad]
        torch.autograd.grad(outputs, inputs, like, allow_unused=True)
    assert [func.__name__ for func, *_ in calls.seen] == ["clean_query.default", "clean_query_backward.default"]
    for func, arguments, real in calls.seen:
        given = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, Tensor) and x.numel()}
        storages = [x.untyped_storage().data_ptr() for x in real if x is not None and x.numel()]
        assert not given & set(storages)
        assert len(storages) == len(set(storages)), "two outputs share memory"
        fake = func(*(x.to("meta") if isinstance(x, Tensor) else x for x in arguments))
        for x, y in zip(real, fake, strict=True):
            if x is not None:
                assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@every_backend
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_results_share_no_memory_with_inputs(backend, shape, normalize):
    case = make_case(K=3, **SHAPES[shape])
    q_clean, k_bar, state = clean_query(
        *case.args, **case.where, normalize=normalize, output_final_state=True, backend=backend
    )
    before = [x.clone() for x in case.inputs.values()]
    outputs = [q_clean, state.second_moment, state.key_sum, state.count]
    if normalize == "unit":
        outputs.append(k_bar)
    else:
        assert k_bar is case.k
    for x in outputs:
        x.fill_(7)
    for x, y in zip(before, case.inputs.values(), strict=True):
        assert torch.equal(x, y)
    if case.initial_state is not None:
        assert (case.initial_state.count != 7).all()


class Layer(nn.Module):
    """A small user of the operator: projections before it, a product after it, a state in and out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.gate = nn.Linear(12, 24), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, state: CovarianceState | None = None) -> tuple[Tensor, CovarianceState]:
        q, k = self.q(x).unflatten(-1, (4, 6)), self.k(x).unflatten(-1, (2, 6))
        lam = self.gate(x).sigmoid()
        q_clean, k_bar, state = clean_query(q, k, lam, initial_state=state, output_final_state=True)
        return (q_clean.unflatten(2, (2, 2)) * k_bar.unsqueeze(3)).sum(-1), state


def run_layer(layer: Layer, call, x: Tensor, state: CovarianceState | None) -> dict[str, Tensor]:
    """Outputs of `call`, the layer compiled or not, and gradients of the parameters, of x and of the state."""
    x = x.clone().requires_grad_()
    if state is not None:
        state = CovarianceState(
            state.second_moment.clone().requires_grad_(), state.key_sum.clone().requires_grad_(), state.count
        )
    out, final = call(x, state)
    assert isinstance(final, CovarianceState)
    wanted = {"x": x, **dict(layer.named_parameters())}
    if state is not None:
        wanted |= {"second_moment": state.second_moment, "key_sum": state.key_sum}
    loss = out.square().sum() + final.second_moment.square().sum() + final.key_sum.sum()
    grads = torch.autograd.grad(loss, list(wanted.values()))
    outputs = {"out": out, "C": final.second_moment, "s": final.key_sum, "count": final.count}
    return outputs | {f"gradient of {name}": g for name, g in zip(wanted, grads, strict=True)}


def assert_compiled_equals_eager(lengths: list[int], with_state: bool, **options) -> None:
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, **options)
    for T in lengths:
        x = torch.randn(2, T, 12, generator=torch.Generator().manual_seed(T))
        state = make_case(B=2, T=1, Hk=2, K=6, dtype=torch.float32, state=True).initial_state if with_state else None
        ref = run_layer(layer, layer, x, state)
        got = run_layer(layer, compiled, x, state)
        assert torch.equal(ref.pop("count"), got.pop("count"))
        for name, y in ref.items():
            assert_close(name, y, got[name], TOLERANCE[torch.float32])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("with_state", [True, False], ids=["continued", "begun"])
def test_compiled_equals_eager(with_state):
    assert_compiled_equals_eager([5], with_state, backend="aot_eager")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("with_state", [True, False], ids=["continued", "begun"])
def test_compiled_with_dynamic_shapes_equals_eager(with_state):
    with torch._dynamo.config.patch(error_on_recompile=True):  # one graph serves all lengths
        assert_compiled_equals_eager([5, 66, 130], with_state, backend="aot_eager", dynamic=True)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow  # a minute: it builds C++
@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_compiled_by_inductor_equals_eager():
    assert_compiled_equals_eager([5], True)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_compiled_step_equals_eager(normalize):
    case = make_case(T=3, state=True, dtype=torch.float32)
    compiled = torch.compile(clean_query_step, fullgraph=True, backend="aot_eager")
    state = eager = case.initial_state
    for t in range(3):
        token = [x[:, t] for x in case.args]
        q_clean, k_bar, state = compiled(*token, state, normalize=normalize)
        ref_q, ref_k, eager = clean_query_step(*token, eager, normalize=normalize)
        assert_close("q_clean", ref_q, q_clean, TOLERANCE[torch.float32])
        assert_close("k_bar", ref_k, k_bar, TOLERANCE[torch.float32])
        assert_close("second_moment", eager.second_moment, state.second_moment, TOLERANCE[torch.float32])
    assert state.count.tolist() == (case.initial_state.count + 3).tolist()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_packed_equals_eager():
    case = make_case(lengths=[0, 66, 1], state=True)
    call = torch.compile(clean_query, fullgraph=True, backend="aot_eager")
    ref = clean_query(*case.args, **case.where, output_final_state=True)
    got = call(*case.args, **case.where, output_final_state=True)
    assert torch.equal(ref[0], got[0])
    assert torch.equal(ref[2].second_moment, got[2].second_moment)
    assert got[2].count.tolist() == (case.initial_state.count + torch.tensor([0, 66, 1])).tolist()


def step(q, k, lam, initial_state, backend):
    return clean_query_step(q[:, 0], k[:, 0], lam[:, 0], initial_state, backend=backend)


@every_backend
@pytest.mark.parametrize("one_step", [True, False], ids=["step", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(backend, one_step, dtype):
    case = make_case(T=1 if one_step else 70, dtype=dtype, state=True)
    numbers = []
    for enabled in (False, True):
        leaves = case.leaves()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            if one_step:
                q_clean, k_bar, state = step(*leaves.args, leaves.initial_state, backend)
            else:
                q_clean, k_bar, state = clean_query(
                    *leaves.args, **leaves.where, output_final_state=True, backend=backend
                )
        assert q_clean.dtype == k_bar.dtype == dtype
        assert state.second_moment.dtype == state.key_sum.dtype == torch.float32
        loss = q_clean.sum() + k_bar.square().sum() + state.second_moment.sum()
        grads = torch.autograd.grad(loss, list(leaves.inputs.values()))
        numbers.append([q_clean, k_bar, state.second_moment, state.key_sum, *grads])
    for ref, got in zip(*numbers, strict=True):
        assert torch.equal(ref, got)


@every_backend
def test_autocast_changes_nothing_in_the_correction(backend):
    case = make_case(T=70, dtype=torch.bfloat16)
    ref = correction(case.q, case.k, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = correction(case.q, case.k, backend=backend)
    assert got.dtype == torch.float32
    assert torch.equal(ref, got)


def test_backward_under_autocast_changes_nothing():
    case = make_case(T=70, dtype=torch.float32)
    ref = results(case, "chunk")
    with torch.autocast("cpu", torch.bfloat16):
        got = results(case, "chunk")
    for name in ref:
        assert torch.equal(ref[name], got[name]), name


def test_second_derivative_of_chunk_is_one_clear_error():
    case = make_case(T=3).leaves()
    q_clean = clean_query(*case.args, backend="chunk")[0]
    grads = torch.autograd.grad(q_clean.square().sum(), case.args, create_graph=True)
    for x, grad in zip(case.args, grads, strict=True):
        with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
            torch.autograd.grad(grad.square().sum(), x, retain_graph=True)


def mapped(backend: str, **where):
    """`clean_query` as torch.vmap takes it: tensors in, a tensor out."""
    return lambda q, k, lam: clean_query(q, k, lam, backend=backend, **where)[0]


def test_vmap_of_chunk_is_one_clear_error():
    case = make_case(B=2, T=3)
    with pytest.raises(RuntimeError, match=r"cannot be mapped by torch.vmap.*backend='reference'"):
        torch.vmap(mapped("chunk"))(*(x[:, None] for x in case.args))


def test_vmap_of_the_reference_works():
    """The error of the other backends sends people here."""
    case = make_case(B=2, T=3)
    got = torch.vmap(mapped("reference"))(*(x[:, None] for x in case.args))
    assert_close("q_clean", clean_query(*case.args)[0], got[:, 0], TOLERANCE[torch.float64])
    decay = -torch.rand_like(case.k[..., 0])
    each = [clean_query(*(x[i : i + 1] for x in case.args), log_decay=decay[i : i + 1])[0] for i in range(2)]
    decays = torch.vmap(lambda q, k, lam, d: mapped("reference", log_decay=d)(q, k, lam))
    got = decays(*(x[:, None] for x in (*case.args, decay)))
    assert_close("q_clean", torch.cat(each), got[:, 0], TOLERANCE[torch.float64])


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_meta_tensors_give_shapes(backend, dtype):
    case = make_case(T=3, dtype=dtype, state=True).map(lambda x: x.to("meta"))
    state = case.initial_state.to("meta")
    high = state.second_moment.dtype
    q_clean, k_bar, final = clean_query(*case.args, initial_state=state, output_final_state=True, backend=backend)
    assert (q_clean.shape, q_clean.dtype, q_clean.device) == (case.q.shape, dtype, case.q.device)
    assert (k_bar.shape, k_bar.dtype, k_bar.device) == (case.k.shape, dtype, case.k.device)
    for name in ("second_moment", "key_sum", "count"):
        x, y = getattr(final, name), getattr(state, name)
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
    assert final.second_moment.dtype == high


@every_backend
def test_meta_tensors_give_the_shape_of_the_correction(backend):
    case = make_case(T=3, dtype=torch.bfloat16)
    y = correction(case.q.to("meta"), case.k.to("meta"), backend=backend)
    assert (y.shape, y.dtype, y.is_meta) == (case.q.shape, torch.float32, True)


def test_meta_tensors_give_shapes_of_a_step():
    case = make_case(T=1)
    state = CovarianceState.zeros(2, 2, 16, dtype=torch.float64, device="meta")
    q_clean, k_bar, final = clean_query_step(*(x[:, 0].to("meta") for x in case.args), state)
    assert q_clean.shape == (2, 4, 16)
    assert k_bar.shape == (2, 2, 16)
    assert final.second_moment.shape == (2, 2, 16, 16)


def saved_for_backward(case: Case, **options) -> list[Tensor]:
    """Every tensor that autograd keeps between forward and backward."""
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        outputs = clean_query(*case.args, **case.where, output_final_state=True, backend="chunk", **options)
    assert outputs[0].requires_grad
    return [x for x in saved if x.numel()]


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("centred", [True, False])
def test_only_q_k_bar_and_a_few_numbers_a_token_are_saved(normalize, dtype, centred):
    case = make_case(B=1, T=200, Hq=4, Hk=2, K=16, dtype=dtype).leaves()
    saved = saved_for_backward(case, normalize=normalize, centred=centred)
    expected = [case.q.nbytes, case.k.nbytes, case.lam.nbytes]
    if centred:
        expected.append(200 * 4 * 4)  # the mean score m_t in fp32
    if normalize != "none":
        expected.append(200 * 2 * 4)  # 1/|k| in fp32
    assert sorted(x.nbytes for x in saved) == sorted(expected)
    pointers = {x.data_ptr() for x in saved}
    assert case.q.data_ptr() in pointers, "q itself is kept, no copy"
    assert case.lam.data_ptr() in pointers, "lam itself is kept, no copy"
    assert (case.k.data_ptr() in pointers) == (normalize != "unit")


def test_a_view_of_more_is_not_saved():
    """The q, k and v of one convolution would live as long as the part of it that is q."""
    case = make_case(B=1, T=200, Hq=4, Hk=4, K=16, dtype=torch.float32)
    q = torch.cat([case.q, case.k, case.k], 2).requires_grad_()[:, :, :4]
    saved = saved_for_backward(replace(case, q=q))
    assert max(x.untyped_storage().nbytes() for x in saved) == case.q.nbytes


def test_an_initial_state_is_all_that_is_saved_besides():
    case = make_case(T=200, state=True).leaves()
    without = make_case(T=200).leaves()
    extra = sum(x.nbytes for x in saved_for_backward(case)) - sum(x.nbytes for x in saved_for_backward(without))
    assert extra == case.initial_state.nbytes


def graph_nodes(x: Tensor) -> int:
    """How many nodes of the autograd graph are behind x."""
    seen, todo = set(), [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return len(seen)


def test_graph_and_saved_memory_are_linear_in_the_length():
    nodes, saved = [], []
    for T in (64, 640):
        case = make_case(B=1, T=T).leaves()
        q_clean, _, state = clean_query(*case.args, output_final_state=True, backend="chunk")
        nodes.append((graph_nodes(q_clean), graph_nodes(state.second_moment)))
        saved.append(sum(x.nbytes for x in saved_for_backward(case)))
    assert nodes[0] == nodes[1]
    assert saved[1] == 10 * saved[0]


def tangents(function, *primals):
    return torch.func.jvp(function, primals, tuple(torch.ones_like(x) for x in primals))


# PyTorch scripts its decompositions at the first use
forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@forward_mode
@pytest.mark.parametrize("through", ["clean_query", "gate", "clean_query by a gate"])
def test_forward_mode_is_refused_not_dropped(through):
    case = make_case(T=3)
    by = make_gate(case)
    function = {
        "clean_query": lambda q, k, lam: clean_query(q, k, lam, backend="chunk")[0],
        "gate": lambda q, k, lam: gate(q, *by, backend="chunk"),
        "clean_query by a gate": lambda q, k, lam: clean_query(q, k, by, backend="chunk")[0],
    }[through]
    with pytest.raises(NotImplementedError, match=r"forward mode.*backend='reference'"):
        tangents(function, *case.args)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"forward mode"):
        tangents(function, *case.args)


@forward_mode
def test_forward_mode_of_the_reference_is_its_derivative():
    case = make_case(T=3)
    got = tangents(mapped("reference"), *case.args)[1]
    step = 1e-6
    ahead, behind = (clean_query(*(x + s * step for x in case.args[:2]), case.lam)[0] for s in (1, -1))
    by_lam = clean_query(case.q, case.k, torch.zeros_like(case.lam))[0] - clean_query(case.q, case.k, case.lam)[0]
    expected = (ahead - behind) / (2 * step) - by_lam / case.lam[..., None]  # linear in lam
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)


def test_gradients_of_torch_func_are_refused_with_a_way_out():
    case = make_case(B=2, T=3)

    def total(*args):
        return mapped("chunk")(*args).square().sum()

    with pytest.raises(NotImplementedError, match=r"torch.func.grad.*backend='reference'"):
        torch.func.grad(total)(*case.args)
    with pytest.raises(NotImplementedError, match=r"torch.func.grad"):
        torch.vmap(torch.func.grad(total))(*(x[:, None] for x in case.args))


def test_gradients_of_each_sample_by_the_reference():
    case = make_case(B=2, T=3)

    def total(*args):
        return mapped("reference")(*args).square().sum()

    got = torch.vmap(torch.func.grad(total))(*(x[:, None] for x in case.args))
    q = case.q.clone().requires_grad_()
    expected = torch.autograd.grad(total(q, case.k, case.lam), q)[0]
    torch.testing.assert_close(got[:, 0], expected)


def test_gradient_checkpointing_gives_the_same_gradients():
    """Saved tensors may be asked for once: torch.utils.checkpoint refuses a second time."""
    from torch.utils.checkpoint import checkpoint

    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 20, 2, 8, generator=draw, requires_grad=True) for _ in range(2))
    lam = torch.rand(1, 20, 2, generator=draw).requires_grad_()
    expected = torch.autograd.grad(clean_query(q, k, lam)[0].square().sum(), (q, k, lam))
    out = checkpoint(lambda *x: clean_query(*x)[0], q, k, lam, use_reentrant=False)
    for got, truth in zip(torch.autograd.grad(out.square().sum(), (q, k, lam)), expected, strict=True):
        assert torch.equal(got, truth)
