"""CUDA C++ that reads panels of quantised weights (rlx.ir.blocks.Panel), derived from the table of formats.

A warp reads one step of a panel at a time: 32 elements of 32 rows. Lane 4 * g + t holds rows 4g to 4g + 3, whose dwords are
one 16-byte load, and two runs of four adjacent elements of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from rlx.backends.shared.packed import PANEL, panel
from rlx.ir.blocks import Integers, Panel
from rlx.records import record

FOLDER = Path(__file__).parent
HALVES = (0, 1)  # runs of a lane


def of_lane(values: Sequence[int]) -> str:
    """The number of lane t of 4, as an expression."""
    a, b, c, d = values
    assert d - c == b - a
    if c - a == 2 * (b - a):
        return f"({a} + t * {b - a})" if b - a else str(a)
    steps = [f"{name} * {by}" for name, by in (("t / 2", c - a), ("t % 2", b - a)) if by]
    return f"({' + '.join([str(a), *steps])})"


@record
class Turn:
    """How a warp reads a turn. `half`: the first or the second run of each lane. `part`: for products of digits, of which half of
    the lanes have weights of one unit and half those of another; it is the first or the second part of both."""

    panel: Panel
    part: int | None = None

    @property
    def bits(self) -> int:
        return sum(part.bits for part in self.panel.plain.q.parts)

    @property
    def exact(self) -> bool:
        """Whether rlx_narrow_pair takes the integers."""
        return self.bits < 8 or self.panel.packed.zero == 128

    @property
    def groups(self) -> int:
        """Scales of a turn."""
        return self.panel.each(self.panel.plain.scales) or 1

    def runs(self, half: int) -> list[int]:
        """The number of a lane's run of four elements, for t = 0 to 3. All lanes of a half have elements of one scale."""
        if self.part is None:
            return [4 * half + t if self.groups == 2 else 2 * t + half for t in range(4)]
        return [2 * t + half if self.groups == 2 else 4 * self.part + 2 * (t % 2) + half for t in range(4)]

    def dwords(self, part: int, half: int) -> tuple[int, ...]:
        """The number of the dword with the bits of part `part`."""
        each, order = 32 // self.panel.plain.q.parts[part].bits, self.panel.dwords
        return tuple(order.index((part, 4 * run // each * each)) for run in self.runs(half))

    @cached_property
    def loads(self) -> list[tuple[int, tuple[int, ...]]]:
        """The distinct 16-byte loads of a lane: the part and its dwords for t = 0 to 3."""
        return list(dict.fromkeys((p, self.dwords(p, h)) for h in HALVES for p in range(len(self.panel.plain.q.parts))))

    def word(self, half: int) -> str:
        """Four integers of row `row` (0 to 3) of the lane, a byte each."""
        found, q = [], self.panel.plain.q
        for part, bits in enumerate(q.parts):
            shift = of_lane([run % (8 // bits.bits) * bits.bits for run in self.runs(half)])
            text = f"a.q[{self.loads.index((part, self.dwords(part, half)))}][row]"
            text = text if shift == "0" else f"{text} >> {shift}"
            text = text if bits.bits == 8 else f"({text} & 0x{bits.mask * 0x01010101:08x}u)"
            found.append(f"({text} << {q.shifts[part]})" if q.shifts[part] else text)
        return " | ".join(found)

    def small(self, integers: Integers, at: int, by: str) -> str:
        """Element `row` of the bytes `at`, times `by`."""
        word = f"(a.small[{at}] ^ 0x80808080u)" if integers.signed else f"a.small[{at}]"
        less = (1 << 23) + 128 * integers.signed
        return f"{by}[row] * (__uint_as_float(__byte_perm({word}, 0x4b000000u, 0x7440 + row)) - {less}.0f)"

    def header(self) -> str:
        return (FOLDER / "words.h").read_text() + (FOLDER / "ring.h").read_text() + self.body()

    def body(self) -> str:
        """blocks.h with the functions of the format."""
        before, _, after = (FOLDER / "blocks.h").read_text().partition("// Here are the functions of the format")
        return before + self.functions() + after.partition("\n")[2]

    def functions(self) -> str:
        """rlx_turn: the bytes of a lane. rlx_load_numbers, rlx_load_turn: those of turn `turn` of a block of a panel. rlx_word:
        four integers of a row. rlx_wide_numbers: the block's f16 numbers, that of mins times
        `of_mins`. rlx_factors: scales and mins of the lane's rows."""
        p, f = self.panel, self.panel.packed
        count, each = len(f.numbers), p.each(f.scales)
        smalls, inner, loads = each + p.each(f.mins), f.block // p.step, max(len(self.loads), len(Turn(p, 0).loads))
        lines = [
            f"constexpr int RLX_BITS = {self.bits}, RLX_ZERO = {f.zero}, RLX_GROUPS = {self.groups};",
            f"constexpr bool RLX_MINS = {str(f.mins is not None).lower()};",
            f"constexpr int RLX_LESS = {128 + f.zero if self.bits < 8 else 0};",
            "struct rlx_turn {",
            f"  uint32_t q[{loads}][4]; uint2 number[{count}]; uint32_t small[{max(1, smalls)}];",
            "};",
            "template <class From> RLX_FN void rlx_load_numbers(rlx_turn& a, const unsigned char* block, unsigned lane) {",
            *(f"  From::halves(a.number[{n}], block + {at} + lane / 4 * 8);" for n, at in enumerate(f.numbers)),
            "}",
            "RLX_FN const unsigned char* rlx_turn_at(const unsigned char* block, unsigned turn) {",
            f"  return block + turn / {inner} * {f.nbytes} + {p.turns_at} + turn % {inner} * {p.turn_bytes};",
            "}",
            "template <class From> RLX_FN void rlx_load_integers(rlx_turn& a, const unsigned char* at, unsigned lane) {",
            "  const unsigned g = lane / 4, t = lane % 4;",
        ]
        lines += self.reading("From")
        lines += [
            "}",
            "template <class From>",
            "RLX_FN void rlx_load_turn(rlx_turn& a, const unsigned char* block, unsigned turn, unsigned lane) {",
            "  const unsigned char* const at = rlx_turn_at(block, turn);",
            "  rlx_load_integers<From>(a, at, lane);",
            *(f"  From::bytes(a.small[{n}], at + {n * PANEL} + lane / 4 * 4);" for n in range(smalls)),
            "}",
        ]
        for half in HALVES:
            lines += [f"RLX_FN uint32_t rlx_word{half}(const rlx_turn& a, int row, int t) {{ return {self.word(half)}; }}"]
        lines += [
            "template <int HALF> RLX_FN uint32_t rlx_word(const rlx_turn& a, int row, int t) {",
            "  return HALF ? rlx_word1(a, row, t) : rlx_word0(a, row, t);",
            "}",
            f"RLX_FN int rlx_run(int half, int t) {{ return half ? {of_lane(self.runs(1))} : {of_lane(self.runs(0))}; }}",
            f"struct rlx_numbers {{ float of[{count}][4]; }};",
            "RLX_FN rlx_numbers rlx_wide_numbers(const rlx_turn& a, float of_mins) {",
            "  rlx_numbers b;",
            f"  for (int n = 0; n < {count}; n++) rlx_wide_4(b.of[n], a.number[n]);",
            *["  for (int row = 0; row < 4; row++) b.of[1][row] *= of_mins;"] * bool(f.mins),
            "  return b;",
            "}",
            "RLX_FN void rlx_factors(",
            f"  const rlx_turn& a, const rlx_numbers& by, float (&scale)[{self.groups}][4], float (&least)[4]) {{",
            "  #pragma unroll",
            "  for (int row = 0; row < 4; row++) {",
        ]
        for n in range(self.groups):
            lines.append(f"    scale[{n}][row] = {self.small(f.scales, n, 'by.of[0]') if f.scales else 'by.of[0][row]'};")
        lines += [f"    least[row] = {self.small(f.mins, each, 'by.of[1]') if f.mins else '0.0f'};", "  }", "}"]
        return "\n".join([*lines, *self.unit_words(), *self.unit_factors(), ""])

    def reading(self, source: str) -> list[str]:
        """The loads of a lane, of the turn at `at`."""
        first = f"at + {self.panel.dwords_at} + {{}} * {4 * PANEL} + g * 16"
        return [f"  {source}::dwords(a.q[{n}], {first.format(of_lane(at))});" for n, (_, at) in enumerate(self.loads)]

    def unit_words(self) -> list[str]:
        """rlx_unit_words: of part PART of the units of digits, four rows of both halves."""
        lines = [
            "template <int PART> RLX_FN void rlx_unit_words(uint32_t (&to)[2][4], const unsigned char* at, unsigned lane) {",
            "  const unsigned g = lane / 4, t = lane % 4;",
            "  rlx_turn a;",
        ]
        for part in range(2 // self.groups):
            own = Turn(self.panel, part)
            words = f"to[0][row] = {own.word(0)}, to[1][row] = {own.word(1)}"
            lines += [f"  if constexpr (PART == {part}) {{", *own.reading("rlx_near")]
            lines += ["    #pragma unroll", f"    for (int row = 0; row < 4; row++) {words};", "  }"]
        return [*lines, "}"]

    def unit_factors(self) -> list[str]:
        """For a row of integers. rlx_unit_factors: the scales at `at`, of the lane's four rows, and of its two rows the factors
        of the sum of the left operand, both without those of the block. rlx_block_factors: those."""
        p, f = self.panel, self.panel.packed
        lines = [
            f"constexpr bool RLX_HAS_LESS = {str(bool(f.zero or f.mins)).lower()};",
            f"constexpr bool RLX_SCALED = {str(f.scales is not None).lower()};",
            f"constexpr int RLX_TURN_BYTES = {p.turn_bytes if f.scales else f.nbytes};",
        ]
        if f.scales:
            each, least = p.each(f.scales), self.small(f.mins or f.scales, 0, "").replace("[row] * ", "").replace("row", "r")
            byte = "(int)__byte_perm(a.small[0], 0, 0x4440 + row)"
            byte = "(int)(a.small[0] << 24 - 8 * row) >> 24" if f.scales.signed else byte
            lines += [
                "RLX_FN void rlx_unit_factors(const unsigned char* at, unsigned lane, int (&scale)[4], float (&less)[2]) {",
                "  rlx_turn a;",
                "  rlx_near::bytes(a.small[0], at + lane / 4 * 4);",
                "  #pragma unroll",
                f"  for (int row = 0; row < 4; row++) scale[row] = {byte};",
                *[f"  rlx_near::bytes(a.small[0], at + {each * PANEL} + lane / 4 * 4);"] * bool(f.mins),
                f"  for (int r = 0; r < 2; r++) less[r] = {least.replace('0x7440', '0x7440 + lane % 2 * 2')};",
                "}",
            ]
        else:
            lines += ["RLX_FN void rlx_unit_factors(const unsigned char*, unsigned, int (&)[4], float (&)[2]) {}"]
        lines += [
            "RLX_FN void rlx_block_factors(const unsigned char* block, unsigned lane, float (&scale)[4], float (&less)[2]) {",
            "  uint2 number;",
            f"  rlx_near::halves(number, block + {f.numbers[0]} + lane / 4 * 8);",
            "  rlx_wide_4(scale, number);",
        ]
        if f.mins:
            lines += [
                f"  rlx_near::bytes(number.x, block + {f.numbers[1]} + lane / 4 * 8 + lane % 2 * 4);",
                "  less[0] = -rlx_wide_f16((uint16_t)number.x), less[1] = -rlx_wide_f16((uint16_t)(number.x >> 16));",
            ]
        else:
            lines += [f"  for (int r = 0; r < 2; r++) less[r] = (lane % 2 ? scale[2 + r] : scale[r]) * -{f.zero}.0f;"]
        return [*lines, "}"]


def turn_of(form: str) -> Turn:
    return Turn(panel(form))


__all__ = ["FOLDER", "Turn", "of_lane", "turn_of"]
