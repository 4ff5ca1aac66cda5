"""Writes docs/speed.svg, the chart of the README: how many times as fast as the best peer, also where rlx is behind.

Every bar comes from a table of docs/benchmarks.md or docs/measurements/, found by its section and cells, so nothing is entered
twice. After a change of those tables: python docs/chart.py"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
CHART = HERE / "speed.svg"
NEWEST = HERE / "benchmarks.md"
SOURCES = (NEWEST, *sorted((HERE / "measurements").glob("*.md")))  # where pages share a section's name, the first has it
FASTER = "rlx is faster by"
Row = dict[str, str]


@dataclass(frozen=True)
class Bar:
    """One comparison: `ratio` is the best peer's time over that of rlx."""

    label: str
    peer: str
    ratio: float


def tables(section: str) -> Iterator[list[Row]]:
    """The tables of the section whose heading starts so. An empty first cell repeats the one above; of columns with one name, the
    second is called NAME 2."""
    start = f"\n## {section}"
    page = next((text for source in SOURCES if start in (text := source.read_text("utf-8"))), None)
    if page is None:
        raise LookupError(f"no page of measurements has a section {section!r}")
    text = page.split(start)[1].split("\n## ")[0]
    found: list[Row] = []
    head: list[str] = []
    for line in [*text.splitlines(), ""]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            if found:
                yield found
            found, head = [], []
        elif not head:
            head = [f"{name} 2" if name in cells[:i] else name for i, name in enumerate(cells)]
        elif set(line) - set("|-: "):
            row = dict(zip(head, cells))
            row[head[0]] = cells[0] or found[-1][head[0]]
            found.append(row)


def rows(section: str, **cells: str) -> list[Row]:
    """The rows with these cells, of the first table of the section that has some."""
    for table in tables(section):
        if found := [row for row in table if all(row.get(name) == text for name, text in cells.items())]:
            return found
    raise LookupError(f"section {section!r} of the measurements: there is no row with {cells}")


def best(label: str, found: list[Row], column: str = FASTER) -> Bar:
    """The peer that comes nearest to rlx, or is farthest ahead of it, of rows with a ratio."""
    ratio, peer = min((float(r[column]), r["engine"]) for r in found if r["engine"] != "rlx")
    return Bar(label, peer.split(",")[0].split(" (")[0], ratio)


def timed(label: str, found: list[Row], column: str, ours: str, peers: tuple[str, ...]) -> Bar:
    """The best of these peers, of rows with times; those in parentheses are left out."""
    times = {next(reversed([c for n, c in r.items() if n in ("call", "start")])): float(r[column].split(" (")[0]) for r in found}
    peer = min(peers, key=times.__getitem__)
    return Bar(label, peer.split(",")[0], times[peer] / times[ours])


def groups() -> Iterator[tuple[str, list[Bar]]]:
    encoders, generation, starts = "Encoders, 2026-11-20", "Generation, Qwen3-0.6B shape", "Start to first result"
    xeon, narrow = "Encoders on an Intel Xeon, 2026-11-22", "Encoders on an Intel Xeon"
    yield "2-core AMD EPYC, f32, 2 threads", [
        best(label, rows(encoders, model=model, threads="2"))
        for label, model in (
            ("MiniLM, 1 text of 16 tokens", "minilm 1 × 16"), ("MiniLM, 1 of 128", "minilm 1 × 128"),
            ("MiniLM, 8 of 128", "minilm 8 × 128"), ("BERT-base, 1 of 128", "bert-base 1 × 128"),
        )
    ]  # fmt: skip
    yield "the same, Qwen3-0.6B shape", [
        best(f"{what}, {weights}", rows(generation, format=weights), column)
        for what, column in (("a token", FASTER), ("prefill of 128 tokens", f"{FASTER} 2"))
        for weights in ("f32", "bf16", "q8_0", "q4_k")
    ]
    perceptron = rows("Calls of rlx.jit", case="perceptron, 3 layers of 64")
    found = rows(starts)
    yield "the same, overhead", [
        timed("a call of a jitted function", perceptron, "median, ns", "rlx.jit", ("jax.jit",)),
        timed("first result of MiniLM, from a file", found, "first result after it, ms", "rlx, from an artifact file",
              ("ONNX Runtime, optimised before", "OpenVINO, from its cache")),
        timed("first result of MiniLM, from caches", found, "first result after it, ms", "rlx, from its cache",
              ("ONNX Runtime, optimised before", "OpenVINO, from its cache")),
        timed("first result of MiniLM, cold", found, "first result after it, ms", "rlx", ("ONNX Runtime", "OpenVINO")),
    ]  # fmt: skip
    yield "16-core Intel Xeon", [
        best(label, rows(narrow if " bf16 " in model or " int8 " in model else xeon, model=model, threads=threads))
        for label, model, threads in (
            ("BERT-base, 1 of 128, f32, 1 thread", "bert-base 1 × 128", "1"), ("the same, 16 threads", "bert-base 1 × 128", "16"),
            ("BERT-base, 8 of 512, bf16, 16 threads", "bert-base bf16 8 × 512", "16"),
            ("MiniLM, 1 of 128, bf16, 1 thread", "minilm bf16 1 × 128", "1"),
            ("MiniLM, 8 of 128, int8, 1 thread", "minilm int8 8 × 128", "1"),
        )
    ]  # fmt: skip
    yield from processors()
    yield "one H200, against torch.compile", [*on_gpu()]


def processors() -> Iterator[tuple[str, list[Bar]]]:
    """Encoders and generation from the sections that `make bench-cpu` wrote: with one thread and with the most."""
    for title in re.findall(r"\n## (.*), `make bench-cpu`", NEWEST.read_text("utf-8")):
        cases: dict[tuple[str, int, str], list[Row]] = {}
        for row in (row for table in tables(title) for row in table if "threads" in row and FASTER in row):
            cases.setdefault((row.get("model") or f"a token, {row['format']}", int(row["threads"]), FASTER), []).append(row)
            if "format" in row:
                cases.setdefault((f"prefill, {row['format']}", int(row["threads"]), f"{FASTER} 2"), []).append(row)
        most = max((threads for _, threads, _ in cases), default=1)
        bars = [
            best(f"{name}, {threads} thread{'s' * (threads > 1)}", found, column)
            for (name, threads, column), found in cases.items()
            if threads in (1, most) and len(found) > 1
        ]
        if bars:
            yield title, bars


def on_gpu() -> Iterator[Bar]:
    model = dtype = ""
    (found,) = tables("Encoders on one H200")
    for row in found:
        case = row["model, batch x length, dtype"].strip("\\* ")
        parts = case.split(", ")
        if len(parts) > 2:
            model, dtype = parts[0].split(" (")[0], parts[2]
        if row["ratio"]:
            size = next(p for p in parts if " x " in p and "(" not in p).replace("x", "of")
            yield Bar(f"{model}, {dtype}, {size}", "torch.compile", float(row["ratio"]))
    for row in next(tables("Prefill of 512 tokens on one H200")):
        if row["ratio"]:
            yield Bar(f"{row['shape']}, bf16, prefill of 512", "torch.compile", float(row["ratio"]))


LABELS, WIDTH, LINE, END = 250, 760, 18, 2.0**3
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .head { font-weight: 600 } .peer { fill: #6e7781 }
.ahead { fill: #2da44e } .behind { fill: #d4a72c } .one { stroke: #24292f; stroke-width: 1 } .grid { stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .peer { fill: #8d96a0 } .one { stroke: #e6edf3 } .grid { stroke: #30363d } .page { fill: #0d1117 }
}
"""


def across(ratio: float) -> float:
    """The place of a ratio on a logarithmic axis from 1/4 to END."""
    low = math.log(0.25)
    return LABELS + (WIDTH - LABELS - 150) * (math.log(min(ratio, END)) - low) / (math.log(END) - low)


def chart() -> str:
    found = list(groups())
    height = 46 + sum(LINE * (len(bars) + 1) + 8 for _, bars in found)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">',
        '<title id="title">How many times as fast as the best peer rlx is, by workload</title>',
        f'<style>{STYLE}</style><rect class="page" width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="8" y="18" class="head">times as fast as the best peer in the same run</text>',
    ]
    for ratio in (0.25, 0.5, 1, 2, 4, 8):
        x = across(ratio)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="40" y2="{height - 4}" class="{"one" if ratio == 1 else "grid"}"/>')
        out.append(f'<text x="{x:.1f}" y="35" text-anchor="middle" class="peer">{ratio:g}</text>')
    y = 46
    for name, bars in found:
        out.append(f'<text x="8" y="{y + 13}" class="head">{escape(name)}</text>')
        y += LINE
        for bar in bars:
            low, high = sorted((across(1), across(bar.ratio)))
            kind = "behind" if bar.ratio < 0.995 else "ahead"
            out.append(f'<text x="20" y="{y + 13}">{escape(bar.label)}</text>')
            out.append(f'<rect x="{low:.1f}" y="{y + 3}" width="{max(1.0, high - low):.1f}" height="12" class="{kind}"/>')
            shown = f"{bar.ratio:.2f} {bar.peer}"
            out.append(f'<text x="{max(high, across(1)) + 6:.1f}" y="{y + 13}" class="peer">{escape(shown)}</text>')
            y += LINE
        y += 8
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    CHART.write_text(chart(), encoding="utf-8")
