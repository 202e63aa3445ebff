"""The files of a conversion: shards, damage, what is left of one that stops; and the command."""

from __future__ import annotations

import json
import os
import re
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fla_checkpoints import assert_same_tensors, make_tensors
from safetensors.torch import load_file, save_file

from ccq import cli
from ccq.model.convert import convert, main

# Files


def shard(folder, suffix="safetensors"):
    """The weights of a folder, in three files with an index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    places = {}
    for i in range(3):
        part = dict(list(tensors.items())[i::3])
        name = f"{stem}-{i + 1:05d}-of-00003.{suffix}"
        (save_file if suffix == "safetensors" else torch.save)(part, folder / name)
        places |= dict.fromkeys(part, name)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index, places


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(suffix, source, tmp_path):
    folder = source("gla")
    convert(folder, tmp_path / "whole")
    index, places = shard(folder, suffix)
    convert(folder, tmp_path / "ours")
    assert_same_tensors(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "ours")))
    victim = folder / sorted(set(places.values()))[1]
    data = victim.read_bytes()
    victim.write_bytes(data[:-100])
    with pytest.raises(OSError, match=rf"{victim.name}: damaged"):
        convert(folder, tmp_path / "x")
    victim.unlink()
    with pytest.raises(FileNotFoundError, match=f"names {victim.name}: there is no such file"):
        convert(folder, tmp_path / "x")
    index.write_text("{}")
    with pytest.raises(ValueError, match="expected a weight_map"):
        convert(folder, tmp_path / "x")
    index.write_text(json.dumps({"weight_map": {"a": "../whole/model.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="no such file beside it"):
        convert(folder, tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {"fla", "whole", "ours"}


def test_a_tensor_in_two_shards(source, tmp_path):
    folder = source("gla")
    _, places = shard(folder)
    first, second = sorted(set(places.values()))[:2]
    save_file({**load_file(folder / first), **load_file(folder / second)}, folder / first)
    with pytest.raises(ValueError, match="is also in another file"):
        convert(folder, tmp_path / "x")


def test_a_pickle_that_runs_something_does_not(source, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = source("gla")
    (folder / "model.safetensors").unlink()
    torch.save({"model.embeddings.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="it contains more than tensors"):
        convert(folder, tmp_path / "x")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(keep, source, tmp_path):
    folder = source("gla")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(OSError, match=r"model\.safetensors: damaged or cut off"):
        convert(folder, tmp_path / "x")
    assert list(tmp_path.iterdir()) == [folder]


def test_tensors_that_are_no_weights(source, tmp_path):
    tensors = make_tensors("gla")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    with pytest.raises(ValueError, match=r"lm_head.weight is of torch.int8; expected torch.float64 or torch.float32"):
        convert(source("gla", tensors), tmp_path / "x")


def test_no_weights_no_config(source, tmp_path):
    folder = source("gla")
    (folder / "model.safetensors").rename(folder / "consolidated.pth")
    with pytest.raises(FileNotFoundError, match=r"expected model.safetensors .* got config.json, consolidated.pth"):
        convert(folder, tmp_path / "x")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: expected JSON"):
        convert(folder, tmp_path / "x")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        convert(folder, tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        convert(tmp_path / "nowhere", tmp_path / "x")


def test_target_that_is_there(source, tmp_path):
    folder = source("gla")
    target = tmp_path / "a" / "b"
    convert(folder, target)  # makes its parents
    before = (target / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(FileExistsError, match=r"is not empty, it holds config.json, .*--force"):
        convert(folder, target)
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError):
        convert(folder, folder)
    with pytest.raises(FileExistsError):
        convert(folder, folder / "config.json")
    (tmp_path / "empty").mkdir()
    convert(folder, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_with_force_nothing_of_the_old_model_stays(source, tmp_path, capsys):
    folder, out = source("gla"), tmp_path / "out"
    out.mkdir()
    for name in ("tokenizer.json", "vocab.json", "model-00001-of-00002.safetensors", "pytorch_model.bin"):
        (out / name).write_text("older")
    (out / "notes.txt").write_text("mine")
    assert cli.main(["convert", str(folder), str(out)]) == 1
    assert "--force" in capsys.readouterr().err
    assert cli.main(["convert", str(folder), str(out), "--force"]) == 0
    convert(folder, tmp_path / "fresh")
    assert {path.name for path in out.iterdir()} == {"notes.txt", *(p.name for p in (tmp_path / "fresh").iterdir())}
    with pytest.raises(ValueError, match="target: expected another folder than the source"):
        convert(out, out, force=True)


@pytest.mark.parametrize("when", ["save_file", "_copy_companions"])
def test_nothing_is_left_of_a_conversion_that_stops(when, source, tmp_path, monkeypatch):
    folder = source("gla")

    def stop(*_):
        assert any(path.name.endswith(".partial") for path in tmp_path.iterdir())
        assert not (tmp_path / "x").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ccq.model.convert.{when}", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "x")
    assert list(tmp_path.iterdir()) == [folder]


def test_the_file_is_as_safetensors_wants_it(source, tmp_path):
    """Aligned, without gaps, and each tensor in its own dtype."""
    tensors = make_tensors("gated_deltanet")
    tensors = {name: x if name.endswith(("A_log", "dt_bias")) else x.bfloat16() for name, x in tensors.items()}
    convert(source("gated_deltanet", tensors), tmp_path / "ours")
    data = (tmp_path / "ours" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    ends = sorted(x["data_offsets"] for x in header.values())
    assert ends[0][0] == 0
    assert ends[-1][1] == len(data) - 8 - length
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    loaded = load_file(tmp_path / "ours" / "model.safetensors")
    assert loaded["model.layers.0.mixer.A_log"].dtype == torch.float32
    assert loaded["model.layers.0.mixer.q_proj.weight"].dtype == torch.bfloat16


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells how much memory is no file's")
def test_memory_does_not_grow_with_the_model(source, tmp_path, monkeypatch):
    """Tensors stay in the file that they come from until they are written."""

    def anonymous():
        return 1024 * int(re.search(r"Anonymous: +(\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

    tensors = make_tensors("gla")
    for name in ("model.embeddings.weight", "lm_head.weight"):
        tensors[name] = torch.zeros(2**18, 32)
    seen = []

    def watched(*arguments):
        seen.append(anonymous())
        save_file(*arguments)
        seen.append(anonymous())

    folder = source("gla", tensors, vocab_size=2**18)
    del tensors
    before = anonymous()
    monkeypatch.setattr("ccq.model.convert.save_file", watched)
    convert(folder, tmp_path / "large")
    assert max(seen) - before < (folder / "model.safetensors").stat().st_size / 4


# The command


def test_command(source, tmp_path, capsys):
    folder = source("gla")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md", "modeling.py"):
        (folder / name).write_text(json.dumps({"name": name}))
    assert cli.main(["convert", str(folder), str(tmp_path / "ours"), "--clean", "--gate-init", "0.05"]) == 0
    out = capsys.readouterr().out
    assert "ccq layout, gla, 2 layers" in out
    assert "lam starts at 0.05, normalize='stats'" in out
    assert "ignored, for it does not change the function: attn_mode, fuse_cross_entropy" in out
    assert "copied: generation_config.json, tokenizer.json, tokenizer_config.json" in out
    assert "left behind: README.md, modeling.py" in out
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors", "modeling_ccq.py", "tokenizer.json"),
        "tokenizer_config.json",
    ]


def test_command_that_fails(source, tmp_path, capsys):
    folder = source("gla", clamp_min=0.1)
    assert main([str(folder), str(tmp_path / "x")]) == 1
    assert "clamp_min: expected None, got 0.1 (our log-decays have no lower bound)" in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path / "none" / "here"), str(tmp_path / "x")]) == 1
    assert "here does not exist: expected a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(folder), str(tmp_path / "x"), "--gate-init", "0.1"])
    assert "--gate-init: expected --clean beside it" in capsys.readouterr().err
    assert main([str(folder), str(tmp_path / "x"), "--clean", "--gate-init", "1.5"]) == 1
    assert "gate_init: expected a number above 0 and below 1, got 1.5" in capsys.readouterr().err


def test_a_name_on_the_hub(source, tmp_path, monkeypatch):
    import huggingface_hub

    folder = source("gla")
    asked = []
    monkeypatch.setattr(huggingface_hub, "model_info", lambda name, timeout: None)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, allow_patterns: asked.append(name) or str(folder)
    )
    assert main(["fla-hub/gla-1.3B-100B", str(tmp_path / "ours")]) == 0
    assert asked == ["fla-hub/gla-1.3B-100B"]

    def fail(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "model_info", fail)
    with pytest.raises(OSError, match=r"no model 'fla-hub/gla': .* the Hub gives none \(ConnectionError: offline\)"):
        main(["fla-hub/gla", str(tmp_path / "x")])


def test_a_model_that_ships_by_its_name(tmp_path, monkeypatch, capsys):
    """The same resolver as `ccq generate` and `ccq.load`; the tokenizer that shipped models share goes along."""
    import ccq

    monkeypatch.chdir(tmp_path)
    assert main(["gla-pico", "cleaned", "--clean"]) == 0
    assert "lam starts at 0.01" in capsys.readouterr().out
    (before, theirs), (after, ours) = ccq.load("gla-pico"), ccq.load("cleaned")
    assert ours("The Queen").input_ids == theirs("The Queen").input_ids
    tensors = after.state_dict()
    assert_same_tensors(before.state_dict(), {name: tensors[name] for name in before.state_dict()})
    assert {name for name in tensors if name not in before.state_dict()} == {n for n in tensors if "cleaner" in n}


def test_a_run_is_told_from_a_model(tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    assert main([str(tmp_path / "run"), str(tmp_path / "x")]) == 1
    assert f"`ccq export {tmp_path / 'run'} OUT`" in capsys.readouterr().err
