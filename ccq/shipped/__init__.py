"""What ships with the package: small trained models, and a book to try them on.

    NAME/            weights and config, a card (README.md), and manifest.json with all checksums
    tokenizer/       of all of them
    book.txt         the excerpt that `ccq demo` and `ccq eval --tasks book` read; book.json says what it is

`ccq.load` takes the name of a shipped model, a folder, or a name on the Hub. Nothing is imported before it is called.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

from ccq.files import sha256
from ccq.names import nearest

HERE = Path(__file__).parent
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"


class ModelError(OSError):
    """There is no such model, or a file of it is damaged; the message names it. from_pretrained raises OSError too."""


def root() -> Path:
    """Where the models lie: in the package, or in the folder that CCQ_SHIPPED names."""
    return Path(os.environ.get("CCQ_SHIPPED") or HERE)


def names() -> tuple[str, ...]:
    """The models that ship: the folders with a manifest."""
    return tuple(sorted(path.parent.name for path in root().glob(f"*/{MANIFEST}")))


def manifest(folder: Path) -> dict[str, Any]:
    """{"name": ..., "files": {file: {"bytes": ..., "sha256": ...}}, ...} of a shipped model."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for told in content["files"].values():
            int(told["bytes"]), str(told["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is damaged: {type(error).__name__} {error}. {REMEDY}") from None
    return content


REMEDY = "Restore the file from the repository, or reinstall the package."


def verify(folder: Path) -> None:
    """Compare every file of a shipped model with its manifest; ModelError names the one that differs."""
    for name, told in manifest(folder)["files"].items():
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{path} is missing. {REMEDY}")
        size = path.stat().st_size
        if size != told["bytes"]:
            raise ModelError(f"{path} is damaged: expected {told['bytes']:,} bytes, got {size:,}. {REMEDY}")
        if sha256(path) != told["sha256"]:
            raise ModelError(f"{path} is damaged: its sha256 is not the one in {MANIFEST}. {REMEDY}")


def tokenizer_folder(folder: Path) -> Path:
    """Where the tokenizer of the model in `folder` lies: there; of one that ships (or a copy of it), beside all."""
    ships = (folder / MANIFEST).exists() and not (folder / "tokenizer.json").exists()
    return root() / TOKENIZER if ships else folder


def locate(name: str) -> str:
    """What from_pretrained should load for `name`: the folder of a shipped model, checked, or the name as it is.

    A folder of that name in the working directory comes first, as it does for from_pretrained; not one that holds
    something else, such as results of the shipped model.
    """
    known = names()
    if Path(name).is_dir() and (name not in known or Path(name, "config.json").is_file()):
        return name
    if name in known:
        verify(root() / name)
        return str(root() / name)
    close = nearest(name, known) if "/" not in name else ""
    if close:  # else it may be a name on the Hub
        raise ModelError(f"there is no model {name!r}.{close} These ship: {', '.join(known)}.")
    return name


def book() -> dict[str, Any]:
    """The excerpt: title, author, year, source, licence, and its `stories` as texts, each beginning with its title."""
    told = json.loads((HERE / "book.json").read_text(encoding="utf-8"))
    path = HERE / "book.txt"
    if sha256(path) != told["sha256"]:
        raise ModelError(f"{path} is damaged: its sha256 is not the one in book.json. {REMEDY}")
    text = "\n\n" + path.read_text(encoding="utf-8").strip()
    begins, at = [], 0
    for title in told["stories"]:  # in their order, since a story may hold the words of its title again
        at = text.index(f"\n\n{title}\n\n", at)
        begins.append(at)
        at += len(title)
    stories = [text[begin:end].strip() for begin, end in itertools.pairwise([*begins, len(text)])]
    return told | {"stories": stories}
