"""`ccq data` as it is typed."""

import pytest

from ccq.cli import main
from ccq.data.shards import TokenShards
from ccq.data.tokenizer import load_tokenizer


def test_tokenizer_prepare_check(tmp_path, corpus, capsys):
    tokenizer, out = str(tmp_path / "tokenizer"), str(tmp_path / "out")
    assert main(["data", "tokenizer", str(corpus), "--vocab-size", "400", "--sample", "1M", "--out", tokenizer]) == 0
    assert "400 entries" in capsys.readouterr().out
    prepare = ["data", "prepare", str(corpus.parent), "--tokenizer", tokenizer, "--out", out, "--workers", "1"]
    prepare += ["--filter", "a-", "--filter", "b-1", "--shard-tokens", "3K", "--needles", "0.1"]
    prepare += ["--needle-forms", "note", "--needle-length", "200", "1K"]
    for _ in range(2):  # the second time there is nothing to do
        assert main(prepare) == 0
        output = capsys.readouterr()
        assert "documents" in output.out
        assert "needle documents" in output.out
    assert TokenShards(out).index["settings"]["filter"] == ["a-", "b-1"]
    assert TokenShards(out).index["settings"]["needles"]["forms"] == ["note"]
    assert main(["data", "check", out]) == 0
    assert "sound" in capsys.readouterr().out


def test_a_tokenizer_is_whole_or_not_there(tmp_path, corpus, capsys, monkeypatch):
    """Scripts take its folder for a finished one."""
    command = ["data", "tokenizer", str(corpus), "--vocab-size", "300", "--out"]
    (tmp_path / "afile").write_text("mine")
    assert main([*command, str(tmp_path / "afile")]) == 1
    output = capsys.readouterr()
    assert "afile is a file: expected a folder" in output.err
    assert "Wrote" not in output.out
    assert (tmp_path / "afile").read_text() == "mine"

    def killed(self, folder, *_, **__):
        (folder / "tokenizer_config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as death:
        death.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", killed)
        assert main([*command, str(tmp_path / "out")]) == 130
    assert not (tmp_path / "out").exists()
    assert main([*command, str(tmp_path / "out")]) == 0
    assert load_tokenizer(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"afile", "out"}


def test_a_tokenizer_is_replaced_only_if_told_so(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    command = ["data", "tokenizer", str(corpus), "--out", str(out), "--vocab-size"]
    assert main([*command, "300"]) == 0
    (out / "merges.txt").write_text("of another kind")
    before = (out / "tokenizer.json").read_bytes()
    assert main([*command, "310"]) == 1
    said = capsys.readouterr().err
    assert f"{out} is not empty, it holds merges.txt, tokenizer.json, tokenizer_config.json: expected" in said
    assert "--force" in said
    assert (out / "tokenizer.json").read_bytes() == before
    assert main([*command, "310", "--force"]) == 0
    assert len(load_tokenizer(out)) == 310
    assert not (out / "merges.txt").exists()


@pytest.mark.parametrize("kind", ["prepare", "tokenizer"])
def test_files_that_are_skipped_are_named(kind, tmp_path, tokenizer_folder, capsys):
    text = tmp_path / "text"
    (text / "b").mkdir(parents=True)
    (text / "b" / "table.csv").write_text("1,2")
    (text / "valid.pdf").write_text("x")
    for number in range(11):
        (text / f"{number:02}.html").write_text("x")
    line = ["data", kind, str(text), "--out", str(tmp_path / "out"), "--exclude", "valid*"]
    line += ["--tokenizer", str(tokenizer_folder), "--workers", "0"] if kind == "prepare" else ["--vocab-size", "300"]
    names = ", ".join(str(text / f"{number:02}.html") for number in range(10))
    assert main(line) == 1
    said = capsys.readouterr().err
    assert f"Skipped files of other kinds (12): {names}, and 2 more\n" in said
    assert "text holds no file that ends in .txt, .txt.gz, .txt.zst, .md, " in said
    assert not (tmp_path / "out" / "index.json").exists()
    (text / "a.txt").write_text("a text that is read " * 20)
    for number in range(5):
        (text / f"{number:02}.html").unlink()
    assert main(line) == 0
    rest = ", ".join(str(text / f"{number:02}.html") for number in range(5, 11))
    assert f"Skipped files of other kinds (7): {rest}, {text / 'b' / 'table.csv'}\n" in capsys.readouterr().err


def test_check_names_every_damaged_shard(some_shards, capsys):
    folder = some_shards[0]
    (folder / "shard-00000.bin").unlink()
    content = bytearray((folder / "shard-00002.bin").read_bytes())
    content[5] ^= 1
    (folder / "shard-00002.bin").write_bytes(content)
    (folder / "shard-00009.bin").write_bytes(b"")
    assert main(["data", "check", str(folder)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    for line, message in zip(
        lines, ("00000.bin is missing", "00002.bin is damaged", "00009.bin is not in the index"), strict=True
    ):
        assert message in line


def test_errors_are_one_line(tmp_path, corpus, capsys):
    for arguments, message in (
        (["check", str(tmp_path)], "index.json is missing"),
        (["tokenizer", str(tmp_path / "nowhere"), "--out", "x"], "nowhere does not exist"),
        (["tokenizer", "--out", "x"], "expected files or folders, or a dataset"),
        (["prepare", str(corpus), "--tokenizer", "t", "--out", "x", "--needle-forms", "note"], "need --needles SHARE"),
        (["prepare", str(corpus), "--tokenizer", "t", "--out", "x", "--needles", "2"], "between 0 and 1"),
    ):
        assert main(["data", *arguments]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert message in lines[-1]
        assert lines[-1].startswith("ccq data: ")
    with pytest.raises(SystemExit):
        main(["data", "tokenizer", str(corpus), "--out", "x", "--sample", "lots"])
    assert "expected a number as 5000, 64M or 2G" in capsys.readouterr().err
