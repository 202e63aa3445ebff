"""Which implementation runs is chosen in one place and said aloud."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from ccq import backends
from ccq.ops import BackendFallbackWarning, BackendUnavailableError, choose
from ccq.ops.choose import ARCHS, NAMES, OPS, Call, arch, explain, interpreted

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


def call(device=CUDA, dtype=BF16, size=256, **facts) -> Call:
    """One that every kernel takes, but for what is changed."""
    return Call(device, dtype, size, **{"length": 4096, "rows": 8, "unwatched": True, **facts})


@pytest.fixture
def gpu(monkeypatch):
    """Tensors may say that they are on a GPU of this compute capability, where Triton 3.8 and fla are installed."""
    triton = pytest.importorskip("triton")

    def install(*capability: int, version: str = "3.8.0") -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Test GPU")
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(choose, "FLA", True)
        choose.forget()
        return CUDA

    monkeypatch.delenv("CCQ_HOPPER", raising=False)
    yield install
    choose.forget()


def test_one_backend_is_chosen_and_it_runs(no_triton):
    statuses = backends("cpu")
    assert tuple(statuses) == NAMES
    (chosen,) = (status for status in statuses.values() if status.chosen)
    assert chosen.runs
    assert choose.choose("clean_query", Call(CPU, torch.float32, 128)) == chosen.name == "chunk"


def test_status_reads_as_a_line(no_triton):
    status = backends("cpu")
    assert str(status["chunk"]).startswith("-> chunk")
    assert str(status["triton"]).endswith("cannot run: the test says so")


def test_fallback_on_a_gpu_warns_once_and_says_why(gpu, no_triton):
    gpu(8, 0)
    with pytest.warns(BackendFallbackWarning, match=r"Test GPU through backend='chunk'.*the test says so"):
        assert choose.choose("clean_query", call(size=128)) == "chunk"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose.choose("clean_query", call(size=128)) == "chunk"
        assert choose.choose("clean_query", call(size=64)) == "chunk"  # for the same reason


@pytest.mark.parametrize("name", ["reference", "chunk"])
def test_a_backend_asked_for_by_name_does_not_warn(gpu, no_triton, name):
    gpu(8, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose.choose("clean_query", call(), name) == name


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1)])
def test_generations_are_named_by_their_lowest_capability(gpu, capability):
    names = {(7, 5): "before ampere", (8, 6): "ampere", (12, 1): "blackwell"}
    names |= {one.since: one.name for one in ARCHS}
    assert arch(gpu(*capability)).name == names[capability]
    assert arch(CPU).name == "none"


def test_amd_is_no_generation_of_nvidias(gpu, monkeypatch):
    gpu(9, 4)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert arch(CUDA).name == "rocm"
    assert "NVIDIA" in explain("clean_query", call())[1]["triton"]


@pytest.mark.parametrize("op", OPS)
def test_every_operation_runs_everywhere(gpu, op):
    for device, capability in ((CPU, (9, 0)), (CUDA, (7, 0)), (CUDA, (8, 0)), (CUDA, (9, 0)), (CUDA, (10, 0))):
        gpu(*capability)
        for dtype in (BF16, torch.float32, torch.float64):
            name, why_not = explain(op, call(device, dtype))
            assert name in {x.name for x in OPS[op]}
            assert all(why_not.values())
            assert device != CPU or name in ("chunk", "torch")


def test_a_hopper_gpu_runs_the_fastest_of_everything(gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(choose, "QLA", True)
    fastest = {op: explain(op, call(size=128, delta=True))[0] for op in OPS}
    assert fastest == {op: implementations[-1].name for op, implementations in OPS.items()}


def test_an_old_gpu_runs_no_kernel_of_ours_and_says_why(gpu):
    gpu(7, 5)
    name, why_not = explain("clean_query", call())
    assert name == "chunk"
    assert "compute capability 8.0" in why_not["triton"]
    with pytest.raises(BackendUnavailableError, match=r"cannot run decode_step on cuda .* compute capability 8\.0"):
        choose.choose("decode_step", call(), "triton")


def test_a_generation_can_refuse_one_kernel(gpu, monkeypatch):
    """By one line of ARCHS; everything else runs as before."""
    changed = [replace(a, refuses={"decode_step/triton": "it hangs"}) if a.name == "blackwell" else a for a in ARCHS]
    monkeypatch.setattr(choose, "ARCHS", tuple(changed))
    gpu(10, 0)
    assert explain("decode_step", call()) == ("torch", {"triton": "it hangs"})
    assert explain("clean_query", call())[0] == "triton"
    gpu(9, 0)
    assert explain("decode_step", call())[0] == "triton"


@pytest.mark.parametrize(
    ("capability", "version", "switch", "expected"),
    [
        ((9, 0), "3.8.0", None, "hopper"),
        ((9, 0), "3.8.0", "0", "triton"),
        ((9, 0), "3.9.0", None, "triton"),
        ((8, 0), "3.8.0", None, "triton"),
        ((10, 0), "3.8.0", None, "triton"),
    ],
)
def test_hopper_kernels_run_only_where_they_were_looked_at(gpu, monkeypatch, capability, version, switch, expected):
    gpu(*capability, version=version)
    if switch is not None:
        monkeypatch.setenv("CCQ_HOPPER", switch)
    assert explain("clean_query", call())[0] == expected
    assert explain("clean_query", call(size=128, length=128), "triton")[0] == expected
    assert explain("clean_query", call(size=64, packed=True))[0] == expected
    for changed in ({"dtype": torch.float16}, {"dtype": torch.float32}, {"size": 96}, {"length": 127}):
        name, why_not = explain("clean_query", call(**changed))
        assert name == "triton"
        assert ("float16 lacks the range" in why_not["hopper"]) == (changed.get("dtype") == torch.float16)
    assert explain("clean_query", call(CPU))[0] == "chunk"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"device": CPU}, "not on an NVIDIA GPU"),
        ({"dtype": torch.float64}, "float64"),
        ({"size": 512, "delta": True}, "256 channels"),
        ({"size": 512}, None),
        ({"delta": True}, None),
    ],
    ids=str,
)
def test_fla_takes_what_it_can_hold(gpu, changed, why):
    gpu(9, 0)
    name, why_not = explain("recurrence", call(**changed))
    assert name == ("fla" if why is None else "chunk")
    assert why is None or why in why_not["fla"]


def test_flash_qla_is_named_where_fla_takes_it(gpu, monkeypatch):
    """The conditions are those of fla's own backend, but for the size of values, which a call does not say."""
    gpu(9, 0)
    given = {"size": 128, "delta": True}
    assert "pip install 'ccq[qla]'" in explain("recurrence", call(**given))[1]["flash-qla"]
    monkeypatch.setattr(choose, "QLA", True)
    assert explain("recurrence", call(**given))[0] == "flash-qla"
    for changed, why in (({"size": 256}, "128"), ({"delta": False}, "delta"), ({"dtype": torch.float32}, "bfloat16")):
        name, why_not = explain("recurrence", call(**given | changed))
        assert (name, why in why_not["flash-qla"]) == ("fla", True)
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    assert "FLA_FLASH_QLA=0" in explain("recurrence", call(**given))[1]["flash-qla"]
    monkeypatch.delenv("FLA_FLASH_QLA")
    gpu(8, 0)
    assert "Hopper" in explain("recurrence", call(**given))[1]["flash-qla"]


def test_fla_that_is_not_installed_is_not_run(gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(choose, "FLA", False)
    for op in ("recurrence", "norm", "loss", "conv"):
        assert "not installed" in explain(op, call())[1]["fla"]


@pytest.mark.parametrize("changed", [{"rows": 17}, {"rows": 0}, {"unwatched": False}], ids=str)
def test_few_rows_and_nobody_watching_is_what_our_linears_are_for(gpu, changed):
    gpu(9, 0)
    assert explain("linear", call())[0] == "triton"
    assert explain("linear", call(**changed))[0] == "torch"
    assert explain("swiglu", call(**changed))[0] == "passes"


@pytest.mark.skipif(not interpreted(), reason="Triton's interpreter is off")
def test_the_interpreter_runs_where_it_is_asked_for_and_not_by_itself():
    here = call(CPU, torch.float32)
    assert choose.choose("clean_query", here, "triton") == choose.choose("linear", here, "triton") == "triton"
    assert choose.choose("clean_query", here) == "chunk"
    assert choose.choose("linear", here) == "torch"


def test_operations_can_go_without_kernels(gpu, monkeypatch):
    gpu(9, 0)
    assert choose.choose("norm", call()) == "fla"
    monkeypatch.setattr(choose, "PLAIN", frozenset({"norm"}))
    assert choose.choose("norm", call()) == "torch"
    assert choose.choose("swiglu", call()) == "triton"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("installed", [True, False])
def test_a_compiler_decides_as_eager_code_does(gpu, fresh_compiler, monkeypatch, device, installed):
    """The decision is traced: no break of the graph, and no warning but that of a fallback."""
    gpu(9, 0)
    monkeypatch.setattr(choose, "FLA", installed)

    def f(x):
        call = Call(torch.device(device), BF16, x.shape[-1], delta=True)
        return x + {"chunk": 1, "fla": 2}[choose.choose("recurrence", call)]

    compiled = torch.compile(f, fullgraph=True, backend="eager", dynamic=False)
    if device == "cuda" and not installed:
        with pytest.warns(BackendFallbackWarning, match="Test GPU through backend='chunk'.*fla is not installed"):
            y = compiled(torch.zeros(3))
    else:
        y = compiled(torch.zeros(3))
    assert y.tolist() == [2 if device == "cuda" and installed else 1] * 3
