"""A hook of the site (mkdocs.yml): the README and the changelog are its first and last page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {"index.md": "README.md", "changes.md": "CHANGELOG.md"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of the file at the root, with links as they are from docs/."""
    if source := PAGES.get(page.file.src_path):
        return (ROOT / source).read_text("utf-8").replace("](docs/", "](")
    return markdown
