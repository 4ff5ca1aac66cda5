"""The report as data, and the page: bytes exactly, times that add up, hostile names, and a browser at two widths."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explain_pages import report_in

import rlx
from rlx import knobs
from rlx.errors import CompileError, OptionError
from rlx.explain.page import bug_report, page, run_steps
from rlx.explain.report import layer_of

F = np.float32
DOC = Path(__file__).parent.parent / "docs" / "explain.md"
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\"' onfocus=\"window.hacked=3\" "
    "@@data@@ ${1}"
)


def network(name: str = "network", layer: str = "layer") -> rlx.Graph:
    """Two layers with norms, an attention, and a state."""
    g = rlx.Graph(name)
    x = g.input(f"{layer} x", (16, 64), rlx.f32)
    for n in range(2):
        w, b = g.param(f"{layer}.{n}.w", (64, 64), rlx.f32), g.param(f"{layer}.{n}.b", (64,), rlx.f32)
        x = rlx.layer_norm(rlx.gelu(x @ w + b) + x, np.ones(64, F), np.zeros(64, F))
    heads = x.reshape(1, 16, 4, 16).transpose(0, 2, 1, 3)
    out = rlx.attention(heads, heads, heads)
    total = g.handle(rlx.BufferHandle(f"{layer} total", (16,), rlx.f32))
    g.assign(total, total + x.sum(axis=1))
    g.set_outputs([out, rlx.cumsum(x, axis=0)], names=[f"{layer} out", "running"])
    return g


def compiled(graph: rlx.Graph, device: str = "cpu", **options: Any) -> rlx.CompiledGraph:
    made = rlx.Session(device).compile(graph, **options)
    rng = np.random.default_rng(0)
    made.set_params({p.name: rng.standard_normal(p.shape.static).astype(F) for p in made.params})
    return made


@pytest.fixture(scope="module")
def made() -> rlx.CompiledGraph:
    return compiled(network(), threads=2)


@pytest.fixture(scope="module")
def report(made: rlx.CompiledGraph) -> dict[str, Any]:
    return json.loads(json.dumps(made.report().data(made.profile(runs=4))))


@pytest.fixture(scope="module")
def file(made: rlx.CompiledGraph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "page.html"
    made.explain(path, made.profile(runs=4))
    return path


# -- the data


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_bytes_are_those_of_memory(device):
    made = compiled(network(), device)
    found = made.report().data()
    memory = made._executable.memory()
    assert found["memory"]["regions"] == memory == dict(made.memory_plan().regions)
    assert found["memory"]["total"] == sum(memory.values())
    for region, purpose in (("param", "params"), ("prepared", "prepared"), ("constant", "constants"), ("handle", "handles")):
        own = [b["bytes"] for b in found["buffers"] if b["region"] == region and b["present"]]
        assert sum(own) == memory[purpose], region
    arena = [b for b in found["buffers"] if b["offset"] is not None]
    assert max(b["offset"] + b["bytes"] for b in arena) <= memory["arena"] == found["memory"]["arena"]["bytes"]
    assert {b["id"]: (b["offset"], b["bytes"]) for b in arena} == {
        int(name.split()[0][1:]): slot for name, slot in made.memory_plan().slots.items()
    }


def test_live_buffers_do_not_overlap_but_in_place(report):
    """The page's boxes, checked without the planner: what overlaps in bytes and steps was written over its operand."""
    boxes = [b for b in report["buffers"] if b["offset"] is not None and b["first"] <= b["last"] and b["bytes"]]
    assert len(boxes) > 4
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            bytes_meet = a["offset"] < b["offset"] + b["bytes"] and b["offset"] < a["offset"] + a["bytes"]
            shared = min(a["last"], b["last"]) - max(a["first"], b["first"])
            assert not bytes_meet or shared <= 0, (a, b)
    live = {}
    for moment in range(-1, max(b["last"] for b in boxes) + 1):
        taken = [range(b["offset"], b["offset"] + b["bytes"]) for b in boxes if b["first"] <= moment <= b["last"]]
        live[moment] = len(set().union(*taken))
    peak = report["memory"]["arena"]["peak"]
    assert peak["bytes"] == max(live.values()) == live[peak["moment"]]
    assert 0 < peak["bytes"] <= report["memory"]["arena"]["bytes"] and peak["bytes"] <= report["memory"]["arena"]["lower_bound"]


def test_times_add_up_to_the_measured_run(report, made):
    profile, steps = report["profile"], run_steps(report)
    program = made.program()
    assert len(profile["steps"]) == len(steps) == len(program.steps) + len(program.commit)
    total = sum(s["seconds"] for s in profile["steps"]) + profile["overhead_seconds"]
    assert total == pytest.approx(profile["seconds"], rel=0.05)
    for step, thread, begin, end in profile["timeline"]["spans"]:
        assert 0 <= begin <= end <= profile["timeline"]["nanoseconds"] and 0 <= thread < 2 and 0 <= step < len(steps)


def test_steps_have_their_kernels_texts_nodes_and_costs(report, made):
    texts, nodes, buffers = report["texts"], report["graph"]["nodes"], report["buffers"]
    for step in report["steps"]:
        kernel = report["kernels"][step["kernel"]]
        assert texts[kernel["text"]].startswith("kernel ")
        assert "define " in texts[kernel["code"]] and ".text" in texts[kernel["assembly"]]
        assert step["members"] and all(0 <= n < len(nodes) for n in step["nodes"])
        assert all(0 <= i < at for at, m in enumerate(step["members"]) for i in m["inputs"])
        assert all(buffers[b]["id"] == b for b in step["reads"] + step["writes"])
    work = {w.kernel: w for w in made.report().work.kernels}
    for step in run_steps(report):
        name = step["kernel"].partition("@")[0]
        assert name in work
        if "@" not in step["kernel"] and sum(s["kernel"].startswith(name) for s in run_steps(report)) == 1:
            assert step["cost"]["flops"] == work[name].flops and step["cost"]["least_bytes"] == work[name].least_bytes
    norm = [i for i, n in enumerate(nodes) if n["op"] == "layer_norm"]
    assert {nodes[i]["how"] for i in norm} == {"decomposed"} and all("test_explain.py:" in nodes[i]["source"] for i in norm)
    assert all(any(i in s["nodes"] for s in report["steps"]) for i in norm)
    assert next(n for n in nodes if n["op"] == "attention")["how"] == "native"


def test_refusals_are_said():
    g = rlx.Graph("refused")
    x = g.input("x", (1, 2, 8, 4), rlx.f64)
    g.set_outputs([rlx.exp(rlx.cumsum(x, axis=2)), rlx.attention(x, x, x)])
    made = compiled(g).report().data()
    node = next(n for n in made["graph"]["nodes"] if n["op"] == "attention")
    assert node["how"] == "decomposed" and "f64" in node["why"]
    whys = {s["why"] for s in made["steps"]}
    assert "not joined: the kernel of cumsum takes no others" in whys
    made = compiled(network(), disable=("fuse",)).report().data()
    assert any(s["why"] == "not joined: fusion is left out" for s in made["steps"])


def test_blocks_are_the_layers_that_params_name(report):
    blocks = report["blocks"]
    assert [n for b in blocks for n in b["steps"]] == list(range(len(run_steps(report))))
    assert [b["name"] for b in blocks] == ["layer.0", "layer.1"]
    named = {"encoder.layer.11.output.w": "encoder.layer.11", "blk.3.attn": "blk.3", "h0.w": "h0", "head.w": "head"}
    assert {name: layer_of(name) for name in named} == named and layer_of("w") == ""
    g = rlx.Graph("no names")
    x = g.input("x", (8,), rlx.f32)
    g.set_outputs([rlx.cumsum(x, axis=0)])
    assert compiled(g).report().data()["blocks"] == [{"name": "steps 0 to 0", "steps": [0]}]


def test_a_compile_from_the_cache_has_the_same_report(tmp_path):
    with knobs.override(RLX_CACHE=1, RLX_CACHE_DIR=str(tmp_path)):
        first, second = (compiled(network("kept")).report() for _ in range(2))
        assert (first.cache.state, second.cache.state) == ("compiled", "cached")
        a, b = first.data(), second.data()
    for key in a.keys() - {"compile"}:
        assert a[key] == b[key], key


def test_a_graph_that_changes_after_the_compile_changes_nothing():
    g = network("first")
    made = rlx.Session("cpu").compile(g)
    g.set_outputs([g.inputs[0] * 2.0])
    assert [o["name"] for o in made.report().data()["graph"]["outputs"]] == ["layer out", "running"]
    other = rlx.Session("cpu").compile(g)
    with pytest.raises(CompileError, match="other steps"):
        made._origins().checked(other.program())


def test_report_json_is_written_and_described(report, made, tmp_path):
    made.report().save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["format"] == "rlx report"
    with pytest.raises(OptionError, match="cannot write"):
        made.report().save(tmp_path / "no folder" / "report.json")
    text = DOC.read_text()

    def keys(data: Any, inside: str = "") -> Iterator[str]:
        free = ("target", "options", "versions", "regions", "seconds", "operations", "attributes", "texts", "tiling", "default")
        if isinstance(data, dict) and inside not in free:
            for key, value in data.items():
                if inside != "kernels":
                    yield key
                yield from keys(value, "" if inside == "kernels" else key)
        elif isinstance(data, list) and data and inside not in ("spans", "reading"):
            yield from keys(data[0], "")

    assert sorted({k for k in keys(report) if f"`{k}`" not in text}) == []


# -- the page


class Tags(HTMLParser):
    """The tags of a page with their attributes, its scripts, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_needs_nothing_else(file):
    text = file.read_text()
    tags = Tags(text).tags
    assert sum(tag == "script" for tag, _ in tags) == 2
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in tags}
    for _, attrs in tags:
        assert "src" not in attrs and "style" not in attrs and not any(name.startswith("on") for name in attrs)
        assert attrs.get("href", "#") and attrs.get("href", "#").startswith("#")  # type: ignore[union-attr]
    assert set(re.findall(r"https?://[^\s\"'`]*", text)) == {"http://www.w3.org/2000/svg"}  # the name of a namespace
    policy = next(a["content"] for tag, a in tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids)) and {a["href"] for tag, a in tags if tag == "a"} <= {f"#{i}" for i in ids}


def test_the_page_holds_the_report_and_its_tables(file, made):
    text = file.read_text()
    found = report_in(text)
    assert found["memory"]["regions"] == made._executable.memory()
    words = Tags(text).words
    for nbytes in (*made._executable.memory().values(), found["memory"]["total"]):
        assert f"{nbytes:,}" in words
    assert all(s["kernel"] in words for s in run_steps(found)) and "overhead" in words


def test_hostile_names_stay_text(tmp_path):
    made = compiled(network(HOSTILE, HOSTILE.replace(".", "")))
    path = tmp_path / "page.html"
    made.explain(path)
    parsed = Tags(path.read_text())
    assert sum(tag == "script" for tag, _ in parsed.tags) == 2 and "img" not in {tag for tag, _ in parsed.tags}
    assert HOSTILE in parsed.words and "window.hacked" not in bug_report(report_in(path.read_text()))
    assert report_in(path.read_text())["name"] == HOSTILE


def test_a_page_without_times_says_why(tmp_path):
    made = rlx.Session("cpu").compile(network())
    made.explain(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert report_in(text)["profile"] is None and "Not measured: network: param" in Tags(text).words
    compiled(network(), "null").explain(tmp_path / "null.html")
    assert "without a time for each" in Tags((tmp_path / "null.html").read_text()).words
    with pytest.raises(OptionError, match="cannot write"):
        made.explain(tmp_path / "no folder" / "page.html")


def test_a_program_without_steps_has_a_page(tmp_path):
    g = rlx.Graph("nothing to do")
    g.set_outputs([g.input("x", (4,), rlx.f32)])
    rlx.Session("cpu").compile(g).explain(tmp_path / "page.html")
    assert "nothing to do" in (tmp_path / "page.html").read_text()


def test_the_page_of_minilm_is_small(tmp_path):
    from rlx.errors import ModelError
    from rlx.frontends.embedding import default_folder, load

    try:
        model = load(default_folder())
    except ModelError as e:
        pytest.skip(str(e))
    model.embed(["A man is eating food."])
    (found,) = model.executables
    found.explain(tmp_path / "page.html", found.profile(runs=1))
    assert (tmp_path / "page.html").stat().st_size < 500_000  # 2 MB is the promise
    blocks = report_in((tmp_path / "page.html").read_text())["blocks"]
    assert [b["name"] for b in blocks] == ["embeddings", *(f"encoder.layer.{n}" for n in range(6))]


# -- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright, which drives a browser, is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(params=[(1400, "light"), (400, "light"), (1400, "dark")], ids=lambda p: f"{p[0]}-{p[1]}")
def shown(request: pytest.FixtureRequest, browser: Any, file: Path) -> Iterator[Any]:
    width, scheme = request.param
    yield from opened(browser, file, width, scheme)


def opened(browser: Any, file: Path, width: int, scheme: str = "light") -> Iterator[Any]:
    """The page in a window without network. Any message or request of its is an error."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab, trouble = context.new_page(), []
    tab.on("console", lambda message: trouble.append(message.text))
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.on("dialog", lambda dialog: trouble.append("a dialog"))
    tab.on("request", lambda request: trouble.append(request.url) if request.url != file.as_uri() else None)
    tab.goto(file.as_uri())
    tab.wait_for_selector("html[data-ready]")
    yield tab
    context.close()
    assert trouble == []


def test_the_page_is_drawn(shown, file):
    report = report_in(file.read_text())
    assert shown.evaluate("document.documentElement.scrollWidth") <= shown.viewport_size["width"]  # nothing sticks out
    boxes = [b for b in report["buffers"] if b["offset"] is not None and b["first"] <= b["last"] and b["bytes"]]
    assert shown.locator("#arena rect.box").count() == len(boxes)
    assert shown.locator("#arena text.peak").text_content().startswith("peak ")
    assert shown.locator("#steps tbody tr").count() == len(run_steps(report))
    assert shown.locator("#time-pictures circle").count() > 0 and shown.locator("#time-pictures rect.box").count() > 0
    assert shown.locator("details.block").count() == len(report["blocks"])
    assert shown.locator("#node-table tbody tr").count() == len(report["graph"]["nodes"])
    dark = shown.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    back = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back))) < 150) == dark


def test_keys_move_through_the_arena(shown):
    arena = shown.locator("#arena svg[tabindex]")
    arena.focus()
    seen = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End"):
        shown.keyboard.press(key)
        seen.append(shown.locator("#arena-detail").inner_text())
    assert seen[0] != seen[1] != seen[2] and seen[1] == seen[3] != seen[4]
    buffer = re.compile(r"(input|output|arena) .*: \w+\[[\d,]*\], [\d,]+ bytes at offset [\d,]+; live from")
    assert all(buffer.search(text) for text in seen)
    assert any("test_explain.py:" in text for text in seen)
    shown.locator("#arena rect.box").first.hover(force=True)
    assert "bytes at offset" in shown.locator("#arena-detail").inner_text()


def test_a_step_shows_its_nodes_and_its_three_texts(shown, file):
    report = report_in(file.read_text())
    step = next(n for n, s in enumerate(run_steps(report)) if "matmul" in s["kernel"])
    shown.locator(f"#steps tr[data-step='{step}'] button").press("Enter")
    view = shown.locator("#step-view")
    assert view.locator("select").input_value() == str(step) and "matmul" in view.locator("ol").inner_text()
    kernel = report["kernels"][run_steps(report)[step]["kernel"]]
    texts = {kind: report["texts"][kernel[kind]] for kind in ("text", "code", "assembly")}
    assert view.locator("pre").text_content() == texts["text"]
    view.get_by_role("tab", name="Kernel").focus()
    for kind in ("code", "assembly"):
        shown.keyboard.press("ArrowRight")
        assert view.locator("pre").text_content() == texts[kind]
    view.get_by_role("button", name="Next").click()
    assert shown.locator("#step-view select").input_value() == str(step + 1)


def test_tables_sort_filter_and_open(shown, file):
    report = report_in(file.read_text())
    shown.locator("#steps th", has_text="time").get_by_role("button").click()
    order = [int(row.get_attribute("data-step")) for row in shown.locator("#steps tbody tr").all()]
    times = [report["profile"]["steps"][n]["seconds"] for n in order]
    assert times == sorted(times, reverse=True) and shown.locator("#steps th[aria-sort='descending']").count() == 1
    shown.locator("#node-table input").fill("attention")
    visible = [row.inner_text() for row in shown.locator("#node-table tbody tr").all() if row.is_visible()]
    assert visible and all("attention" in row for row in visible)
    shown.locator("#buffers > summary").press("Enter")
    shown.wait_for_selector("#buffers tbody tr")
    assert shown.locator("#buffers tbody tr").count() == sum(b["present"] for b in report["buffers"])
    assert f"{report['memory']['regions']['prepared']:,} bytes" in shown.locator("#lasting").inner_text()


def test_everything_is_reached_by_tab_and_has_a_name(browser, file):
    for tab in opened(browser, file, 1400):
        unnamed = tab.evaluate(
            """() => [...document.querySelectorAll('button, select, input, textarea, [tabindex="0"]')].filter(e =>
              !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML.slice(0, 80))"""
        )
        assert unnamed == []
        reached = set()
        for _ in range(60):
            tab.keyboard.press("Tab")
            reached.add(tab.evaluate("document.activeElement.closest('section')?.id || document.activeElement.className"))
        assert {"skip", "memory", "time"} <= reached
        assert tab.evaluate("[...document.querySelectorAll('th')].every(t => t.scope)")
        assert tab.evaluate("[...document.querySelectorAll('table')].every(t => t.caption)")


def test_a_hostile_page_runs_nothing(browser, tmp_path):
    path = tmp_path / "page.html"
    compiled(network(HOSTILE, HOSTILE.replace(".", ""))).explain(path)
    for tab in opened(browser, path, 400):
        for details in tab.locator("summary").all():
            details.press("Enter")
        for button in tab.locator("#steps tbody button").all()[:3]:
            button.press("Enter")
        tab.locator("#arena svg[tabindex]").focus()
        tab.keyboard.press("End")
        assert tab.evaluate("window.hacked") is None
        assert "window.hacked" in tab.locator("h1").inner_text()  # it is there, as text


def test_the_bug_report_is_copied(browser, file):
    for tab in opened(browser, file, 400):
        tab.locator("#bug-copy").click()
        tab.wait_for_selector("#bug-copied:not(:empty)")
        text = tab.locator("#bug-text").input_value()
        assert text == bug_report(report_in(file.read_text()))
        assert not [name for name in ("layer.0", "layer x", str(Path.cwd())) if name in text]


def test_a_page_is_the_same_for_the_same_report(report):
    assert page(report) == page(report)
