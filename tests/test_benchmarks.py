import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ccq.bench import results
from ccq.ops.clean import chunk

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "operator_cpu.py"


@pytest.fixture(scope="module")
def operator_cpu():
    spec = importlib.util.spec_from_file_location("operator_cpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flop_formulas_are_what_the_chunkwise_backend_does(operator_cpu):
    length = 2 * chunk.pieces(torch.empty(1, 2**14, 4, 64), None)[0].stop  # two pieces
    q, k, lam = operator_cpu.inputs(length)
    options = (chunk.Past(), chunk.Read(True, "unit", "scaled"))
    with FlopCounterMode(display=False) as forward:
        _, k_bar, k_rnorm, means, *_ = chunk.forward(q, k, lam, None, *options)
    with FlopCounterMode(display=False) as backward:
        chunk.backward(
            chunk.Gradients(torch.randn_like(q)), chunk.Saved(q, k_bar, k_rnorm, means, lam, None, None), *options
        )
    assert forward.get_total_flops() == operator_cpu.flop("chunk", length, backward=False)
    assert forward.get_total_flops() + backward.get_total_flops() == operator_cpu.flop("chunk", length, backward=True)


@pytest.mark.parametrize("energy", [0.0, 0.5, 0.9])
def test_mean_energy_is_what_it_says(operator_cpu, energy):
    _, k, _ = operator_cpu.inputs(2000, mean_energy=energy)
    kn = torch.nn.functional.normalize(k, dim=-1)
    assert kn.mean(1).square().sum(-1).tolist()[0] == pytest.approx([energy] * k.shape[2], abs=0.02)


@pytest.mark.parametrize(
    ("kind", "gpu", "file"),
    [
        ("op", "NVIDIA H200", "bench/op_h200.json"),
        ("decode-op", "NVIDIA A100-SXM4-80GB", "bench/decode_op_a100_sxm4_80gb.json"),
    ],
)
def test_results_lie_beside_the_user_under_the_name_of_the_gpu(kind, gpu, file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    parser = results.make_parser(kind, "what it is")
    results.write(parser.parse_args([]), {"rows": [1]})
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")] == [file]
    written = json.loads((tmp_path / file).read_text())
    assert written["rows"] == [1]
    assert {"command", "date", "versions"} <= written.keys()
    results.write(parser.parse_args(["--out", "mine.json"]), {"rows": []})
    assert (tmp_path / "mine.json").exists()
