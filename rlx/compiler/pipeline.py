"""The pass pipeline. A pass is a pure function (graph, compilation) -> Graph; its result is verified.

A pass that breaks the graph raises a VerifyError that names the pass and shows the graph before and after. The text of every
stage is kept only on request.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rlx.compiler.canonicalise import canonicalise
from rlx.compiler.channels_last import channels_last
from rlx.compiler.compilation import Compilation
from rlx.compiler.folding import folding
from rlx.compiler.legalise import bind_dims, legalise
from rlx.compiler.levels import levels
from rlx.compiler.options import CompileOptions
from rlx.compiler.outputs import outputs
from rlx.compiler.packing import packing
from rlx.compiler.padding import padding
from rlx.compiler.pairs import pairs
from rlx.compiler.precision import precision
from rlx.compiler.quantised import quantised
from rlx.compiler.reductions import reductions
from rlx.compiler.scores import scores
from rlx.compiler.state import state
from rlx.errors import OptionError, VerifyError
from rlx.ir.graph import Graph
from rlx.ir.verify import Sound, faults

Pass = Callable[[Graph, Compilation], Graph]

PIPELINE: tuple[tuple[str, Pass], ...] = (
    ("bind_dims", bind_dims),
    ("pairs", pairs),
    ("padding", padding),
    ("canonicalise", canonicalise),
    ("scores", scores),
    ("folding", folding),
    ("channels_last", channels_last),
    ("precision", precision),
    ("legalise", legalise),
    ("quantised", quantised),
    ("tidy", canonicalise),
    ("reductions", reductions),
    ("state", state),
    ("outputs", outputs),
    ("levels", levels),
    ("packing", packing),
)


def run_passes(
    graph: Graph,
    compilation: Compilation,
    trace: dict[str, str] | None = None,
    passes: tuple[tuple[str, Pass], ...] = PIPELINE,
    graphs: dict[str, Graph] | None = None,
) -> Graph:
    """The graph after all passes that the options leave on; the argument is not changed.

    `trace`, if given, receives the text of the input ("graph") and of each stage by the pass's name; so does the folder
    `options.dump`. `graphs` receives the graph after each pass. Errors of a pass are raised unchanged; VerifyError names a pass
    that broke the graph.
    """
    options = compilation.options
    watched = trace is not None or options.wants_text
    stages = trace if trace is not None else {}
    sound = Sound()
    _check(graph, sound, "the graph is not well formed")
    if watched:
        keep_text(stages, "graph", graph.name, str(graph), options)
    for name, run in passes:
        if name in options.disable:
            continue
        before, graph = graph, run(graph, compilation)
        _check(graph, sound, f"pass {name!r} broke the graph", before)
        if graphs is not None:
            graphs[name] = graph
        if watched:
            keep_text(stages, name, graph.name, str(graph), options)
    return graph


def _check(graph: Graph, sound: Sound, label: str, before: Graph | None = None) -> None:
    if bad := faults(graph, sound):
        shown = "" if before is None else f"\nbefore:\n{before}\nafter:\n{graph}"
        raise VerifyError(f"{graph.name}: {label}:\n  " + "\n  ".join(bad) + shown)


def keep_text(stages: dict[str, str], name: str, graph: str, text: str, options: CompileOptions) -> None:
    """Record the text of a stage of the graph called `graph`, and write it to the folder options.dump."""
    stages[name] = text
    if options.dump is not None:
        from pathlib import Path

        folder, file = Path(options.dump), re.sub(r"[^\w.-]+", "_", graph)[:100]  # a graph's name may have any characters
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{file}.{len(stages) - 1:02}.{name}.rlx").write_text(stages[name])
        except OSError as e:
            raise OptionError(f"dump={options.dump!r}: cannot write there: {e}") from e
