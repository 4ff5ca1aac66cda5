"""The command `rlx`. Modules that only some commands need are imported in the commands, to keep start-up short."""

from __future__ import annotations

import os
import sys
import time
import warnings
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlx.cli import options as o
from rlx.cli.bench import bench
from rlx.cli.explain import explain
from rlx.cli.generate import chat, generate, standard_input
from rlx.cli.inspect import inspect
from rlx.cli.launch import launch
from rlx.cli.moe import moe
from rlx.cli.progress import Bars
from rlx.cli.run import run as run_model
from rlx.cli.save import save
from rlx.cli.search import search
from rlx.cli.verify import verify
from rlx.errors import RlxError, UnknownDeviceError, check_writable
from rlx.knobs import drop_columns

if TYPE_CHECKING:
    from rlx.frontends.embedding import EmbeddingModel

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="rlx: compile a model once, run it many times.")
USE, LOOK, MACHINE = "Use a model", "Look at a model", "This machine"  # groups of commands in the help
TABLE_TEXTS = 12  # up to this many texts, a table of similarities is printed
PROGRESS_TEXTS = 200  # from this many texts on, they have a progress bar


def run(argv: list[str] | None = None) -> None:
    """Entry point. Exit code 0: success; 1, with one line on stderr: an error of rlx or of the file system; 2: wrong usage."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as by `>&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  for as long as the process runs
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters outside the terminal's encoding
    drop_columns()
    warnings.showwarning = lambda message, *_, **__: print(f"rlx: {message}", file=sys.stderr)
    try:
        _with_one(sys.argv[1:] if argv is None else argv)(args=argv, prog_name="rlx")
    except (RlxError, OSError) as e:
        said = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) and e.filename and e.strerror else str(e)
        print(f"rlx: {' '.join(said.split())}", file=sys.stderr)
        sys.exit(2 if isinstance(e, (o.UsageError, UnknownDeviceError)) else 1)


def _with_one(args: list[str]) -> typer.Typer:
    """The app with the one command that is asked for, if it is a command: the options of all of them take 13 ms to build."""
    asked = [c for c in app.registered_commands if c.callback and (c.name or c.callback.__name__) in args[:1]]
    if not asked:
        return app
    one = typer.Typer(callback=main, no_args_is_help=True, pretty_exceptions_enable=False)
    one.registered_commands = asked
    return one


def _version(asked: bool) -> None:
    if asked:
        from rlx import __version__

        print(f"rlx {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...


@app.command(rich_help_panel=USE)
def embed(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to embed.", show_default=False)] = None,
    model: o.Encoder = None,
    file: Annotated[str | None, typer.Option(help="Embed each line of this file; - reads standard input.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the embeddings, float32 [n, dim], to this .npy file.")] = None,
    device: o.DeviceName = "cpu",
    threads: o.Threads = None,
    tune: o.Tune = 0.0,
    trace: o.Trace = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print time per phase, and memory use.")] = False,
) -> None:
    """Embed texts as vectors, and show the similarity of a few of them.

    Examples:

        rlx embed "A man is eating food." "Someone is eating." "The sky is blue."

        rlx embed --file lines.txt --output vectors.npy

        rlx embed --model path/to/folder --threads 2 --stats "Hello"
    """
    check_writable(output, trace, model=model)
    lines = list(texts or []) + (_read_lines(file) if file is not None else [])
    if not lines:
        raise typer.BadParameter("nothing to embed: give texts, or --file", param_hint="TEXT")
    import numpy as np

    import_module("rlx.frontends.embedding")
    imported = _seconds_since_start()
    with Bars() as bars:
        loaded = o.open_encoder(model, bars, device, threads, tune)
        begun = time.perf_counter()
        vectors = loaded.embed(lines, progress=bars.texts if len(lines) >= PROGRESS_TEXTS else None)
        first = time.perf_counter() - begun
    phases = {"python and imports": imported, **loaded.seconds}
    if output is not None:
        with output.open("wb") as f:  # given a name, np.save would append .npy
            np.save(f, vectors)
    from rlx.cli import show

    few = len(lines) <= TABLE_TEXTS
    if len(lines) == 1:
        show.vector(vectors[0])
    elif few:
        show.similarities(lines, vectors)
    show.summary(loaded, len(lines), first, _warm(loaded, lines) if few else None, output)
    if stats:
        show.account(phases)
    if trace is not None:
        from rlx.explain.profile import write_trace

        write_trace(trace, loaded.profiles())


def _seconds_since_start() -> float:
    """Age of this process, including the start of the interpreter. On systems that do not report it: its CPU time."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):  # not Linux
        return time.process_time()


def _read_lines(file: str) -> list[str]:
    if file == "-":
        return standard_input().splitlines()
    try:
        return Path(file).read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError as e:
        raise RlxError(f"{file} is not UTF-8 text: byte {e.start} cannot be read") from None


def _warm(model: EmbeddingModel, lines: list[str]) -> float:
    """Seconds for the same texts after everything is compiled: the median of five passes."""
    passes = []
    for _ in range(5):
        begun = time.perf_counter()
        model.embed(lines)
        passes.append(time.perf_counter() - begun)
    return sorted(passes)[2]


for command in (generate, chat, search):
    app.command(rich_help_panel=USE)(command)
app.command("run", rich_help_panel=USE)(run_model)
for command in (inspect, explain, verify, bench, save):
    app.command(rich_help_panel=LOOK)(command)
app.add_typer(moe, name="moe", rich_help_panel=LOOK)
app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=MACHINE)(launch)


@app.command(rich_help_panel=MACHINE)
def devices() -> None:
    """List the devices of every backend, with the reason if one is not usable here."""
    from rlx.cli import show

    show.devices()


@app.command(rich_help_panel=MACHINE)
def cache(
    action: Annotated[str, typer.Argument(help="show, or clear: remove all entries.", metavar="[show|clear]")] = "show",
) -> None:
    """Show the location and size of the cache of compiled code, or clear it."""
    from rlx.cli import show

    if action not in ("show", "clear"):
        raise typer.BadParameter(f"{action!r} is not show or clear", param_hint="ACTION")
    show.cache(clear=action == "clear")


@app.command(rich_help_panel=MACHINE)
def knobs() -> None:
    """List the environment variables that rlx reads."""
    from rlx.cli import show

    show.knobs()
