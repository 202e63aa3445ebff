import doctest
import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts import script
from torch.utils.flop_counter import FlopCounterMode

from ccq import bench
from ccq.bench import results
from ccq.ops.clean import chunk


@pytest.fixture(scope="module")
def operator_cpu():
    return script("benchmarks/operator_cpu.py")


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
    results.write(parser.parse_args(["--out", "mine.json"]), {"rows": [2]})
    assert json.loads((tmp_path / "mine.json").read_text())["rows"] == [2]
    (tmp_path / "mine.json").write_text('{"rows": [3]}')
    with pytest.raises(FileExistsError, match=r"mine.json holds something else"):  # before anything is measured
        parser.parse_args(["--out", "mine.json"])


def test_what_the_docs_say_of_training_on_is_what_was_measured():
    root = Path(__file__).parent.parent
    text = (root / "docs" / "training.md").read_text()
    found = json.loads((root / "benchmarks" / "study" / "continue_tiny.json").read_text())["seeds"]
    names = {
        "SEEDS": list(found), "mean": lambda values: statistics.mean(list(values)),
        "lower": lambda a, b, seed: found[seed][a]["valid_loss"] - found[seed][b]["valid_loss"],
        "accuracy": lambda row, seed: found[seed][row]["valid_accuracy"],
        "p_of": two_sided,
    }  # fmt: skip
    sentences = re.findall(r"<!-- holds: (.+?) -->", text)
    assert len(sentences) == 6
    for sentence in sentences:
        assert eval(sentence, names), sentence
    rows = re.findall(r"^\| (\d) \|(( [\d.]+ \|)+)$", text, re.M)
    told = {seed: cells.strip(" |").split(" | ") for seed, cells, _ in rows}
    columns = ("begun", "gla", "ccq-gla", "gates alone")
    assert told == {s: [f"{rows[row]['valid_loss']:.3f}" for row in columns] for s, rows in found.items()}


def two_sided(values):
    """p of a paired t-test of three differences: with two degrees of freedom t's distribution has a closed form."""
    assert len(values) == 3
    t = statistics.mean(values) / (statistics.stdev(values) / len(values) ** 0.5)
    return 1 - abs(t) / (2 + t * t) ** 0.5


def test_the_script_of_training_on_works(monkeypatch, capsys):
    module = script("benchmarks/continue_tiny.py")
    monkeypatch.setattr("sys.argv", ["continue_tiny.py", "--quick"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of this process, for other tests
    module.main()
    assert re.search(r"seed 0: begun \d.*, gla \d.*, ccq-gla \d.*, gates alone \d", capsys.readouterr().out)


@pytest.mark.parametrize("system", results.FLA)
def test_models_of_fla_have_the_options_of_ours(system):
    """As many parameters, of the same shapes; the trainer scores the token that follows each but the last."""
    pytest.importorskip("fla")
    from ccq.bench.models import Foreign, of_fla
    from ccq.model import CCQConfig, CCQForCausalLM

    with torch.device("meta"):
        theirs = of_fla(system, "nano")
        ours = CCQForCausalLM(CCQConfig.preset(f"{results.FLA[system]}-nano"))
    shapes = [sorted(tuple(x.shape) for x in model.parameters()) for model in (theirs, ours)]
    assert shapes[0] == shapes[1]

    ids, said = torch.arange(12).view(2, 6), []

    class Recorder(torch.nn.Module):
        def forward(self, ids, labels, use_cache):
            said.append(labels[:, 1:])  # as fla shifts them
            return SimpleNamespace(loss=torch.zeros(()))

    Foreign(Recorder())(ids, targets=ids + 1, cu_seqlens=None, use_cache=False)
    assert torch.equal(said[0], ids[:, :-1] + 1)


def test_models_of_fla_stand_in_the_tables_where_they_were_measured(tmp_path):
    from ccq.bench import inference, train
    from ccq.report.collect import collect

    root = Path(__file__).parent.parent
    measured = json.loads((root / "benchmarks" / "study" / "cost" / "train_fla_h200.json").read_text())
    (tmp_path / "train.json").write_text(json.dumps(measured))
    generated = {"system": "fla-gla", "size": "1.3b", "B": 8, "dtype": "bfloat16", "prompt": 512, "step_ms": None,
                 "plain_ms": None, "step_tok_s": None, "generate_tok_s": 177.4}  # fmt: skip
    (tmp_path / "decode.json").write_text(json.dumps({**measured, "bench": "decode", "rows": [generated]}))
    found = collect([tmp_path])
    shown = {
        table.name: {row.label.text: [cell.text for cell in row.cells] for block in table.blocks for row in block.rows}
        for table in (*train.tables(found), *inference.tables(found))
    }
    assert shown["training"]["GLA, by fla"] == ["–", "47,308", "–", "71.5"]
    assert shown["training"]["CCQ-GLA"][1] == "47,774 (−2.4%)"  # over its own control
    assert shown["lengths"]["Gated DeltaNet, by fla, 1.3B"] == ["46,403"]
    assert shown["inference"]["GLA, by fla"][3:] == ["177", "–", "–"]
    assert "Gated DeltaNet, by fla" not in shown["inference"]


def test_the_classes_of_kernels_are_as_the_script_says():
    found = doctest.testmod(script("benchmarks/profile_step.py"))
    assert found.attempted == 3
    assert not found.failed


@pytest.mark.parametrize("kind", ["layer", "op", "decode-op", "profile"])
def test_kernels_and_layers_are_measured_in_a_clone(kind, capsys, monkeypatch, tmp_path):
    with pytest.raises(SystemExit) as ended:
        bench.main([kind, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert f"ccq bench {kind} " in told
    assert f"bench/{kind.replace('-', '_')}_GPU.json" in told
    monkeypatch.setattr(bench, "SCRIPTS", tmp_path)  # as in a wheel
    assert bench.main([kind]) == 1
    assert "needs a clone of the repository" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["passes", "adamw", "decode"])
def test_every_kernel_runs(name, monkeypatch):
    """As the checkers of CUDA run it; the operator's own, which take longer to interpret, are called by other tests."""
    kernels = script("benchmarks/every_kernel.py")
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    kernels.KERNELS[name]()


def test_the_candidate_beside_fla(monkeypatch, tmp_path):
    """All that the script does, at a small size, with the candidate in fla's place: no GPU is timed."""
    pytest.importorskip("triton")
    beside = script("benchmarks/gla_beside_fla.py")

    def timed(call, **_):
        call()
        return {"median": 2.0}

    monkeypatch.setattr(beside, "DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(beside, "graph_time", timed)
    monkeypatch.setattr(beside, "fla", beside.ours.gla)
    monkeypatch.setattr(beside, "SHAPES", {"small": (2, 70, 2, 16, 32, 3)})
    monkeypatch.setattr(beside, "TRIED", {"prepare": {"BK": (16, 32)}, "outputs": {"BK": (16, 32), "BV": (16,)}})
    monkeypatch.setattr(beside.ours, "SIZES", dict(beside.ours.SIZES))
    out = tmp_path / "gla.json"
    monkeypatch.setattr("sys.argv", ["gla_beside_fla.py", "--sweep", "--out", str(out)])
    beside.main()
    first, *tried, mine = json.loads(out.read_text())["rows"]
    assert (first["kernels"], mine["kernels"], mine["saved_ms"]) == ("fla", "ours", 0)
    assert [x["BK"] for x in tried] == [16, 32] * 2
    assert mine["sizes"]["prepare"] == {"BK": 16}
    assert all(first[name] == mine[name] < 0.01 for name in ("o", "dq", "dk", "dv", "dg"))


def test_the_candidate_names_what_it_cannot_measure(monkeypatch, capsys):
    pytest.importorskip("triton")
    beside = script("benchmarks/gla_beside_fla.py")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, told in ((["--shapes", "1.3"], "there is no 1.3; there are 1.3b"), ([], "no NVIDIA GPU here")):
        monkeypatch.setattr("sys.argv", ["gla_beside_fla.py", "--out", "unused.json", *options])
        with pytest.raises(SystemExit):
            beside.main()
        assert told in capsys.readouterr().err


def test_what_docs_say_the_candidate_moves():
    """GB of a layer at 1.3B, and their time at the speed of a copy."""
    pytest.importorskip("triton")
    beside = script("benchmarks/gla_beside_fla.py")
    moved = beside.bytes_moved(beside.SHAPES["1.3b"], 64) / 1e9
    text = " ".join((Path(__file__).parent.parent / "docs" / "kernels.md").read_text().split())
    assert f"move {moved:.0f} GB a layer forward and backward" in text
    assert f"which a copy takes {moved / 4.2:.1f} ms for" in text
