"""Hooks of mkdocs. The first page is README.md, and links to files of the repository that are no pages become their paths.

A link to a file that does not exist is an error, as mkdocs makes it one for pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """The text of a page. `page.file.src_uri` is its path in docs/."""
    source = f"docs/{page.file.src_uri}"
    if source == "docs/index.md":
        markdown, source = (ROOT / "README.md").read_text(), "README.md"

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        file = files.get_file_from_path(path.removeprefix("docs/")) if path.startswith("docs/") else None
        if file is not None and file.inclusion.is_included():
            there = posixpath.relpath(file.src_uri, posixpath.dirname(page.file.src_uri) or ".")
            return f"{image}[{text}]({there}{anchor})"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{source} links to {target}, and there is no {path}")
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(link, markdown)
