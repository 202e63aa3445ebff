import json
import platform
import warnings
from dataclasses import replace

import pytest
import torch

from ccq import cli, doctor
from ccq.doctor import Environment, Gpu, diagnose
from ccq.ops.choose import OPS, Call, choose

H200 = Gpu("NVIDIA H200", (9, 0), 139.8)
GOOD = Environment(
    python="3.12.4",
    platform="Linux",
    torch="2.11.0+cu130",
    build="CUDA 13.0",
    packages={"triton": "3.8.0", "fla-core": "0.6.0", "flash-linear-attention": None, "transformers": "5.1.0"},
    gpus=(H200,),
    driver="580.65.06",
)
LAPTOP = Environment(
    python="3.11.7", platform="macOS", torch="2.9.0", build=None, packages=dict.fromkeys(GOOD.packages, None)
)


def having(env: Environment, **versions: str | None) -> Environment:
    return replace(env, packages={**env.packages, **{name.replace("_", "-"): v for name, v in versions.items()}})


@pytest.mark.parametrize("env", [GOOD, LAPTOP], ids=["H200", "laptop"])
def test_good_machine_has_no_findings(env):
    assert diagnose(env) == []


@pytest.mark.parametrize(
    ("triton", "issue"),
    [
        ("3.4.0", "#640"),
        ("3.5.1", "#640"),
        ("3.6.0", "#640"),
        ("3.7.0", "#640"),
        ("3.7.0+git1a2b3c", "#640"),
        ("3.7.1", "#984"),
        ("3.7.2", "#984"),
    ],
)
def test_triton_with_wrong_gradients_on_hopper_is_an_error(triton, issue):
    (finding,) = diagnose(having(GOOD, triton=triton))
    assert finding.level == "error"
    assert triton in finding.what
    assert f"issue {issue}" in finding.what
    assert "triton>=3.8.0" in finding.cure


@pytest.mark.parametrize("triton", ["3.8.0", "3.8.0+git1a2b3c", "3.8.1"])
def test_the_triton_of_the_hopper_kernels_is_fine(triton):
    assert diagnose(having(GOOD, triton=triton)) == []


@pytest.mark.parametrize("triton", ["3.10.0", "4.0.0"])
def test_newer_triton_on_hopper_is_right_and_slower(triton):
    (finding,) = diagnose(having(GOOD, triton=triton))
    assert finding.level == "warning"
    assert f"with {triton} the plain ones run" in finding.what
    other = replace(having(GOOD, triton=triton), gpus=(Gpu("other", (8, 0), 80.0),))
    assert diagnose(other) == []


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_compute_right_with_an_old_triton(capability):
    (finding,) = diagnose(replace(having(GOOD, triton="3.6.0"), gpus=(Gpu("other", capability, 80.0),)))
    assert finding.level == "warning"
    assert "older than 3.8.0" in finding.what


def test_one_hopper_among_others_is_enough():
    env = replace(having(GOOD, triton="3.6.0"), gpus=(Gpu("NVIDIA A100", (8, 0), 80.0), H200))
    assert diagnose(env)[0].level == "error"


def test_amd_gpu_of_capability_9_is_no_hopper():
    env = replace(having(GOOD, triton="3.5.0"), build="ROCm 7.0", gpus=(Gpu("MI300X", (9, 4), 192.0),), driver=None)
    assert diagnose(env) == []


def test_old_triton_without_gpu_is_fine():
    assert diagnose(having(LAPTOP, triton="3.5.0")) == []


@pytest.mark.parametrize(
    ("env", "what", "cure"),
    [
        (having(LAPTOP, fla_core="0.6.0"), "fla is installed without Triton", "triton>=3.8.0"),
        (having(LAPTOP, flash_linear_attention="0.3.0"), "fla is installed without Triton", "triton>=3.8.0"),
        (having(GOOD, triton=None, fla_core=None), "Triton is not installed", "ccq[gpu]"),
        (having(GOOD, flash_linear_attention="0.10.1"), "0.6.0 and flash-linear-attention 0.10.1", "fla-core==0.10.1"),
        (replace(LAPTOP, driver="550.54.15"), "built for the CPU only", "with CUDA"),
        (replace(GOOD, gpus=()), "sees no GPU", "CUDA_VISIBLE_DEVICES"),
        (
            replace(GOOD, gpus=(), complaint="The driver is too old"),
            "The driver is too old",
            "new enough for CUDA 13.0",
        ),
        (replace(LAPTOP, python="3.10.14"), "Python 3.10.14 is too old", "3.11"),
        (replace(GOOD, variables={"TRITON_INTERPRET": "1"}), "TRITON_INTERPRET", "unset TRITON_INTERPRET"),
        (replace(GOOD, variables={"CCQ_CHECK": "1"}), "CCQ_CHECK=1", "unset CCQ_CHECK"),
        (replace(GOOD, variables={"CCQ_HOPPER": "0"}), "CCQ_HOPPER=0", "unset CCQ_HOPPER"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_known_bad_combination_is_a_warning_with_a_cure(env, what, cure):
    (finding,) = diagnose(env)
    assert finding.level == "warning"
    assert what in finding.what
    assert cure in finding.cure


def test_equal_versions_of_both_parts_of_fla_are_fine():
    assert diagnose(having(GOOD, flash_linear_attention="0.6.0")) == []


def test_interpreter_without_gpu_is_fine():
    assert diagnose(replace(LAPTOP, variables={"TRITON_INTERPRET": "1", "CCQ_CHECK": "1"})) == []


def test_errors_come_first():
    levels = [finding.level for finding in diagnose(replace(having(GOOD, triton="3.6.0"), python="3.10.1"))]
    assert levels == ["error", "warning"]


@pytest.fixture
def machine(monkeypatch):
    """Put a made-up machine in this one's place; its GPU takes half precision in Triton."""

    def made_up(operation, call):
        runs = call.device.type == "cuda" and call.dtype == torch.bfloat16 and operation == "clean_query"
        if runs or operation != "clean_query":
            return OPS[operation][-1].name, {}
        return "chunk", {"triton": f"no {call.dtype} on {call.device}"}

    def install(env):
        monkeypatch.setattr(doctor, "look", lambda: env)
        monkeypatch.setattr(doctor, "explain", made_up)

    return install


def test_wrong_numbers_exit_1_and_say_so(machine, capsys):
    machine(having(GOOD, triton="3.6.0"))
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "ERROR: Triton 3.6.0 computes wrong gradients" in text
    assert "cure: pip install 'triton>=3.8.0'" in text
    assert "can be WRONG" in text


def test_warnings_exit_0(machine, capsys):
    machine(replace(GOOD, python="3.10.1"))
    assert doctor.main([]) == 0
    assert "WARNING: Python 3.10.1" in capsys.readouterr().out


def test_report_says_which_backend_runs_and_why_not_the_faster(machine, capsys):
    machine(GOOD)
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["clean_query", "cuda", "bfloat16", "hopper", *OPS["clean_query"][-1].what.split()] in lines
    assert ["clean_query", "cuda", "float32,", "float64", "chunk", *OPS["clean_query"][1].what.split()] in lines
    assert "not triton on cuda for clean_query: no torch.float64 on cuda" in text
    assert "NVIDIA H200, compute capability 9.0, 139.8 GiB" in text
    assert "No known problem." in text


def test_json_of_made_up_machine(machine, capsys):
    machine(having(GOOD, triton="3.7.1"))
    assert doctor.main(["--json"]) == 1
    parts = json.loads(capsys.readouterr().out)
    assert parts["environment"]["gpus"] == [{"name": "NVIDIA H200", "capability": [9, 0], "memory_gib": 139.8}]
    assert [finding["level"] for finding in parts["findings"]] == ["error"]
    assert len(parts["backends"]) == len(OPS) * 2 * 3  # operations, devices, dtypes


def test_json_of_this_machine(capsys, monkeypatch):
    monkeypatch.setenv("CCQ_MADE_UP", "1")
    code = doctor.main(["--json"])
    parts = json.loads(capsys.readouterr().out)
    assert parts["environment"]["torch"] == torch.__version__
    assert parts["environment"]["python"] == platform.python_version()
    assert parts["environment"]["variables"]["CCQ_MADE_UP"] == "1"
    assert {row["operation"] for row in parts["backends"]} == set(OPS)
    for row in parts["backends"]:
        call = Call(torch.device(row["device"]), getattr(torch, row["dtype"]), 128, 4096, rows=1, unwatched=True)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says where something slow runs
            assert choose(row["operation"], call) == row["backend"]
    assert code == any(finding["level"] == "error" for finding in parts["findings"])


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("something else", "of unknown version"),
    ],
)
def test_driver_version_is_read_from_proc(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert doctor.nvidia_driver(tmp_path / "version") == version


def test_no_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.nvidia_driver(tmp_path / "version") is None


def test_a_cpu_on_which_bf16_kills_is_told_and_refused(monkeypatch, tmp_path, capsys):
    """Where a product would end the process, each command says so and what to do."""
    (found,) = diagnose(replace(LAPTOP, cpu_bf16_kills=True))
    assert "bf16" in found.what
    assert "ONEDNN_MAX_CPU_ISA" in found.cure
    monkeypatch.setattr("torch.backends.mkldnn.enabled", True)
    monkeypatch.setattr(doctor, "cpu_bf16_kills", lambda: True)
    with pytest.raises(ValueError, match=r"kills the process on this CPU: .* ONEDNN_MAX_CPU_ISA"):
        doctor.check_cpu_bf16("cpu", "bf16")
    doctor.check_cpu_bf16("cpu", "fp32")
    doctor.check_cpu_bf16("cuda", "bf16")
    monkeypatch.chdir(tmp_path)
    asked = ["--device", "cpu", "--out", "nowhere"]
    for command in (
        ["train", "gla_pico", "--run-dir", "nowhere", "--data.path", "nothing", "--runtime.device", "cpu"],
        ["sweep", "mqar", "--tier", "rows", *asked],
        ["eval", "gla-pico", "--suite", "length", "--tasks", "book", "--dtype", "bfloat16", *asked],
    ):
        assert cli.main(command) == 1
        assert "ONEDNN_MAX_CPU_ISA" in capsys.readouterr().err
