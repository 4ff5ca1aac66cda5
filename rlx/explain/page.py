"""The page: one HTML file with the report inside. Tables are written here; rlx/explain/web/page.js adds pictures and texts.

Names in a report may be anything. Here each is escaped; the report itself is compressed and in base64; the script makes text
nodes only. A content security policy names the one style and the one script by their digests, so nothing else runs or loads.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlx.explain.profile import timed
from rlx.ir.shown import counted, sized

WEB = Path(__file__).parent / "web"
HEADS = (  # of the table of steps: title, whether it holds numbers
    ("step", True), ("kernel", False), ("time", True), ("of run", True), ("of roofline", True), ("bound by", False),
    ("bytes", True), ("GFLOP/s", True), ("made from", False),
)  # fmt: skip
Data = dict[str, Any]


def page(report: Data) -> str:
    """The HTML text of a report (rlx.explain.report)."""
    style, script = ((WEB / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    packed = gzip.compress(json.dumps(report, separators=(",", ":")).encode(), 9, mtime=0)
    threads = f", {counted(report['target']['threads'], 'thread')}" if report["target"]["name"] == "cpu" else ""
    values = {
        "title": escape(f"{report['name']} explained by rlx"), "name": escape(report["name"]),
        "subtitle": escape(f"on {report['device']}, {report['machine']}{threads}"),
        "style": style, "style_hash": _digest(style), "script": script, "script_hash": _digest(script),
        "data": base64.b64encode(packed).decode(), "rlx": escape(report["versions"].get("rlx", "")),
        "tiles": _tiles(report), "regions": _regions(report["memory"]), "time_note": escape(_time_note(report)),
        "step_heads": "".join(f'<th scope="col"{_number(n)}>{escape(head)}</th>' for head, n in HEADS),
        "step_rows": "".join(_step_rows(report)), "step_foot": _step_foot(report), "bug": escape(bug_report(report)),
    }  # fmt: skip
    parts = re.split(r"@@(\w+)@@", (WEB / "page.html").read_text(encoding="utf-8"))  # values are not searched for more names
    return "".join(values[part] if at % 2 else part for at, part in enumerate(parts))


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _number(yes: bool) -> str:
    return ' class="number"' if yes else ""


def run_steps(report: Data) -> list[Data]:
    """The steps of a run and of its commit, as profiles number them."""
    return [s for s in report["steps"] if s["phase"] in ("steps", "commit")]


def _tiles(report: Data) -> str:
    memory, steps, profile = report["memory"], run_steps(report), report["profile"]
    costs = [s["cost"] for s in steps]
    moved = sum(c["read_bytes"] + c["written_bytes"] for c in costs)
    operations = sized(sum(c["flops"] or 0 for c in costs)).replace("bytes", "FLOP").replace("B", "FLOP")
    peak = memory["arena"]["peak"]
    when = "before the first step" if peak["moment"] < 0 else f"at step {_step_at(report, peak['moment'])}"
    kinds = f"{counted(len(report['kernels']), 'different kernel')}, {counted(len(report['graph']['nodes']), 'node')}"
    tiles = [
        ("memory", sized(memory["total"]), f"{memory['total']:,} bytes"),
        ("arena", sized(memory["arena"]["bytes"]), f"least possible {sized(memory['arena']['lower_bound'])}"),
        ("peak of the arena", sized(peak["bytes"]), when),
        ("steps", f"{len(steps)}", kinds),
        ("work of a run", operations, f"{sized(moved)} moved"),
    ]  # fmt: skip
    if profile:
        over = profile["overhead_seconds"] / profile["seconds"]
        tiles.insert(0, ("a run", timed(profile["unmeasured_seconds"]), "without measuring"))
        tiles.insert(1, ("a measured run", timed(profile["seconds"]), f"{over:.1%} of it in no step"))
    return "".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd></div>" for a, b, c in tiles)


def _step_at(report: Data, moment: int) -> int:
    return next((n for n, s in enumerate(run_steps(report)) if s["moment"] == moment), 0)


def _regions(memory: Data) -> str:
    rows = []
    for name, nbytes in sorted(memory["regions"].items(), key=lambda item: -item[1]):
        part = nbytes / memory["total"] if memory["total"] else 0
        meter = f'<meter min="0" max="1" value="{part:.4f}" aria-label="{part:.1%} of all bytes"></meter> {part:.1%}'
        rows.append(f'<tr><th scope="row">{escape(name)}</th><td class="number">{nbytes:,}</td><td>{meter}</td></tr>')
    return "".join(rows) + f'<tr><th scope="row">total</th><td class="number">{memory["total"]:,}</td><td></td></tr>'


def _time_note(report: Data) -> str:
    profile = report["profile"]
    if profile is None:
        why = report["unmeasured"] or "call compiled.explain(path) with the weights set"
        return f"Not measured: {why}."
    return (
        f"Means over the quickest eighth of {counted(profile['runs'], 'run')}. Steps and overhead (starting steps, waiting for "
        "threads and for other programs) add up to the measured run. Of roofline: the least time that the machine's rates of "
        "arithmetic and memory allow, divided by the time taken."
    )  # fmt: skip


def _step_rows(report: Data) -> Iterable[str]:
    profile, nodes = report["profile"], report["graph"]["nodes"]
    for n, step in enumerate(run_steps(report)):
        cost, time = step["cost"], profile["steps"][n] if profile else None
        cells: Sequence[tuple[str, str, float | None]] = [("number", str(n), n), ("name", step["kernel"], None)]
        cells += [_time_cell(time, profile, "seconds"), _time_cell(time, profile, "run"), _time_cell(time, profile, "share")]
        cells += [("", time["bound"] if time else "", None), ("number", sized(cost["least_bytes"]), cost["least_bytes"])]
        rate = cost["flops"] / time["seconds"] / 1e9 if time and cost["flops"] and time["seconds"] else None
        cells.append(("number", "" if rate is None else f"{rate:.1f}", rate))
        cells.append(("lines", _made_from([nodes[i] for i in step["nodes"]]), None))
        yield f'<tr data-step="{n}">' + "".join(map(_cell, cells)) + "</tr>"


def _cell(cell: tuple[str, str, float | None]) -> str:
    """`cell`: class, text, and the number to sort by."""
    kind, text, number = cell
    order = "" if number is None else f' data-order="{number:.9g}"'
    return f'<td class="{kind}"{order}>{escape(text)}</td>' if kind else f"<td{order}>{escape(text)}</td>"


def _time_cell(time: Data | None, profile: Data, which: str) -> tuple[str, str, float | None]:
    if time is None or (which == "share" and time["share"] is None):
        return "number", "", None
    if which == "seconds":
        return "number", timed(time["seconds"]), time["seconds"]
    part = time["seconds"] / profile["seconds"] if which == "run" else time["share"]
    return "number", f"{part:.1%}" if which == "run" else f"{part:.0%}", part


def _made_from(nodes: Sequence[Data]) -> str:
    """Lines of the user's program, each with the ops made there."""
    lines: dict[str, list[str]] = {}
    for node in nodes:
        lines.setdefault(node["source"] or "", []).append(node["op"])
    return "; ".join(f"{', '.join(dict.fromkeys(ops))} {line}".rstrip() for line, ops in lines.items())


def _step_foot(report: Data) -> str:
    profile = report["profile"]
    if profile is None:
        return ""
    rows = [("overhead", profile["overhead_seconds"]), ("measured run", profile["seconds"])]
    return "".join(
        f'<tr><td></td><td>{label}</td><td class="number">{timed(s)}</td><td class="number">{s / profile["seconds"]:.1%}</td>'
        f'<td colspan="{len(HEADS) - 4}"></td></tr>'
        for label, s in rows
    )


def bug_report(report: Data) -> str:
    """Text for a bug report, without names of the user's graph and without paths."""
    memory, profile, compile = report["memory"], report["profile"], report["compile"]
    ops = sorted({n["op"] for n in report["graph"]["nodes"]})
    lines = [
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()), report["system"], report["machine"],
        f"device {report['device']}, {counted(report['target']['threads'], 'thread')}; {report['target'].get('features', '')}",
        f"options: {', '.join(f'{k}={v}' for k, v in report['options'].items() if k != 'handles')}",
        f"graph {report['fingerprint'][:16]}: {len(report['graph']['nodes'])} nodes; ops {', '.join(ops)}",
        f"cache: {compile['cache']}; " + ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in compile["seconds"].items()),
        "memory: " + ", ".join(f"{k} {v}" for k, v in memory["regions"].items()),
        f"arena: unshared {memory['arena']['unshared']}, least possible {memory['arena']['lower_bound']}",
    ]  # fmt: skip
    if profile:
        lines.append(f"run {timed(profile['unmeasured_seconds'])}, measured {timed(profile['seconds'])}")
    for n, step in enumerate(run_steps(report)):
        time = f"  {timed(profile['steps'][n]['seconds'])}" if profile else ""
        lines.append(f"{n:4} {step['kernel']}{time}{'  ' + step['why'] if step['why'] else ''}")
    return "\n".join(lines)


__all__ = ["bug_report", "page", "run_steps"]
