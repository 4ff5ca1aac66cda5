"""All CPU benchmarks of this machine, into its own section of docs/benchmarks.md: `make bench-cpu`, or

    python benchmarks/cpu.py [--parts encoders experts ...] [--threads 1 4 16] [--rounds 5] [--write [FILE]]

Each part is a command of this folder, which runs rlx and every installed peer in turn; its output is the part's text. With
--write the section of this processor is made, or those of its parts that ran are replaced; other processors' sections stay.
A part that fails is named at the end, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measure import DOCUMENT, header

HERE = Path(__file__).resolve().parent
VISION = ("resnet50", "mobilenet-v2", "convnext-tiny", "vit-b16", "unet")
SECTION, PART = "\n## ", "\n### "


def parts(threads: list[int], rounds: int) -> dict[str, list[list[str]]]:
    """name -> commands, without the interpreter."""
    each = [str(t) for t in threads]
    ends, several = dict.fromkeys((each[0], each[-1])), each[1:] or each
    some, few = ["--rounds", str(rounds)], ["--rounds", str(max(1, rounds // 2))]
    encoder = ["encoder.py", "--threads", *each]
    minilm = ["--model", "minilm", "--shapes", "1x16", "1x128", "8x128"]
    bert = ["--model", "bert-base", "--shapes", "1x128", "8x512"]
    return {
        "encoders": [[*encoder, *minilm, *some], [*encoder, *bert, *few]],
        "encoders-bf16": [[*encoder, "--precision", "bf16", *minilm, *some], [*encoder, "--precision", "bf16", *bert, *few]],
        "encoders-int8": [[*encoder, "--precision", "int8", *minilm, *some]],
        "vision": [["vision.py", "--threads", *ends, "--model", *VISION, *few]],
        "vision-bf16": [["vision.py", "--precision", "bf16", "--threads", *ends, "--model", *VISION[:1], *few]],
        "vision-int8": [["vision.py", "--precision", "int8", "--threads", *ends, "--model", *VISION[:1], *few]],
        "contractions": [["gemm.py", "--threads", *ends, *some]],
        "narrow": [["narrow.py", "--no-model", "--threads", *ends, *some]],
        "generation": [["generation.py", "--threads", t, *some] for t in several],
        "experts": [["moe.py", "--threads", str(min(2, threads[-1])), *some]],
        "attention": [["attention.py", "--threads", *ends, *some]],
        "chains": [["chains.py", "--threads", *ends, *some]],
        "start": [["startup.py", *some]],
        "start-onnx": [["startup.py", "--model", "resnet50", *some]],
    }


def machine() -> str:
    """The heading of this machine's section."""
    return f"{', '.join(header().split(', ')[:2])}, `make bench-cpu`"


def ran(commands: list[list[str]]) -> tuple[str, bool]:
    """The markdown of one part, and whether all its commands succeeded."""
    texts, good = [], True
    for script, *rest in commands:
        shown = " ".join(["python", f"benchmarks/{script}", *rest])
        print(f"\n{shown}", flush=True)
        done = subprocess.run([sys.executable, str(HERE / script), *rest], stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, flush=True)
        good &= not done.returncode
        text = done.stdout.strip()
        text = tidied(text.splitlines()) if "\n| --- " in text else f"```\n{text}\n```"
        texts.append(f"`{shown}`, {time.strftime('%Y-%m-%d')}\n\n{text}")
    return "\n\n".join(texts), good


def tidied(lines: list[str]) -> str:
    """A table in markdown: the lines before it, its rows, the lines between and behind them."""
    first = next(n for n, line in enumerate(lines) if line.startswith("|"))
    rows = [x for x in lines if x.startswith("|")]
    notes = [f"{x};" for x in lines[first:] if x and not x.startswith("|")]
    return "\n".join([*lines[:first], "", *rows, "", *notes]).rstrip("\n;")


def replaced(document: str, heading: str, found: dict[str, str]) -> str:
    """The document with these parts in the section of this heading."""
    before, mark, rest = document.partition(f"{SECTION}{heading}\n")
    section, end, after = rest.partition(SECTION)
    if not mark:
        before = document.rstrip("\n") + "\n"
    intro, *old = section.rstrip("\n").split(PART)
    texts = {name: text for name, _, text in (part.partition("\n\n") for part in old)} | found
    body = "".join(f"{PART}{name}\n\n{text.strip()}\n" for name, text in texts.items())
    return f"{before}{SECTION}{heading}\n{intro}{body}{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = len(os.sched_getaffinity(0))
    every = [n for n in (1, 2, 4, 16) if n <= available and (n != 2 or available < 4)]
    parser.add_argument("--parts", nargs="+", default=list(parts([1], 1)), choices=parts([1], 1))
    parser.add_argument("--threads", type=int, nargs="+", default=every)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", nargs="?", type=Path, const=DOCUMENT, metavar="FILE", help="docs/benchmarks.md, or another")
    args = parser.parse_args()
    found, failed = {}, []
    for name, commands in parts(sorted(args.threads), args.rounds).items():
        if name in args.parts:
            found[name], good = ran(commands)
            failed += [] if good else [name]
            if args.write:  # after each, so that an interrupted run keeps its results
                text = args.write.read_text("utf-8") if args.write.exists() else ""
                args.write.write_text(replaced(text, machine(), {name: found[name]}), encoding="utf-8")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
