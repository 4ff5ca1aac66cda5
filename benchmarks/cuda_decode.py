"""Decoding of the Qwen3-0.6B shape on one device, random weights, batch 1: wall time of a token from Python, logits read back.

    python benchmarks/cuda_decode.py [--device cuda] [--weights bf16] [--context 128] [--tokens 64] [--layers 28]

A prompt is processed, then `tokens` tokens are decoded one by one; the second of two equal rounds is timed. The line says whether
both rounds gave the same bits. The weights are written to a temporary folder first (1.2 GB at 28 layers).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks import qwen_shape
from rlx.models import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--weights", default="bf16", choices=("f32", "bf16", "f16", "int8", "int4"))
    for name, value in (("context", 128), ("tokens", 64), ("layers", 28)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    qwen_shape.CONFIG["num_hidden_layers"] = args.layers
    session = rlx.Session(args.device)
    ids = np.random.default_rng(1).integers(0, qwen_shape.CONFIG["vocab_size"], args.context + args.tokens).astype(np.int32)
    with tempfile.TemporaryDirectory(prefix="rlx-decode-") as root:
        path, capacity = qwen_shape.folder(Path(root)), args.context + args.tokens
        model = load(path, weights=args.weights, capacity=capacity, cache="bf16", session=session)
        rounds = [one_round(model, ids, args.context) for _ in range(2)]
    same = all(np.array_equal(a, b) for a, b in zip(rounds[0][2], rounds[1][2]))
    prefill, steps, _ = rounds[1]
    print(
        f"{args.device}, {args.layers} layers, {args.weights}: prefill of {args.context} tokens {prefill * 1e3:.2f} ms, "
        f"a token {statistics.median(steps) * 1e3:.3f} ms; same bits in both rounds: {same}"
    )


def one_round(model: rlx.models.LanguageModel, ids: np.ndarray, context: int) -> tuple[float, list[float], list[np.ndarray]]:
    """(seconds of the prompt, seconds of each token, logits of each)."""
    model.reset()
    begun = time.perf_counter()
    model.step(ids[:context])
    prefill, steps, logits = time.perf_counter() - begun, [], []
    for at in range(context, len(ids)):
        begun = time.perf_counter()
        logits.append(model.step(ids[at : at + 1])[0])
        steps.append(time.perf_counter() - begun)
    return prefill, steps, logits


if __name__ == "__main__":
    main()
