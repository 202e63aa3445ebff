"""What MkDocs does not do by itself: README.md is the front page, and links lead out of docs/ as they do on GitHub.

A file outside docs/ that a page links to is copied into the site, under repository/. Of a folder only its name is kept.
MkDocs itself complains about a target that is not there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")  # pages of the navigation that lie outside docs/
LINK = re.compile(r"\[([^\][]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")  # a colon: an address elsewhere


def uri(path: Path) -> str:
    """Where a file of the repository is in the site."""
    if path == ROOT / "README.md":
        return "index.md"
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else f"repository/{path.relative_to(ROOT)}"


def target(page: Path, link: re.Match) -> Path | None:
    """The file or folder of the repository that a link on a page leads to."""
    path = (page.parent / link[2]).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None


def on_files(files: Files, config: Any) -> Files:
    found = [ROOT / name for name in ALWAYS]
    waiting = [*found, *DOCS.rglob("*.md")]
    while waiting:
        page = waiting.pop()
        linked = {target(page, link) for link in LINK.finditer(page.read_text(encoding="utf-8"))}
        new = [path for path in linked if path and path.is_file() and not path.is_relative_to(DOCS)]
        new = [path for path in new if path not in found]
        found += new
        waiting += [path for path in new if path.suffix == ".md"]
    for path in found:
        files.append(File.generated(config, uri(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source, here = Path(page.file.abs_src_path), os.path.dirname(page.file.src_uri)

    def rewritten(link: re.Match) -> str:
        path = target(source, link)
        if path is None:
            return link[0]
        if path.is_dir():
            return link[1]
        return f"[{link[1]}]({os.path.relpath(uri(path), here or '.')}{link[3] or ''})"

    return LINK.sub(rewritten, markdown)
