"""Writes docs/memory.svg, the arena of MiniLM for 8 texts of 128 tokens over the steps of a run: python docs/memory.py

The plan is that of this machine's CPU; on another one, tiles and so scratch may differ."""

from __future__ import annotations

import json
import tempfile
from html import escape
from pathlib import Path
from typing import Any

import rlx

PICTURE = Path(__file__).parent / "memory.svg"
WIDTH, HEIGHT, LEFT, TOP = 760, 250, 60, 44
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .note { fill: #6e7781 } .page { fill: #fff } .grid { stroke: #d0d7de }
rect { stroke: #fff; stroke-width: .5 } .input { fill: #57ab5a } .arena { fill: #6ca4f8 } .output { fill: #e0823d }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #8d96a0 } .page { fill: #0d1117 } .grid { stroke: #30363d } rect { stroke: #0d1117 }
}
"""


def picture(report: dict[str, Any]) -> str:
    """The buffers of the arena as boxes: bytes upwards, steps to the right. `report`: as CompileReport.save writes it."""
    arena, placed = report["memory"]["arena"], [b for b in report["buffers"] if b["offset"] is not None]
    steps = max(b["last"] for b in placed)
    needed, least, unshared = (arena[key] / 1e6 for key in ("bytes", "lower_bound", "unshared"))
    across, up = (WIDTH - LEFT - 10) / (steps + 1), (HEIGHT - TOP - 24) / arena["bytes"]
    floor = HEIGHT - 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title">',
        f'<title id="title">The arena of {escape(report["name"])} over the steps of a run</title>',
        f'<style>{STYLE}</style><rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="8" y="18">{needed:.2f} MB for all values of a run; least possible {least:.2f} MB, '
        f"without reuse {unshared:.1f} MB</text>",
        '<text x="8" y="35" class="note">each box is a value: its bytes upwards, the steps in which it lives to the right</text>',
    ]
    for part in (0, 0.5, 1):
        y = floor - part * arena["bytes"] * up
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" class="note">{part * needed:.1f} MB</text>')
    for b in sorted(placed, key=lambda b: (b["first"], b["offset"])):
        first = max(0, b["first"])
        x, width = LEFT + first * across, max(1.0, (min(b["last"], steps) - first + 1) * across)
        height = max(0.6, b["bytes"] * up)
        out.append(
            f'<rect class="{b["region"]}" x="{x:.1f}" y="{floor - b["offset"] * up - height:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"><title>{escape(str(b["name"]))}, {b["bytes"]} bytes</title></rect>'
        )
    out.append(f'<text x="{LEFT}" y="{HEIGHT - 6}" class="note">step 0</text>')
    out.append(f'<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end" class="note">step {steps}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    compiled = rlx.models.load(rlx.models.default_folder()).executable(8, 128)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        compiled.report().save(path)
        PICTURE.write_text(picture(json.loads(path.read_text("utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
