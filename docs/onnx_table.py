"""Writes the table of operators into docs/onnx.md, from the table of handlers. Run it after a change of these:
python docs/onnx_table.py"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

PAGE = Path(__file__).parent / "onnx.md"
BEGIN, END = "<!-- table: python docs/onnx_table.py -->\n", "<!-- end -->"


def page() -> str:
    """The page with the table as it should be."""
    from rlx.frontends.onnx.table import operators

    rows = ["", "| Domain | Operators |", "| --- | --- |"]
    for domain, found in groupby(operators(), key=lambda o: o[0]):
        names = ", ".join(f"{name} {since}" if since > 7 else name for _, name, since in found)
        rows.append(f"| {domain or 'ai.onnx'} | {names} |")
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(f"{BEGIN}.*{END}", lambda _: BEGIN + "\n".join(rows) + "\n\n" + END, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
