"""The kernel of a chain (chain.py), and the table by which it finds its operands.

Stages with the same text are one *kind*: a function that is called with a row of the table. A row has a head (kind, length),
then an entry for each operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlx.backends.cuda.chain import Chain
from rlx.backends.cuda.chain_parts import THREADS, Attention, Product, shares_of
from rlx.backends.cuda.chain_pieces import SUMS, WARPS, Panels
from rlx.backends.cuda.chain_stages import KIND, AttentionWriter, ProductWriter, heads_text, row_bytes
from rlx.backends.cuda.chain_table import ARGUMENT, HEADS, WORDS, Entry, Operands
from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.schedule import COPIED, LARGEST, RESERVED, WARP
from rlx.ir.program import Program
from rlx.records import record

# warps that copy, which is one of them: packed products compute with the registers of three more, since registers are given to
# four warps at a time; plain ones need none of them and are slower beside (Llama-1B on an H200 0.626 ms instead of 0.593)
COPYING, COPYING_PACKED = 1, 4
MOST_SLOTS = 12  # of the ring
OWN_SUMS, SQUARES = 2 * WARPS * SUMS, 2 * WARPS  # numbers: sums of columns, and of norms
PAIR = 16 + 4 * (THREADS + 2)  # bytes: a barrier, and a share of the keys of a head that the other block of a pair sends
FRONT = 128  # bytes in front of the words: the number of the run
DONE = 255  # the kind behind the last stage
NAME = "RLX_CHAIN_NAME"  # in place of the kernel's name


@record
class ChainText:
    """`table`: entries (HEADS, a number), (ARGUMENT, n) for argument n of the steps' (the buffers of each, then `more`), and
    (WORDS, n) for words n bytes behind the address of the chain's memory, whose first `words` bytes are in front of the table.
    `direct`: arguments behind that address. `threads`: of a block. `stages`: steps of each stage."""

    text: str
    table: tuple[Entry, ...]
    direct: tuple[int, ...]
    words: int
    shared: int
    blocks: int
    threads: int
    more: tuple[tuple[str, ...], ...]
    stages: tuple[int, ...]


class _Kinds:
    """The texts of the stages, each once, and the rows of the table."""

    def __init__(self, chain: Chain, operands: Operands, blocks: int) -> None:
        self.texts: list[str] = []
        self.calls: list[str] = []
        self.feeds: list[str] = []
        self.attends: list[int] = []  # kinds
        self.table: list[Entry] = []
        numbers: dict[str, int] = {}
        for i, s in enumerate(chain.stages):
            made = ProductWriter(operands, i, s, blocks) if isinstance(s, Product) else AttentionWriter(operands, i, s, blocks)
            text = made.written()
            kind = numbers.setdefault(text + made.feed, len(numbers))
            if kind == len(self.texts):
                self.texts.append(text.replace(KIND, str(kind)))
                self.calls.append(made.call.replace(KIND, str(kind)))
                self.feeds.append(made.feed)
                self.attends += [kind] * isinstance(s, Attention)
            self.table += [(HEADS, kind | (1 + len(made.entries)) << 8), *made.entries]
        self.table.append((HEADS, DONE))


def written(chain: Chain, program: Program, blocks: int) -> ChainText:
    operands = Operands(chain, program)
    kinds = _Kinds(chain, operands, blocks)
    area = max(-(-row_bytes(s, chain, program, blocks) // COPIED) * COPIED for s in chain.stages)
    heads = next((s for s in chain.stages if isinstance(s, Attention)), None)
    paired = heads is not None and shares_of(heads, blocks)[0] > 1
    held = area + 4 * (OWN_SUMS + SQUARES) + 8 * len(kinds.table) + PAIR * paired
    pieces = [s.pieces for s in chain.stages if isinstance(s, Product)]
    packed = [x for x in pieces if isinstance(x, Panels)]
    piece = -(-max(x.piece for x in pieces) // COPIED) * COPIED
    slots = min(MOST_SLOTS, (LARGEST - RESERVED - held - 16 * MOST_SLOTS) // piece)
    words, threads = FRONT + 4 * chain.size, WARP * (WARPS + (COPYING_PACKED if packed else COPYING))
    lines = [
        f"constexpr int RLX_CHAIN_BLOCKS = {blocks}, RLX_SLOTS = {slots}, RLX_PIECE = {piece}, RLX_COPIES = {chain.copies};",
        *(_header(x) for x in ("ring.h", "gemv_ring.h", "chain.h")),
        *dict.fromkeys(x.header for x in packed),
        *(heads_text(heads, blocks) if heads else ()), *kinds.texts,
        *_kernel(kinds, operands, heads, paired, area, words, threads),
    ]  # fmt: skip
    table = tuple((kind, value + FRONT if kind == WORDS else value) for kind, value in kinds.table)
    stages = tuple(len(stage) for launch in chain.launches for stage in launch)
    shared = slots * (piece + 16) + held
    direct, more = tuple(operands.direct), tuple(operands.more)
    return ChainText("\n".join(lines), table, direct, words, shared, blocks, threads, more, stages)


def _kernel(
    kinds: _Kinds, operands: Operands, heads: Attention | None, paired: bool, area: int, words: int, threads: int
) -> Iterator[str]:
    """`paired`: blocks are clusters of two."""
    entries, stages = len(kinds.table), len(operands.chain.stages)
    direct = "".join(f", unsigned long long direct{n}" for n in range(len(operands.direct)))
    early = [f"if (({{0}}[0] & 255) == {kind}) rlx_stage_{kind}_early(keys, {{0}}, position);" for kind in kinds.attends]
    cluster = "__cluster_dims__(2) " * paired
    yield f'extern "C" __global__ void {cluster}__launch_bounds__({threads}, 1)\n{NAME}(unsigned char* const base{direct}) {{'
    yield f"  extern __shared__ __align__({COPIED}) unsigned char rlx_shared[];"
    yield "  unsigned char* const area = rlx_shared + RLX_SLOTS * RLX_PIECE;"
    yield f"  float *const sums = (float*)(area + {area}), *const squares = sums + {OWN_SUMS};"
    yield f"  uint64_t *const table = (uint64_t*)(squares + {SQUARES}), *const filled = table + {entries};"
    yield "  uint64_t *const used = filled + RLX_SLOTS, *const pair = used + RLX_SLOTS;"
    yield "  rlx_start_next();"
    yield f"  for (int n = threadIdx.x; n < {entries}; n += {threads}) table[n] = ((const uint64_t*)(base + {words}))[n];"
    if paired:
        yield f"  if (threadIdx.x == {WARP * WARPS}) rlx_ring_init(pair, 1);"
    yield f"  if (threadIdx.x / 32 == {WARPS}) rlx_ring_begin(filled, RLX_SLOTS, {WARPS}, threadIdx.x % 32);"
    yield f"  {'rlx_cluster_barrier' if paired else '__syncthreads'}();"
    yield f"  if (threadIdx.x / 32 >= {WARPS}) {{  // weights do not wait for the kernels in front"
    if more := threads > WARP * (WARPS + COPYING):
        yield f"    rlx_chain_registers<false>();\n    if (threadIdx.x / 32 > {WARPS}) return;"
    yield "    rlx_chain_copies own = {0, 0, 0, 0, 0};"
    yield "    #pragma unroll 1"
    yield f"    for (const uint64_t* row = table; (row[0] & 255) != {DONE}; row += row[0] >> 8)"
    yield "      switch (row[0] & 255) {"
    yield from (f"        case {kind}: {feed} break;" for kind, feed in enumerate(kinds.feeds) if feed)
    yield "      }\n    return;\n  }"
    yield "  rlx_chain_registers<true>();" * more
    yield "  rlx_begin();"
    yield "  const uint32_t run = *(const volatile uint32_t*)base;"
    yield "  rlx_chain own = {rlx_shared, area, filled, used, sums, squares, 0, 0, 0, 0, 0, pair};"
    if heads:
        yield from _position(kinds, operands, heads)
        yield from (f"  {text.format('table')}" for text in early)
    yield "  const uint64_t* row = table;"
    yield "  #pragma unroll 1"
    yield f"  for (int stage = 0; stage < {stages}; stage++) {{"
    yield "    const uint64_t* const next = row + (row[0] >> 8);"
    yield from (f"    {text.format('next')}" for text in early)
    yield "    switch (row[0] & 255) {"
    yield from (f"      case {kind}: {call} break;" for kind, call in enumerate(kinds.calls))
    yield "    }\n    row = next;\n  }"
    yield "  if (blockIdx.x == 0 && threadIdx.x == 0) *(uint32_t*)base = run + 1;\n}\n"


def _position(kinds: _Kinds, operands: Operands, heads: Attention) -> Iterator[str]:
    """The position of the query, which all attentions share, brought into the range of the cache."""
    wanted = operands.program.steps[heads.step].args[heads.kernel.buffers.index(heads.start.buffer)]
    at = next(n for n, (kind, value) in enumerate(kinds.table) if kind == ARGUMENT and operands.buffer(value) == wanted)
    kind, most = CUDA.element(heads.start.buffer.dtype), heads.native.inputs[1].dims[2] - 1
    yield f"  const {kind} given = ((const {kind}*)table[{at}])[{heads.start.offset}];"
    yield f"  const int position = given < 0 ? 0 : given > {most} ? {most} : (int)given;"
    yield "  rlx_chain_keys<rlx_heads> keys;"


def _header(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


__all__ = ["ARGUMENT", "HEADS", "NAME", "WORDS", "ChainText", "written"]
