"""What reads and writes files: whole or nothing, packed or not, and damage with a name."""

import contextlib
import errno
import json
import os

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


def test_a_folder_that_is_there_may_be_a_disk_of_its_own(tmp_path, monkeypatch):
    """As a volume of docker is: nothing can be renamed into it from beside it."""
    disk, replace = tmp_path / "disk", os.replace
    disk.mkdir()

    def renamed(source, target):
        if disk not in source.parents:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, target)

    monkeypatch.setattr(os, "replace", renamed)
    for content in ("1", "2"):
        with files.whole_folder(disk, "b") as partial:
            for name in ("a", "b"):
                (partial / name).write_text(content)
    assert {path.name: path.read_text() for path in disk.iterdir()} == {"a": "2", "b": "2"}
    (disk / "a").unlink()
    (disk / "b").rename(disk / ".partial")  # left by a kill
    files.check_free(disk, None)


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
        with pytest.raises(FileExistsError, match=r"x.json holds something else, which stays"):
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
