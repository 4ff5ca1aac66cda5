"""The first hour with rlx, as one program: a network compiled, saved, profiled and explained; texts embedded and searched.

Run it in an empty folder: python docs/first_hour.py. It leaves network.rlx, network.html and trace.json there, and notes/.
The second part needs the model of `make demo`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import rlx

# 1. A function of arrays. jit runs it once on values without elements, and compiles the graph that results.


@rlx.jit
def network(params: dict[str, rlx.Value], x: rlx.Value) -> rlx.Value:
    hidden = (x @ params["w1"] + params["b1"]).gelu()
    return rlx.softmax(hidden @ params["w2"])


rng = np.random.default_rng(0)
params = {
    "w1": rng.normal(0, 0.1, (64, 256)).astype(np.float32),
    "b1": np.zeros(256, np.float32),
    "w2": rng.normal(0, 0.1, (256, 10)).astype(np.float32),
}
x = rng.normal(size=(8, 64)).astype(np.float32)
first = network(params, x)  # float32 [8, 10]
network(params, x[:3])  # other dims: compiled again
print("compiled because:", network.reasons)

# 2. The same network as a graph with weights, whose memory is known before it runs.

g = rlx.Graph("network")
given = g.input("x", (8, 64), rlx.f32)
weights = {name: g.param(name, array.shape, rlx.f32) for name, array in params.items()}
g.set_outputs([rlx.softmax((given @ weights["w1"] + weights["b1"]).gelu() @ weights["w2"])])
compiled = rlx.compile(g, threads=1)
compiled.set_params(params)
assert np.allclose(compiled(x), first, atol=1e-6)
print("\n" + repr(compiled.memory_plan()))

# 3. One file with code and weights, which loads without the compiler.

compiled.save("network.rlx")
loaded = rlx.load("network.rlx")
assert np.array_equal(loaded(x), compiled(x))
print(f"\nnetwork.rlx: {Path('network.rlx').stat().st_size} bytes")

# 4. Where the time goes, step by step: beside the limits of this machine, and as a trace for https://ui.perfetto.dev.

profile = compiled.profile({"x": x})
print(f"\n{profile}")
profile.trace("trace.json")

# 5. All that the compiler knows, as one page for a browser.

compiled.explain("network.html")

# 6. Sentences as vectors, by a model in a Hugging Face folder, and a folder searched by meaning.

folder = rlx.models.default_folder()
model = rlx.models.load(folder)
vectors = model.embed(["A man is eating food.", "Someone is eating.", "The sky is blue."])
print("\nsimilar:", np.round(vectors @ vectors[0], 2))
Path("notes").mkdir(exist_ok=True)
Path("notes/lunch.txt").write_text("We eat at noon.\n\nThe soup is on the stove.\n", encoding="utf-8")
Path("notes/sky.txt").write_text("The weather is clear today.\n", encoding="utf-8")
subprocess.run([sys.executable, "-m", "rlx", "search", "notes", "What is for lunch?", "--top", "1"], check=True)
