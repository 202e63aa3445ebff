"""`ccq.load`: models by name, with every damage named; and the book."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ccq
from ccq import shipped
from ccq.cli import main
from ccq.doctor import DeviceError
from ccq.pretrained import load_model


def test_load_gives_the_weights_and_the_tokenizer_that_lie_there(ships, no_network):
    model, tokenizer = ccq.load("ccq-gla-pico")
    assert model.config.clean
    assert not model.training
    stored = load_file(ships / "ccq-gla-pico" / "model.safetensors")
    assert {name for name, _ in model.named_parameters()} == stored.keys()
    assert stored["lm_head.weight"].dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stored[name].float())
    assert tokenizer.decode(tokenizer("The harbour master").input_ids) == "The harbour master"


def test_load_takes_a_dtype_and_a_folder(ships, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(ships / "gla-pico", folder)
    model, _ = ccq.load(str(folder), dtype=torch.float64)
    assert model.dtype == torch.float64


def test_a_device_that_is_not_there_is_said_to_be_missing(ships, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("ccq.pretrained.load_tokenizer", lambda name: pytest.fail("it should not come this far"))
    with pytest.raises(DeviceError, match=r"'cuda' is not available: torch sees 0 GPUs \(`ccq doctor` says why\)"):
        ccq.load("ccq-gla-pico", device="cuda")


def test_a_folder_of_that_name_comes_first(ships, tmp_path, monkeypatch):
    """As from_pretrained takes it; a file that was changed there is the user's own business."""
    folder = tmp_path / "gla-pico"
    shutil.copytree(ships / "ccq-gla-pico", folder)
    monkeypatch.chdir(tmp_path)
    assert shipped.locate("gla-pico") == "gla-pico"
    assert ccq.load("gla-pico")[0].config.clean


def test_a_folder_of_results_does_not_hide_a_model(ships, tmp_path, monkeypatch):
    """As `ccq eval gla-pico --out gla-pico` leaves it."""
    (tmp_path / "gla-pico").mkdir()
    monkeypatch.chdir(tmp_path)
    assert shipped.locate("gla-pico") == str(ships / "gla-pico")
    assert load_model("gla-pico") is not None
    (tmp_path / "other").mkdir()
    with pytest.raises(shipped.ModelError, match="other has no config"):
        load_model("other")


def test_names_are_those_with_a_manifest(ships):
    assert shipped.names() == ("ccq-gla-pico", "gla-pico", "gla-unit-pico")


def test_a_near_miss_is_named(ships):
    with pytest.raises(shipped.ModelError, match=r"no model 'ccq-gla-pcio'. Did you mean 'ccq-gla-pico'\? These ship"):
        ccq.load("ccq-gla-pcio")


def test_a_name_that_nothing_is_like_may_be_on_the_hub(ships):
    assert shipped.locate("someone/ccq-gla-pico") == "someone/ccq-gla-pico"
    assert shipped.locate("gpt2") == "gpt2"


def test_what_is_neither_here_nor_there_says_what_ships(ships, monkeypatch):
    asked = []

    def offline(name, timeout):
        asked.append((name, timeout))
        raise ConnectionError("no network\nand so on")

    monkeypatch.setattr("huggingface_hub.model_info", offline)
    said = r"no model 'nothing-like-it': it is not a folder .* \(ccq-gla-pico, .* gives none \(Conn\w+: no network\)$"
    with pytest.raises(shipped.ModelError, match=said):
        ccq.load("nothing-like-it")
    assert asked == [("nothing-like-it", 10)]  # once, not for every file
    with pytest.raises(shipped.ModelError, match=r"^there is no model 'no name': .* Hub gives none"):
        ccq.load("no name")


def test_what_the_hub_gave_before_is_found_without_a_network(ships, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    def offline(name, timeout):
        raise ConnectionError("no network")

    config = tmp_path / "config.json"
    config.write_text("{}")
    monkeypatch.setattr("huggingface_hub.model_info", offline)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(config))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **how: lambda text: how["local_files_only"] / 0)
    with pytest.raises(ZeroDivisionError):  # the tokenizer was asked for with local_files_only=True
        ccq.load("someone/cached")


def test_a_preset_is_no_model(ships):
    with pytest.raises(
        shipped.ModelError, match=r"gla-nano is a preset without weights: train it with `ccq train gla_nano`"
    ):
        ccq.load("gla-nano")


def test_one_name_is_one_model(trio, monkeypatch, capsys):
    """What `info` describes is what `generate` takes."""
    monkeypatch.setenv("CCQ_SHIPPED", str(trio))
    layers = load_model("ccq-gla-pico").config.num_hidden_layers
    assert main(["info", "ccq-gla-pico", "ccq_gla_pico"]) == 0
    out = capsys.readouterr().out
    assert "ccq-gla-pico: the model that ships" in out
    shown = {
        line.split()[0]: int(line.split()[1])
        for line in out.splitlines()
        if line.strip().startswith("ccq") and ":" not in line
    }
    assert shown == {"ccq-gla-pico": layers, "ccq_gla_pico": 4}
    assert layers != 4


def test_a_folder_that_holds_no_model_is_named(trio, tmp_path):
    with pytest.raises(shipped.ModelError, match=f"{tmp_path} has no tokenizer"):
        ccq.load(str(tmp_path))
    folder = tmp_path / "model"
    shutil.copytree(trio / "ccq-gla-pico", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    with pytest.raises(shipped.ModelError, match=r"the (model|tokenizer) of .* could not be loaded"):
        ccq.load(str(folder))


@pytest.mark.parametrize("file", ["model.safetensors", "../tokenizer/tokenizer.json", "config.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damage_is_named(trio, tmp_path, monkeypatch, file, damage):
    for name in ("ccq-gla-pico", shipped.TOKENIZER):
        shutil.copytree(trio / name, tmp_path / name)
    monkeypatch.setenv("CCQ_SHIPPED", str(tmp_path))
    path = tmp_path / "ccq-gla-pico" / file
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-7])
    else:
        path.unlink()
    says = {"flipped": "sha256", "cut": f"expected {len(content):,} bytes, got {len(content) - 7:,}", "gone": "missing"}
    with pytest.raises(shipped.ModelError, match=says[damage]) as error:
        ccq.load("ccq-gla-pico")
    assert file in str(error.value)


def test_a_damaged_manifest_is_named(trio, tmp_path, monkeypatch):
    shutil.copytree(trio / "gla-pico", tmp_path / "gla-pico")
    monkeypatch.setenv("CCQ_SHIPPED", str(tmp_path))
    (tmp_path / "gla-pico" / shipped.MANIFEST).write_text('{"name": "gla-pico"}')
    with pytest.raises(shipped.ModelError, match=r"manifest.json is damaged: KeyError 'files'"):
        ccq.load("gla-pico")


def test_seal_lists_every_file_with_its_hash(trio):
    folder = trio / "gla-pico"
    told = json.loads((folder / shipped.MANIFEST).read_text())
    assert told["steps"] == 0
    tokenizer = {f"../tokenizer/{path.name}" for path in (trio / "tokenizer").iterdir()}
    assert "../tokenizer/tokenizer.json" in tokenizer
    assert told["files"].keys() == tokenizer | {path.name for path in folder.iterdir()} - {shipped.MANIFEST}
    for name, each in told["files"].items():
        content = (folder / name).read_bytes()
        assert (each["bytes"], each["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())


def test_commands_take_the_name(ships, tmp_path, capsys, no_network):
    """`ccq eval`, `ccq generate` and `ccq analyze`; and a name that is wrong is said, not traced."""
    common = ["--suite", "length", "--tasks", "book", "--lengths", "64", "--limit", "2", "--device", "cpu"]
    assert main(["eval", "ccq-gla-pico", *common, "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "length.json").read_text())
    assert result["model"]["name"] == "ccq-gla-pico"
    assert result["settings"]["corpora"]["book"]["documents"] == 14
    told = ["generate", "gla-pico", "--prompt", "There was", "--tokens", "3", "--device", "cpu"]
    assert main(told) == 0
    small = ["--variants", "3", "--sentences", "8", "--device", "cpu", "--out", str(tmp_path / "analysis")]
    assert main(["analyze", "alignment", "ccq-gla-pico", *small]) == 0
    assert (tmp_path / "analysis" / "alignment_ccq_gla_pico.json").exists()
    capsys.readouterr()
    for command in (
        ["eval", "gla-pic", *common, "--out", str(tmp_path / "no")],
        ["generate", "gla-pic", "--prompt", "a"],
        ["analyze", "alignment", "gla-pic", *small],
    ):
        assert main(command) == 1
        assert "Did you mean 'gla-pico'?" in capsys.readouterr().err


def test_the_book_is_whole_and_says_what_it_is():
    told = shipped.book()
    assert (told["title"], told["author"], told["year"], told["licence"]) == (
        "Dubliners", "James Joyce", 1914, "public domain",
    )  # fmt: skip
    text = (Path(shipped.__file__).parent / "book.txt").read_bytes()
    assert len(text) <= 300_000
    assert hashlib.sha256(text).hexdigest() == told["sha256"]
    assert "\n\n".join(told["stories"]) + "\n" == text.decode()
    assert [story.split("\n")[0] for story in told["stories"]][:2] == ["THE SISTERS", "AN ENCOUNTER"]


def test_a_damaged_book_is_named(tmp_path, monkeypatch):
    for name in ("book.txt", "book.json"):
        shutil.copy(shipped.HERE / name, tmp_path / name)
    (tmp_path / "book.txt").write_text("It was a dark and stormy night.\n")
    monkeypatch.setattr(shipped, "HERE", tmp_path)
    with pytest.raises(shipped.ModelError, match=r"book.txt is damaged"):
        shipped.book()


def test_what_ships_in_the_package_is_whole():
    """The models of the repository themselves, where it has them."""
    for path in shipped.HERE.glob(f"*/{shipped.MANIFEST}"):
        shipped.verify(path.parent)
        files = shipped.manifest(path.parent)["files"]
        assert {"model.safetensors", "config.json", "../tokenizer/tokenizer.json", "README.md"} <= files.keys()


def test_the_wheel_holds_what_ships(tmp_path, monkeypatch):
    """All of ccq/shipped, whatever ends its names: the build must need no list of them."""
    build = pytest.importorskip("hatchling.build")
    repository = shipped.HERE.parent.parent
    if not (repository / "pyproject.toml").exists():
        pytest.skip("ccq is installed without its repository")
    monkeypatch.chdir(repository)
    wheel = zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path)))
    mine = {str(path.relative_to(repository)) for path in shipped.HERE.rglob("*") if path.is_file()}
    mine = {name for name in mine if "__pycache__" not in name}
    assert {"ccq/shipped/book.txt", "ccq/shipped/book.json"} <= mine
    assert mine <= set(wheel.namelist())
    assert "ccq/bench/measured/train_h200.json" in wheel.namelist(), "`ccq plan` reads it"
    assert sum(item.compress_size for item in wheel.infolist()) < 40e6
