"""Damaged and hostile artifacts: whatever a file holds, loading it gives an RlxError that names the file, or a graph.

python -m tests.artifact_mutations [--count 10000] [--seed 0]     a sample runs in tests/test_artifact.py

Damage (`damaged`) leaves the checksums as they are, so each file must be refused. Hostile files (`hostile`) have valid checksums:
their manifests, programs and machine code are changed. Such a file may load, but nothing in it is run here: machine code of a
stranger can do anything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx.errors import RlxError
from rlx.host.container import FORMAT, HEADER, MAGIC, PAGE
from rlx.runtime import CompileOptions, Session

NUMBERS = (0, 1, 2, 3, 63, 64, 4096, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 33, 1 << 46, 1 << 63, (1 << 64) - 1, 1 << 80, 10**40)
VALUES = (-1, 0.5, True, None, "", "x", "../../etc/passwd", "/etc/passwd", "a\0b", [], {}, [[]], [None], {"a": 1}, "cuda")


def graphs() -> list[rlx.CompiledGraph]:
    """A network with weights, and one with states, one of which is written in place."""
    g = rlx.Graph("layers")
    x, w = g.input("x", (3, 8), rlx.f32), g.param("w", (8, 40), rlx.f32)
    g.set_outputs([rlx.softmax(rlx.gelu(x @ w) @ g.param("v", (40, 5), rlx.f32))], ["p"])
    layers = Session(threads=2).compile(g)
    rng = np.random.default_rng(5)
    layers.set_params({d.name: rng.standard_normal(d.shape.static).astype(np.float32) for d in layers.params})
    g = rlx.Graph("counter")
    total, rows = g.handle(rlx.BufferHandle("total", (4,), rlx.f32)), g.handle(rlx.BufferHandle("rows", (6, 4), rlx.f32))
    delta, at, which = g.input("delta", (4,), rlx.f32), g.input("at", (), rlx.i64), g.input("which", (2,), rlx.i64)
    g.assign(total, total + delta)
    g.assign(rows, rlx.update_rows(rows, rlx.reshape(delta, (1, 4)), at, axis=0), in_place=True)
    g.set_outputs([total * 2.0, rlx.gather(delta, which, axis=0), rows + 0.0], ["twice", "picked", "rows"])
    handles = (rlx.BufferHandle("total", (4,), rlx.f32),)
    return [layers, Session(threads=1).compile(g, CompileOptions(handles=handles))]


def flows() -> list[rlx.CompiledGraph]:
    """Two graphs with control flow. Whether a changed loop still ends cannot be told by reading it, and nothing is run."""
    g = rlx.Graph("loops")
    x = g.input("x", (5, 3), rlx.f32)
    (h,), (seen,) = rlx.scan(lambda h, row: (rlx.tanh(h + row), h * 2.0), rlx.zeros((3,)), x)
    (b,) = rlx.while_loop(lambda u: u.sum() < 9.0, lambda u: u + 1.0, h)
    (a,) = rlx.cond(h.sum() > 0.0, lambda v: v + x[0], lambda v: v * 2.0, b)
    g.set_outputs([h, seen, a])
    branch = rlx.Graph("branch")
    y = branch.input("y", (3,), rlx.f32)
    branch.set_outputs(rlx.cond(y.sum() < 1.0, lambda: rlx.scan(lambda v: v + y, y, length=4)[0][0], lambda: y))
    return [Session(threads=1).compile(made) for made in (g, branch)]


# -- files -----------------------------------------------------------------------------------------------------------


def opened(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    """The manifest, and the bytes of each section with its padding."""
    raw = path.read_bytes()
    _, _, _, nbytes, _, _ = HEADER.unpack_from(raw)
    manifest = json.loads(raw[HEADER.size : HEADER.size + nbytes])
    data = raw[HEADER.size + nbytes :]
    starts = [row[1] for row in manifest["sections"]]
    return manifest, [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)])]


def closed(manifest: dict[str, Any], sections: list[bytes], sign: bool = True) -> bytes:
    """A file of these, with valid checksums. `sign`: of the sections, whose lengths in the table are kept if they still fit."""
    if sign:
        at = 0
        for row, data in zip(manifest["sections"], sections):
            shorter = len(data) < row[2] or len(data) >= row[2] + PAGE
            row[1], row[2], row[3] = at, len(data) if shorter else row[2], hashlib.sha256(data).hexdigest()
            at += len(data)
    text = json.dumps(manifest).encode()
    text += b" " * (-(HEADER.size + len(text)) % PAGE)
    facts = MAGIC, FORMAT, 0, len(text), HEADER.size + len(text) + sum(map(len, sections))
    digest = hashlib.sha256(HEADER.pack(*facts, b"")[: HEADER.size - 32] + text).digest()
    return HEADER.pack(*facts, digest) + text + b"".join(sections)


def rewritten(path: Path, goal: Path, change: Callable[[dict[str, Any], list[bytes]], Any]) -> Path:
    """`path` with a changed manifest or sections, and valid checksums."""
    manifest, sections = opened(path)
    change(manifest, sections)
    goal.write_bytes(closed(manifest, sections))
    goal.chmod(0o600)
    return goal


# -- mutations -------------------------------------------------------------------------------------------------------


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """The file with another content, somewhere."""
    found = bytearray(raw)
    at = rng.randrange(len(raw)) if rng.random() < 0.6 else rng.randrange(min(len(raw), 9000))
    match rng.randrange(7):
        case 0:
            found[at] ^= 1 << rng.randrange(8)
        case 1:
            del found[at:]
        case 2:
            found[at:at] = rng.randbytes(rng.randrange(1, 70))
        case 3:
            del found[at : at + rng.randrange(1, 5000)]
        case 4:
            end = min(len(raw), at + rng.randrange(1, 5000))
            found[at:end] = bytes(end - at) if any(found[at:end]) else rng.randbytes(end - at - 1) + b"\1"
        case 5:
            found += rng.randbytes(rng.randrange(1, 5000))
        case 6:
            at = rng.choice((8, 12, 16, 24))
            width = 4 if at < 16 else 8
            number = rng.choice([n for n in NUMBERS if n < 1 << 8 * width])
            found[at : at + width] = number.to_bytes(width, "little")
    return bytes(found) if found != raw else raw[:-1]


def hostile(path: Path, rng: random.Random) -> bytes:
    """The file with valid checksums and changed contents."""
    manifest, sections = opened(path)
    sign = True
    match rng.randrange(6):
        case 0:
            _change(manifest, rng)
        case 1:
            sign = rng.random() < 0.3
            _change(manifest["sections"], rng)
            if rng.random() < 0.3:
                manifest["sections"].insert(rng.randrange(9) % (1 + len(manifest["sections"])), ["../../x", 0, 64, "0" * 64])
        case 2:
            rng.shuffle(manifest["sections"])
            sign = rng.random() < 0.5
        case 3:
            at = rng.randrange(len(sections))
            sections[at] = damaged(sections[at], rng) if sections[at] else b"\0"
        case _:
            at = rng.randrange(2)  # a program
            size = int.from_bytes(sections[at][:4], "little")
            head, rest = json.loads(sections[at][4 : 4 + size]), sections[at][4 + size : manifest["sections"][at][2]]
            for _ in range(rng.choice((1, 1, 1, 2, 5))):
                _change(head, rng)
            text = json.dumps(head).encode()
            sections[at] = len(text).to_bytes(4, "little") + text + rest
            sections[at] += bytes(-len(sections[at]) % 64)
            manifest["sections"][at][2] = 4 + len(text) + len(rest)
    try:
        return closed(manifest, sections, sign)
    except (TypeError, IndexError, KeyError, AttributeError):  # the table of sections has become unreadable
        return closed(manifest, sections, False)


def _change(tree: Any, rng: random.Random) -> None:
    """Change one place of a JSON value: another number or value, one less, one twice, two exchanged."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(tree[key], (dict, list)) and tree[key] and rng.random() < 0.85:
            tree = tree[key]
            continue
        break
    old, how = tree[key], rng.random()
    if how < 0.5 and type(old) is int:
        tree[key] = rng.choice((*NUMBERS, old + 1, old - 1, old * 2, -old))
    elif how < 0.75:
        tree[key] = rng.choice((*VALUES, *NUMBERS))
    elif how < 0.85:
        del tree[key]
    elif isinstance(tree, list):
        tree.insert(key, old)
    else:
        tree[str(rng.random())] = old


# -- what a load makes of them -----------------------------------------------------------------------------------------


def outcome(path: Path, raw: bytes) -> str:
    """The name of the error that a load raises; "loaded": none. Other errors than those of rlx are raised."""
    path.write_bytes(raw)
    path.chmod(0o600)
    try:
        found = rlx.load(path, verify=True)
        for name in found if isinstance(found, rlx.runtime.artifact.ArtifactFile) else ():
            found[name]
        return "loaded"
    except RlxError as e:
        assert str(path) in str(e) and len(str(e)) < 2000, str(e)
        return type(e).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seen: dict[str, Counter[str]] = {"damaged": Counter(), "hostile": Counter()}
    with tempfile.TemporaryDirectory() as folder:
        files, bad = [Path(folder) / name for name in ("good.rlx", "flows.rlx")], Path(folder) / "bad.rlx"
        for file, saved in zip(files, (graphs(), flows())):
            rlx.save(file, saved)
        for i in range(args.count):
            rng = random.Random(f"{args.seed} {i}")
            kind, good = "damaged" if i % 2 else "hostile", files[i // 2 % 2]
            made = damaged(good.read_bytes(), rng) if i % 2 else hostile(good, rng)
            try:
                seen[kind][outcome(bad, made)] += 1
            except Exception as e:
                raise SystemExit(f"mutation {args.seed} {i} ({kind}): {type(e).__name__}: {e}") from e
            if kind == "damaged" and seen[kind]["loaded"]:
                raise SystemExit(f"mutation {args.seed} {i} is damaged, and was loaded")
    for kind, found in seen.items():
        print(f"{kind}: {', '.join(f'{n} {name}' for name, n in found.most_common())}")


if __name__ == "__main__":
    main()
