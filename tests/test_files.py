"""What reads and writes files: whole or nothing, packed or not, and damage with a name."""

import contextlib
import json

import pytest
from helpers import pack

from ccq import files


def test_a_plain_file_comes_before_a_packed_one(tmp_path):
    path = tmp_path / "x.jsonl"
    assert files.stored(path) is None
    path.write_text("older\n")
    pack(path)
    assert files.read_text(path) == "older\n"
    path.write_text("newer\n")
    assert files.read_text(path) == "newer\n"


def test_what_was_being_written_has_not_its_name(tmp_path):
    path = tmp_path / "a" / "x.json"
    files.write_json(path, {"a": 1})
    with contextlib.suppress(RuntimeError), files.whole_file(path) as file:
        file.write(b"{")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "free"),
    [(None, True), ('{"a": 1, "b": 2}', True), ('{"a": 2}', False), ("{}", False), ("[1]", False), ("poem", False)],
)
def test_only_an_older_result_of_the_same_is_replaced(tmp_path, content, free):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    if free:
        assert files.replaceable(path, a=1) == path
    else:
        with pytest.raises(FileExistsError, match=r"x.json holds something else and is not overwritten"):
            files.replaceable(path, a=1)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "is missing: expected a poem"), (b'{"a"', r"is damaged \(.*\): expected a poem")]
)
def test_json_that_is_missing_or_damaged_is_named(tmp_path, content, said):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KeyError, match=f"x.json {said}"):
        files.read_json(path, KeyError, "a poem")


def test_a_folder_to_lock_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("text")
    with (
        pytest.raises(ValueError, match="file is a file: expected a folder, or none"),
        files.locked(tmp_path / "file" / "lock", ValueError),
    ):
        pass
