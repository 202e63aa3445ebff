"""The same documents, whatever they are stored in, in a fixed order, from any place on."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ccq.data import DataError, sources
from ccq.data.sources import Inputs, Position, cut_before

TEXTS = ["One.", "Two words\r\nand a line", "日本語 🦜\x00", " ", "five 5"]


def documents(pieces):
    """[(id, text)] from pieces."""
    found, text = [], ""
    for piece in pieces:
        text += piece.text
        if piece.last:
            found.append((piece.id, text))
            text = ""
    assert not text, "the last document has no end"
    return found


def pack(content, packed):
    if packed == ".gz":
        return gzip.compress(content)
    if packed == ".zst":  # in two frames, as parallel compressors write it
        half = len(content) // 2
        compress = zstandard.ZstdCompressor().compress
        return compress(content[:half]) + compress(content[half:])
    return content


def write(folder, kind, texts=TEXTS):
    """The texts in one file (text: one each) of a kind; ids t0, t1, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"t{n}", "text": text} for n, text in enumerate(texts)]
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet", row_group_size=2)
    elif kind.startswith(".txt"):
        for row in rows:
            (folder / (row["id"] + kind)).write_bytes(pack(row["text"].encode(), kind[4:]))
    else:
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        (folder / f"data{kind}").write_bytes(pack(content, kind[6:]))
    return folder


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".txt.gz", ".txt.zst"])
@pytest.mark.parametrize("left", [0.1, 0.4, 0.9, -1])
def test_a_packed_file_that_was_cut_off_is_named(tmp_path, kind, left):
    """Not taken for a shorter one. (At the border of two frames nothing could tell.)"""
    folder = write(tmp_path, kind, ["a line\n" * 100_000])
    [file] = folder.iterdir()
    packed = file.read_bytes()
    file.write_bytes(packed[: left if left < 0 else int(left * len(packed))])
    with pytest.raises(DataError, match=f"{file.name} is damaged: "):
        documents(Inputs((folder,)).pieces())


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".txt.gz", ".txt.zst", ".parquet"])
def test_all_formats_give_the_same_documents(tmp_path, kind):
    folder = write(tmp_path / "data", kind)
    found = documents(Inputs((folder,)).pieces())
    assert [text for _, text in found] == TEXTS
    suffix = kind if kind.startswith(".txt") else ""
    assert [id for id, _ in found] == [f"t{n}{suffix}" for n in range(5)]
    assert Inputs((folder,)).size() == sum(p.stat().st_size for p in folder.iterdir())
    last = list(Inputs((folder,)).pieces())[-1]
    assert 0 < last.read <= Inputs((folder,)).size()


def test_order_is_arguments_then_names_and_excluded_files_are_left_out(tmp_path):
    write(tmp_path / "z", ".jsonl", ["z"])
    write(tmp_path / "a" / "b", ".txt", ["ab0", "ab1"])
    write(tmp_path / "a" / "c", ".parquet", ["ac"])
    (tmp_path / "a" / "README").write_text("not read")
    (tmp_path / "a" / "valid.txt").write_text("held out")
    inputs = Inputs((tmp_path / "z" / "data.jsonl", tmp_path / "a"), exclude=("valid*",))
    assert [text for _, text in documents(inputs.pieces())] == ["z", "ab0", "ab1", "ac"]
    assert [f["name"] for f in inputs.describe()["files"]] == ["data.jsonl", "b/t0.txt", "b/t1.txt", "c/data.parquet"]


def test_filter_keeps_ids_with_a_prefix(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": i}) + "\n" for i in ("aa/1", "ab/2", "b/3")))
    assert [i for i, _ in documents(Inputs((path,), filter=("aa", "b/")).pieces())] == ["aa/1", "b/3"]
    path.write_text('{"text": "x"}\n{"body": "y", "key": 7}\n'.splitlines()[0] + "\n")
    assert documents(Inputs((path,)).pieces()) == [("d.jsonl#0", "x")]
    path.write_text('{"body": "y", "key": 7}\n')
    assert documents(Inputs((path,), field="body", id_field="key").pieces()) == [("7", "y")]


def test_empty_documents_and_lines_are_left_out(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n\n{"text": "x"}\n{"text": null}\n  \n')
    (tmp_path / "e.txt").write_text("")
    pieces = list(Inputs((tmp_path,)).pieces())
    assert [(p.text, p.last, p.next) for p in pieces] == [("x", True, Position(0, 3))]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "b"}')
    assert [text for _, text in documents(Inputs((tmp_path,)).pieces())] == ["a", "b"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_reading_goes_on_from_every_document(tmp_path, monkeypatch, size):
    monkeypatch.setattr(sources, "PIECE", size)
    for kind in (".jsonl.zst", ".txt", ".parquet"):
        write(tmp_path / kind.strip("."), kind)
    inputs = Inputs((tmp_path,))
    pieces = list(inputs.pieces())
    assert max(len(p.text) for p in pieces) <= size
    assert [text for _, text in documents(pieces)] == TEXTS * 3
    for n, piece in enumerate(pieces):
        if piece.last:
            assert list(inputs.pieces(piece.next)) == pieces[n + 1 :]


@given(st.text(alphabet="ab. \n", min_size=1, max_size=30))
def test_pieces_end_before_white_space(text):
    at = cut_before(text)
    places = [i for i in range(1, len(text)) if text[i].isspace() and not text[i - 1].isspace()]
    assert at == (places[-1] if places else len(text))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"text": "x"}\n{"text"', r"d.jsonl, line 2: no JSON"),
        ("d.jsonl", b'{"text": "\xff"}', r"d.jsonl, line 1: no JSON"),
        ("d.jsonl", b'["x"]', r"d.jsonl, line 1: expected an object with a field 'text', got list"),
        ("d.jsonl", b'{"txt": "x", "n": 1}', r"d.jsonl, line 1: no field 'text'. Did you mean 'txt'\? It has: txt, n"),
        ("d.jsonl", b'{"text": 5}', r"d.jsonl, line 1: field 'text' must be text, got int"),
        ("d.txt", b"a\xff", r"d.txt: no UTF-8"),
        ("d.csv", b"a", r"d.csv: expected a name that ends in .txt"),
    ],
)
def test_errors_name_the_file_and_what_is_wrong(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(Inputs((path,)).pieces())


def test_errors_name_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        Inputs((tmp_path / "nowhere",)).files()
    with pytest.raises(DataError, match="holds no file that ends in"):
        Inputs((tmp_path,)).files()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"texts": "x"}]), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d.parquet: no field 'text'. Did you mean 'texts'\?"):
        list(Inputs((tmp_path,)).pieces())
    for paths, dataset in (((), None), ((tmp_path,), "a/b")):
        with pytest.raises(DataError, match="a dataset: one of them"):
            Inputs(paths, dataset)


def test_a_dataset_is_streamed_and_goes_on(tmp_path):
    """Through `datasets`, from a folder that it takes for a dataset."""
    write(tmp_path / "data", ".parquet")
    inputs = Inputs(dataset=str(tmp_path / "data"))
    pieces = list(inputs.pieces())
    assert documents(pieces) == [(f"t{n}", text) for n, text in enumerate(TEXTS)]
    assert list(inputs.pieces(pieces[1].next)) == pieces[2:]
    assert inputs.describe()["split"] == "train"
    assert [i for i, _ in documents(Inputs(dataset=str(tmp_path / "data"), filter=("t3",)).pieces())] == ["t3"]


@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_a_damaged_parquet_file_is_named(tmp_path, damage):
    write(tmp_path, ".parquet")
    path = tmp_path / "data.parquet"
    content = path.read_bytes()
    pages = content[:4] + b"\xff" * 60 + content[64:]
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "changed": pages}[damage])
    with pytest.raises(DataError, match=r"data\.parquet is damaged: \S"):
        list(Inputs((tmp_path,)).pieces())
