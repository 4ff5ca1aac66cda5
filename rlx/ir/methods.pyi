# Written by `python docs/ops.py` from the op table.
from collections.abc import Callable as Callable
from collections.abc import Sequence
from typing import Any, Literal

from rlx.ir.body import Body
from rlx.ir.dtype import DType
from rlx.ir.node import Operand, Value
from rlx.ir.op import OPS as OPS
from rlx.ir.op import OpDef as OpDef
from rlx.ir.shape import Dim

Dims = int | str | Dim | Sequence[int | str | Dim]

ATTRIBUTES: tuple[str, ...]
FUNCTIONS: dict[str, Callable[..., Any]]

def attach(value: type[Methods], name: str, function: Callable[..., Any]) -> None: ...

class Methods:
    __slots__ = ()
    def log1p(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Natural logarithm of 1 + x, accurate near 0."""
    def expm1(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """exp(x) - 1, accurate near 0."""
    def relu(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """max(x, 0)."""
    def sigmoid(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """1 / (1 + exp(-x))."""
    def silu(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x * sigmoid(x)."""
    def softplus(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """log(1 + exp(x))."""
    def gelu(self, /, approximate: Literal['none', 'tanh'] = 'none', *, shape: Any = None, name: str | None = None) -> Value:
        """x * Φ(x), with Φ the standard normal CDF. `approximate`: 'none' (exact, with erf) or 'tanh' (the tanh formula)."""
    def clip(self, /, low: float = ..., high: float = ..., *, shape: Any = None, name: str | None = None) -> Value:
        """min(max(x, low), high); NaN stays NaN. Either bound may be omitted."""
    def attention(self, k: Operand, v: Operand, *operands: Operand, scale: float = 0.0, mask: Literal['none', 'causal', 'sliding_window', 'custom', 'bias'] = 'none', window: int = 0, positioned: bool = False, cap: float = 0.0, shape: Any = None, name: str | None = None) -> Value:
        """Scaled dot-product attention: softmax(q @ kᵀ * scale + mask) @ v over [batch, heads, sequence, head_dim]. With
        grouped heads, k and v have fewer heads, each shared by the same number of consecutive query heads. k and v may be
        f16 or bf16 with any dtype of q; the result has q's dtype. A fully masked row gives zeros. With `positioned`, the
        last operand, start ([] or [batch]), is the position of the first query; k and v may be a whole KV cache, and keys
        past the last query are ignored. A query past the last key is an IndexRangeError."""
    def attention_parts(self, k: Operand, v: Operand, *operands: Operand, scale: float = 0.0, mask: Literal['none', 'causal', 'sliding_window', 'custom', 'bias'] = 'none', window: int = 0, positioned: bool = False, cap: float = 0.0, parts: int = 2, block: int = 1, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
        """Split-key attention: the partial result for each part of the keys, [parts, batch, heads, sequence, head_dim] (zeros
        where a part has no visible key), and its logsumexp, [parts, batch, heads, sequence], used to merge the parts."""
    def rope(self, positions: Operand, /, theta: float = 10000.0, interleaved: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Rotary position embedding: rotates pair i of x [..., sequence, head_dim] by position * theta ** (-2i / head_dim)
        radians. positions: [sequence], or [batch, sequence] where dim 0 of x is the batch."""
    def non_max_suppression(self, scores: Operand, /, most: int, overlap: float = 0.5, least: float = ..., *, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
        """The best of boxes [batch, n, 4], each of two opposite corners, by scores [batch, classes, n]: (ids i64 [batch,
        classes, min(most, n)], best first, then -1; their number i64 [batch, classes]). Of two boxes that overlap too much,
        the one with the lower score goes."""
    def exchange(self, /, what: Literal['all_reduce', 'all_gather', 'reduce_scatter', 'broadcast', 'all_to_all', 'rank_part'], ranks: int, kind: Literal['sum', 'mean', 'max', 'min'] = 'sum', root: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """The core collective, on row-major operands. all_gather adds a leading dim of size `ranks`, all_to_all keeps it,
        reduce_scatter and rank_part (which moves no data) remove it; all_reduce and broadcast keep the operand's dims."""
    def all_reduce(self, /, ranks: int, kind: Literal['sum', 'mean', 'max', 'min'] = 'sum', *, shape: Any = None, name: str | None = None) -> Value:
        """Combines the operands of all ranks elementwise in rank order (sum, mean, max or min) and gives every rank the
        result. 16-bit and 8-bit floats are summed in f32 and integers in 64 bits; a mean of integers is truncated."""
    def all_gather(self, /, ranks: int, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Concatenates the operands of all ranks along `axis` in rank order, on every rank."""
    def reduce_scatter(self, /, ranks: int, axis: int = 0, kind: Literal['sum', 'mean', 'max', 'min'] = 'sum', *, shape: Any = None, name: str | None = None) -> Value:
        """Splits the all_reduce result into equal parts along `axis` and gives part r to rank r."""
    def broadcast_rank(self, /, ranks: int, root: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Copies the operand of rank `root` to every rank."""
    def all_to_all(self, /, ranks: int, split_axis: int = 0, concat_axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Splits every rank's operand into equal parts along `split_axis` and sends part r to rank r, which concatenates the
        received parts along `concat_axis` in rank order."""
    def rank_slice(self, /, ranks: int, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Splits the operand into equal parts along `axis` and keeps part r on rank r. No data moves between ranks."""
    def view_as_real(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """A view of c64 [...] as f32 [..., 2]: real and imaginary parts."""
    def view_as_complex(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """A view of f32 [..., 2] as c64 [...]: the last dim holds the real and imaginary parts."""
    @property
    def real(self) -> Value:
        """The real part of c64, f32."""
    @property
    def imag(self) -> Value:
        """The imaginary part of c64, f32."""
    def conj(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Complex conjugate."""
    def complex(self, im: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """A c64 tensor from its real and imaginary parts, both f32."""
    def matmul(self, b: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Matrix product as numpy's matmul: [..., m, k] @ [..., k, n], batch dims broadcast. 16-bit floats accumulate in f32;
        integers wrap. Mixed float dtypes give the dtype that holds both (f32 if neither does), 8-bit floats f32; a narrow
        weight is read in its own dtype."""
    def int8_matmul(self, b: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Matrix product of u8 by i8 in i32. Sums wrap; they are exact up to a depth of 65,000."""
    def flatten_matmul(self, b: Operand, /, axes: int, batch: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Matrix product of a, with its last `axes` dims as one, and b: [batch, rows, k] by [batch, k, columns], with `batch`
        leading dims in both and any number of dims of rows. The flattened dims need no common stride: windows are read
        where they lie. The dtypes are those of matmul; u8 with i8 gives i32."""
    def linear(self, w: Operand, b: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x @ w + b, with w [in, out] and an optional bias b [out]."""
    def branch(self, *operands: Operand, then_body: Body, else_body: Body, shape: Any = None, name: str | None = None) -> Value:
        """The results of one of two bodies on the operands behind the condition, a bool (). rlx.cond makes it."""
    def loop(self, *operands: Operand, body: Body, carried: int = 0, limit: int = -1, tests: bool = False, shape: Any = None, name: str | None = None) -> tuple[Value, Value, Value]:
        """Repeats `body` on the first `carried` operands, at most `limit` times and, with `tests`, while the first of them
        holds. Results: the number of iterations, the carried values, and the rows of the body's further results, [limit,
        ...] (zeros behind the last iteration). rlx.while_loop and rlx.scan make it."""
    def conv(self, w: Operand, b: Operand, /, strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), groups: int = 1, channels_last: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Convolution (cross-correlation) over 1 to 3 spatial dims: x [batch, channels, *spatial], w [out, channels / groups,
        *window], an optional bias b [out]; with channels_last x [batch, *spatial, channels] and w [*window, channels /
        groups, out]. `low` and `high` are the zeros before and after each spatial dim. The dtypes are those of matmul; u8
        with i8 weights gives i32. Narrow floats are summed in f32."""
    def conv_transpose(self, w: Operand, b: Operand, /, strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), groups: int = 1, channels_last: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Transposed convolution over 1 to 3 spatial dims: x [batch, channels, *spatial], w [channels, out / groups, *window],
        an optional bias b [out]; with channels_last x [batch, *spatial, channels] and w [*window, channels, out / groups].
        The windows that it adds up are `strides` apart. `low` and `high` elements are cut off before and after each spatial
        dim; a negative number adds elements, which have the bias alone. The dtypes are those of conv."""
    def neg(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Negation; unsigned integers wrap."""
    def abs(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Absolute value; the least signed integer is unchanged. For c64: the magnitude as f32, without intermediate overflow."""
    def sqrt(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Square root; NaN for negative x."""
    def rsqrt(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Reciprocal of the square root, 1 / sqrt(x)."""
    def reciprocal(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Reciprocal, 1 / x."""
    def exp(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Exponential, e**x."""
    def log(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Natural logarithm; NaN for negative x, -inf at 0."""
    def sin(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Sine; x is in radians."""
    def cos(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Cosine; x is in radians."""
    def tanh(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Hyperbolic tangent."""
    def erf(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Error function."""
    def floor(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Rounds down to an integer."""
    def ceil(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Rounds up to an integer."""
    def round(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Rounds to the nearest integer, ties to even."""
    def trunc(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Rounds toward zero to an integer."""
    def sign(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Sign of x: -1, 0 or 1; -0.0 and NaN are kept."""
    def is_nan(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """True where x is NaN."""
    def logical_not(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Logical NOT."""
    def bitwise_not(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Bitwise NOT."""
    def add(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x + y; integers wrap."""
    def sub(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x - y; integers wrap."""
    def mul(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x * y; integers wrap."""
    def div(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Quotient x / y. Integer division truncates toward zero, and x / 0 is 0."""
    def rem(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Remainder with the sign of x, as C's fmod; for integers x rem 0 is 0."""
    def mod(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Remainder with the sign of y, as Python's %; for integers x mod 0 is 0."""
    def floor_div(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """floor(x / y); integers: x // 0 is 0."""
    def pow(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x**y, as C's pow: NaN for negative x and fractional y, 1 where y is 0 or x is 1."""
    def maximum(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Elementwise maximum; NaN if either operand is NaN. Of 0 and -0 either one."""
    def minimum(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Elementwise minimum; NaN if either operand is NaN. Of 0 and -0 either one."""
    def less(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x < y; False if either is NaN."""
    def less_equal(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x <= y; False if either is NaN."""
    def equal(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x == y; False with a NaN."""
    def not_equal(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x != y; True if either is NaN."""
    def logical_and(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Logical AND."""
    def logical_or(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Logical OR."""
    def logical_xor(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Logical XOR."""
    def bitwise_and(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Bitwise AND."""
    def bitwise_or(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Bitwise OR."""
    def bitwise_xor(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Bitwise XOR."""
    def shift_left(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Left shift, x << y; a count outside 0 … bits-1 gives 0."""
    def shift_right(self, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Right shift, x >> y: arithmetic for signed x, else logical. A count outside 0 … bits-1 gives 0, or -1 where x < 0."""
    def multiply_add(self, y: Operand, z: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """x * y + z, rounded twice. As a single op it is fused into the producer of z, even where x * y alone would not be."""
    def where(self, x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Elements of x where the condition is True, else of y; the three operands broadcast together."""
    def cast(self, /, dtype: DType | str, *, shape: Any = None, name: str | None = None) -> Value:
        """Converts to another dtype. Float to integer truncates and saturates (NaN gives 0); to bool is x != 0; c64 to real
        drops the imaginary part."""
    def bitcast(self, /, dtype: DType | str, *, shape: Any = None, name: str | None = None) -> Value:
        """The same bits as another dtype of equal size. A NaN of 16 or 8 bits may become another NaN."""
    def router(self, /, experts: int, ahead: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Marks the choice of experts, i32 [tokens, k]: the result is ids, in memory of its own, where the runtime finds it
        after a run. `route` has one inside."""
    def route(self, *more: Operand, k: int, scoring: Literal['softmax', 'top_k_softmax', 'sigmoid'] = 'softmax', renormalise: bool = False, scale: float = 1.0, groups: int = 1, top_groups: int = 1, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
        """Chooses k experts for each token by scores [tokens, experts]: (ids i32 [tokens, k], best first; their weights
        [tokens, k]). A bias [experts] is added to the softmax or sigmoid for the choice, and not to the weights. Ties are
        ordered by id. A guess of what the next router will choose, i32 [tokens, k], is kept beside the choice for the
        runtime."""
    def group_rows(self, /, groups: int, *, shape: Any = None, name: str | None = None) -> tuple[Value, Value, Value]:
        """Groups rows by id, i32 [rows]: (order i32 [rows]: the row at each place, stable; place i32 [rows]: its inverse; ends
        i32 [groups]: the end of each group). An id is below `groups`, or 2**31 - 1: a row of no group, which comes last.
        Other ids are an IndexRangeError."""
    def group_ends(self, /, rows: int, *, shape: Any = None, name: str | None = None) -> Value:
        """Ends of groups, i32 [groups], from their sizes. Sizes below 0, or that do not sum to `rows`, are an IndexRangeError."""
    def segment_matmul(self, w: Operand, ends: Operand, /, format: str = '', exact: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Product of groups of rows with a matrix each: rows ends[g - 1] to ends[g] of x [rows, k] times w[g] of w [groups, k,
        n]; the last group has all rows that are left. `ends`, i32 [groups], must ascend. With a `format`, the weights are
        quantised blocks, u8 [groups, n, row bytes], as in dequant_matmul."""
    def grouped_matmul(self, w: Operand, ends: Operand, /, format: str = '', exact: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Product of groups of rows with a matrix each: the first sizes[0] rows of x [rows, k] times w[0], the next sizes[1]
        times w[1], and so on, with w [groups, k, n] and sizes i32 [groups]; a group may be empty. Sizes that do not sum to
        the rows are an IndexRangeError. `format`: as in segment_matmul."""
    def gather(self, indices: Operand, /, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Takes slices of x along `axis`, one per index; the result has dims x[:axis] + indices + x[axis+1:]. An index below 0
        or not below the dim is an IndexRangeError on every backend if a result depends on its row; else it may or may not
        be one."""
    def embedding(self, ids: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Looks up rows of a table [entries, width], one per id."""
    def concat(self, *operands: Operand, axis: int = 0, shape: Any = None, name: str | None = None) -> Value:
        """Concatenates the operands along `axis`."""
    def pad(self, /, low: int | Sequence[int], high: int | Sequence[int], value: float = 0.0, *, shape: Any = None, name: str | None = None) -> Value:
        """Pads every dim with `value`: `low` elements before and `high` elements after."""
    def copy(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """A row-major copy of x, made at every run: never a view of x, and its memory is not shared."""
    def layer_norm(self, *affine: Operand, axis: int = -1, eps: float = 1e-05, shape: Any = None, name: str | None = None) -> Value:
        """Layer normalisation over the dims from `axis` to the last: (x - mean) / sqrt(variance + eps) * scale + bias."""
    def rms_norm(self, *affine: Operand, axis: int = -1, eps: float = 1e-06, shape: Any = None, name: str | None = None) -> Value:
        """RMS normalisation over the dims from `axis` to the last: x / sqrt(mean(x²) + eps) * scale."""
    def group_norm(self, *affine: Operand, groups: int, eps: float = 1e-05, shape: Any = None, name: str | None = None) -> Value:
        """Group normalisation of x [batch, channels, …] over each group of channels and all later dims; scale and bias are per
        channel."""
    def batch_norm(self, scale: Operand, bias: Operand, mean: Operand, variance: Operand, /, axis: int = 1, eps: float = 1e-05, *, shape: Any = None, name: str | None = None) -> Value:
        """Batch normalisation with known statistics, each [x.dims[axis]]: (x - mean) / sqrt(variance + eps) * scale + bias."""
    def argmax(self, /, axis: int = -1, keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Index (i64) of the greatest element along `axis`: the first on ties, the first NaN if there is one."""
    def argmin(self, /, axis: int = -1, keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Index (i64) of the least element along `axis`: the first on ties, the first NaN if there is one."""
    def cumsum(self, /, axis: int = -1, exclusive: bool = False, reverse: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Cumulative sum along `axis`, inclusive unless `exclusive`; integers wrap."""
    def cumprod(self, /, axis: int = -1, exclusive: bool = False, reverse: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Cumulative product along `axis`, inclusive unless `exclusive`; integers wrap."""
    def sort(self, /, descending: bool = False, *, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
        """Stable sort along the last dim: the sorted elements and their original indices (i64)."""
    def argsort(self, /, descending: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Indices (i64) that sort the last dim; the sort is stable."""
    def top_k(self, /, k: int, largest: bool = True, *, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
        """The k largest (or smallest) elements along the last dim, sorted, and their indices (i64); ties are ordered by index."""
    def top_few(self, /, k: int, *, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
        """top_k, with the greatest first and indices in i32, by k passes over the row: for a few elements of short rows."""
    def pack(self, /, layout: tuple[tuple[int, int], ...], *, shape: Any = None, name: str | None = None) -> Value:
        """x stored in padded tiles. The compiler decides where to pack; in a graph from the user, pack(x) is the same as x."""
    def quant_rows(self, ids: Operand, /, format: str, columns: int, *, shape: Any = None, name: str | None = None) -> Value:
        """Looks up and decodes rows of a quantised table, one per id: dequantize(gather(w, ids)), u8 [entries, row bytes] ->
        f32 [ids..., columns]. The table may be w or pack_quant(w)."""
    def max_pool(self, /, window: int | Sequence[int], strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), channels_last: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """The greatest element of each window of x [batch, channels, *spatial], or with channels_last [batch, *spatial,
        channels]; NaN if one is. Padding is -inf, or the least integer. Windows are `strides` apart, by default 1."""
    def max_pool_indices(self, /, window: int | Sequence[int], strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), *, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
        """max_pool of x [batch, channels, *spatial], and the i64 position of each maximum in x, row-major: of the first of
        several that are equal, or of the first NaN; -1 for a window of padding alone."""
    def avg_pool(self, /, window: int | Sequence[int], strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), count_padding: bool = False, extra: int | Sequence[int] = (0,), channels_last: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """The mean of each window, as max_pool takes them. Padding is 0, and does not count in the divisor unless
        `count_padding` says so. `extra` is more padding after each dim, which never counts: for windows that begin in the
        padding. A window in which nothing counts is NaN."""
    def lp_pool(self, /, window: int | Sequence[int], strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), p: float = 2.0, channels_last: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """The p-norm of each window, as max_pool takes them: the p-th root of the sum of |x| to the p. Padding is 0."""
    def dequantize(self, /, format: str, columns: int, *, shape: Any = None, name: str | None = None) -> Value:
        """Decodes rows of quantised blocks, u8 [..., row bytes], to f32 [..., columns]."""
    def dequant_matmul(self, packed: Operand, /, format: str, exact: bool = False, wide: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Matrix product with quantised weights: x @ dequantize(packed).T, from x [..., k] and packed [n, row bytes] to [...,
        n] in x's dtype, or in that of the sums if wide; sums are f32 (f64 for f64 x). Unless exact, the CPU rounds x to 8
        bits where it has integer dot products; for products with many rows, a CPU with AMX and a GPU round f32 x and the
        weights to bf16."""
    def pack_quant(self, /, format: str, rows: int, step: int, *, shape: Any = None, name: str | None = None) -> Value:
        """Weights of quantised blocks u8[n, row bytes], or several of these, stored as panels u8[ceil(n / rows), panel bytes]
        in the order in which a backend's dequant_matmul reads them (rlx.ir.blocks.Panel); missing rows are zeros. In a
        user's graph, the same as w."""
    def random_bits(self, counter: Operand, /, dims: Dims, *, shape: Any = None, name: str | None = None) -> Value:
        """Uniform random u32 bits of shape `dims` from a key u32 [2] and a counter u32 (); equal operands give equal bits.
        With counter 0 the bits are those of JAX for the same key."""
    def random_uniform(self, counter: Operand, /, dims: Dims, *, shape: Any = None, name: str | None = None) -> Value:
        """Uniform random f32 in [0, 1), multiples of 2^-24, from a key u32 [2] and a counter u32 ()."""
    def gumbel(self, counter: Operand, /, dims: Dims, *, shape: Any = None, name: str | None = None) -> Value:
        """Random f32 from the standard Gumbel distribution: argmax(logits + gumbel) samples from softmax(logits)."""
    def threshold(self, amount: Operand, /, weighted: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """For each row (last dim) of x, the largest element t such that at least `amount` elements are >= t or, with
        `weighted`, such that the elements >= t sum to at least `amount`; -inf if the whole row falls short. NaN is never
        counted. Nothing is sorted."""
    def sum(self, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Sum; 0 if empty. Integers wrap. Long f32 sums are computed in blocks: off by less than 2e-4, usually 1e-7, at any
        length."""
    def prod(self, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Product; 1 if empty."""
    def max(self, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Maximum; NaN if any element is NaN; of 0 and -0 either one. If empty: -inf, or the least integer."""
    def min(self, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Minimum; NaN if any element is NaN; of 0 and -0 either one. If empty: inf, or the greatest integer."""
    def any(self, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """True if any element is True; False if empty."""
    def all(self, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """True if all elements are True; True if empty."""
    def mean(self, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Arithmetic mean; NaN if empty."""
    def variance(self, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, correction: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Variance, computed in two passes; the divisor is n - correction."""
    def softmax(self, /, axis: int = -1, *, shape: Any = None, name: str | None = None) -> Value:
        """exp(x) / sum(exp(x)) along `axis`, stable: the maximum is subtracted first. A row of only -inf is NaN."""
    def log_softmax(self, /, axis: int = -1, *, shape: Any = None, name: str | None = None) -> Value:
        """log(softmax(x)) along `axis`, computed without loss of precision."""
    def gather_elements(self, indices: Operand, /, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Element by element, takes x at an index along `axis` and at its own place in all other dims, which may be fewer than
        of x. An index out of range is an IndexRangeError."""
    def scatter_elements(self, indices: Operand, updates: Operand, /, axis: int = 0, mode: Literal['replace', 'add', 'mul', 'max', 'min'] = 'replace', *, shape: Any = None, name: str | None = None) -> Value:
        """Writes each update to a copy of x, at its index along `axis` and at its own place in all other dims, which may be
        fewer than of x. `mode`: 'replace' (of several, the last one stays), or what combines it with the element there. An
        index out of range is an IndexRangeError."""
    def scatter_add(self, indices: Operand, updates: Operand, /, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Adds `updates` to a copy of x at the given indices along `axis`; updates have the dims of gather(x, indices). An
        index may repeat."""
    def update_rows(self, rows: Operand, at: Operand, /, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Replaces rows of `state` by `rows`, starting at position `at` (an integer of dims ()) along `axis`. Rows that do not
        all fit are an IndexRangeError."""
    def take_rows(self, at: Operand, /, count: int, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
        """Takes `count` rows of `state`, starting at position `at` (an integer of dims ()) along `axis`. Rows out of range are
        an IndexRangeError."""
    def valid_rows(self, extent: Operand, /, axis: int = 0, upper: int = 0, inner: int = 1, fill: Literal['0', '1', 'least', 'greatest'] = '0', guard: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
        """Replaces the rows of x from index `extent` (an integer of dims ()) on, along `axis`, by `fill`: '0', '1', or the
        'least' or 'greatest' number of the dtype."""
    def tan(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Tangent; x is in radians."""
    def asin(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Angle in -π/2 … π/2 whose sine is x; NaN if |x| > 1."""
    def acos(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Angle in 0 … π whose cosine is x; NaN if |x| > 1."""
    def atan(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Angle in -π/2 … π/2 whose tangent is x."""
    def sinh(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Hyperbolic sine."""
    def cosh(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Hyperbolic cosine."""
    def asinh(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Inverse hyperbolic sine."""
    def acosh(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Inverse hyperbolic cosine, at least 0; NaN if x < 1."""
    def atanh(self, /, *, shape: Any = None, name: str | None = None) -> Value:
        """Inverse hyperbolic tangent; NaN if |x| > 1."""
    def broadcast_to(self, /, dims: Dims, *, shape: Any = None, name: str | None = None) -> Value:
        """Broadcasts to `dims`: repeats the operand along new leading dims and along its dims of size 1."""
    def slice(self, /, starts: int | Sequence[int], stops: int | Sequence[int], steps: int | Sequence[int] | None = (), *, shape: Any = None, name: str | None = None) -> Value:
        """Slices every dim: start, stop and step as in Python's slices, negative values counted from the end."""
    def split(self, /, parts: int | Sequence[int], axis: int = 0, *, shape: Any = None, name: str | None = None) -> tuple[Value, ...]:
        """Splits along `axis` into consecutive parts: `parts` equal ones, or parts of the given sizes."""
    def squeeze(self, /, axes: int | Sequence[int], *, shape: Any = None, name: str | None = None) -> Value:
        """Removes the dims `axes`, which must be of size 1."""
    def unsqueeze(self, /, axes: int | Sequence[int], *, shape: Any = None, name: str | None = None) -> Value:
        """Inserts dims of size 1 at `axes` of the result."""
    def windows(self, /, window: int | Sequence[int], axes: int | Sequence[int], strides: int | Sequence[int] | None = (), dilation: int | Sequence[int] | None = (), *, shape: Any = None, name: str | None = None) -> Value:
        """Sliding windows along `axes`: each of these dims counts the windows, which are `strides` apart, and new last dims,
        one per axis, hold the elements of a window, which are `dilation` apart. A dim too small for a window is refused."""
    def leaky_relu(self, slope: float=0.01) -> Value: """x where x > 0, else x * slope."""
    def prelu(self, slope: Operand) -> Value: """x where x > 0, else x * slope; the slope broadcasts, and may be an operand of the same dtype."""
    def elu(self, alpha: float=1.0) -> Value: """x where x > 0, else alpha * (exp(x) - 1)."""
    def selu(self, alpha: float=1.6732632423543772, gamma: float=1.0507009873554805) -> Value: """gamma * elu(x, alpha), by default with the constants that keep mean 0 and variance 1."""
    def celu(self, alpha: float=1.0) -> Value: """x where x > 0, else alpha * (exp(x / alpha) - 1)."""
    def hard_sigmoid(self, alpha: float=1 / 6, beta: float=0.5) -> Value: """clip(alpha * x + beta, 0, 1)."""
    def hard_swish(self) -> Value: """x * hard_sigmoid(x)."""
    def swish(self, alpha: float=1.0) -> Value: """x * sigmoid(alpha * x); with 1.702 for alpha, an approximation of gelu."""
    def mish(self) -> Value: """x * tanh(softplus(x)); tanh(log(1 + u)) is (u * u + 2 * u) / (u * u + 2 * u + 2), here with powers of exp(-|x|) <= 1."""
    def softsign(self) -> Value: """x / (1 + |x|)."""
    def shrink(self, threshold: float=0.5, bias: float=0.0) -> Value: """x moved towards zero by `bias`; 0 where |x| <= threshold."""
    def thresholded_relu(self, threshold: float=1.0) -> Value: """x where x > threshold, else 0."""
    def full_like(self, value: Operand, dtype: DType | str | None=None) -> Value: ...
    def zeros_like(self, dtype: DType | str | None=None) -> Value: ...
    def ones_like(self, dtype: DType | str | None=None) -> Value: ...
    def expand_dims(self, axis: int | Sequence[int]) -> Value: """New dims of 1 at these axes of the result."""
    def swapaxes(self, axis1: int, axis2: int) -> Value: ...
    def moveaxis(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Value: ...
    def flip(self, axis: int | Sequence[int] | None=None) -> Value: """The elements in reverse order along the axes; of all axes: None."""
    def roll(self, shift: int | Sequence[int], axis: int | Sequence[int] | None=None) -> Value: """The elements moved by `shift` along the axes, those past the end at the start; without axes: in row-major order."""
    def tile(self, repeats: int | Sequence[int]) -> Value: """The whole of x, `repeats` times along each axis."""
    def repeat(self, repeats: int, axis: int | None=None) -> Value: """Each element (along the axis) `repeats` times; without an axis: of x as one row."""
    def tril(self, k: int=0) -> Value: """Zeros above diagonal k of the last two dims."""
    def triu(self, k: int=0) -> Value: """Zeros below diagonal k of the last two dims."""
    def square(self) -> Value: ...
    def log2(self) -> Value: ...
    def log10(self) -> Value: ...
    def isinf(self, negative: bool=True, positive: bool=True) -> Value: """True at infinities: of both signs, or of one."""
    def isfinite(self) -> Value: """False for NaN and both infinities."""
    def logaddexp(self, y: Operand) -> Value: """log(exp(x) + exp(y)) without overflow. As in numpy for equal infinities."""
    def var(self, axis: int | Sequence[int] | None=None, keepdims: bool=False, ddof: int=0) -> Value: """The mean square distance from the mean; of n elements, the sum over n - ddof."""
    def std(self, axis: int | Sequence[int] | None=None, keepdims: bool=False, ddof: int=0) -> Value: """The square root of rlx.var."""
    def outer(self, y: Operand) -> Value: """Every product of an element of x and one of y: [x.size, y.size]."""
    def dot(self, y: Operand) -> Value: """numpy's dot: a product by a number, or the sum over the last dim of x and the last but one of y."""
    def tensordot(self, y: Operand, axes: int | tuple[Sequence[int], Sequence[int]]=2) -> Value: """The sum of products over pairs of axes; over the last n of x and the first n of y: `axes=n`."""
    def det(self) -> Value: ...
    def resize(self, dims: int | Sequence[int], axes: int | Sequence[int] | None=None, scales: Sequence[float] | None=None, mode: str='linear', coordinates: str='half_pixel', rounding: str='round_prefer_floor', cubic: float=-0.75, exclude_outside: bool=False, antialias: bool=False, box: Sequence[tuple[float, float]] | None=None, outside: float=0.0) -> Value: ...
    def grid_sample(self, grid: Operand, mode: Literal['nearest', 'linear', 'cubic']='linear', padding: Literal['zeros', 'border', 'reflection']='zeros', align_corners: bool=False) -> Value: ...
    def affine_grid(self, dims: int | Sequence[int], align_corners: bool=False) -> Value: """The grid [batch, *dims, rank] for grid_sample of the affine maps x [batch, rank, rank + 1]."""
    def roi_align(self, boxes: Operand, batch: Operand, dims: Sequence[int], samples: int, scale: float=1.0, mode: Literal['mean', 'max']='mean', half_pixel: bool=True) -> Value: ...
    def deform_conv(self, w: Operand, offset: Operand, mask: Operand | None=None, bias: Operand | None=None, strides: int | Sequence[int]=1, low: int | Sequence[int]=0, high: int | Sequence[int]=0, dilation: int | Sequence[int]=1, groups: int=1, offset_groups: int=1) -> Value: ...
    def gather_nd(self, indices: Operand, batch_dims: int=0) -> Value: ...
    def scatter_nd(self, indices: Operand, updates: Operand, mode: Literal['replace', 'add', 'mul', 'max', 'min']='replace') -> Value: ...
    def one_hot(self, depth: int, axis: int=-1, on: Operand=1, off: Operand=0, dtype: DType | str='f32') -> Value: """`on` where the index along a new axis is x, else `off`; of an x outside 0 … depth-1, `off` everywhere."""
    def reverse_sequence(self, lengths: Operand, axis: int=0, batch_axis: int=1) -> Value: """Along `axis`, the first `lengths[b]` elements of batch entry b in reverse order, and the others as they are."""
    def nonzero(self, size: int | None=None) -> tuple[Value, Value]: ...
    def compress(self, condition: Operand, axis: int | None=None, size: int | None=None) -> tuple[Value, Value]: ...
    def unique(self, axis: int | None=None, sorted: bool=True, size: int | None=None) -> tuple[Value, Value, Value, Value, Value]: ...
    def depth_to_space(self, block: int, order: Literal['dcr', 'crd']='dcr') -> Value: ...
    def space_to_depth(self, block: int, order: Literal['dcr', 'crd']='dcr') -> Value: """x [batch, channels, height, width] with each block of pixels moved into the channels, in the order of depth_to_space."""
    def center_crop_pad(self, dims: int | Sequence[int], axes: int | Sequence[int] | None=None) -> Value: """x with these dims: the centre of it, or it in the centre of zeros. Of an odd difference, the larger part is at the end."""
    def instance_norm(self, scale: Operand, bias: Operand, eps: float=1e-05) -> Value: """Each channel of each sample of x [batch, channels, …], normalised on its own; scale and bias are per channel."""
    def lp_normalize(self, p: int=2, axis: int=-1) -> Value: """x divided by its norm along the axis: of absolute values (p = 1) or squares (p = 2). Lines of norm 0 stay zeros."""
    def local_response_norm(self, size: int, alpha: float=0.0001, beta: float=0.75, k: float=1.0) -> Value: ...
    def nll_loss(self, labels: Operand, weight: Operand | None=None, ignore: int | None=None, reduction: Literal['none', 'sum', 'mean']='mean') -> Value: ...
    def cross_entropy(self, labels: Operand, weight: Operand | None=None, ignore: int | None=None, reduction: Literal['none', 'sum', 'mean']='mean') -> Value: """nll_loss of log_softmax(x [batch, classes, …])."""
    def lstm(self, w: Value, r: Value, b: Value | None=None, sequence_lens: Value | None=None, initial_h: Value | None=None, initial_c: Value | None=None, p: Value | None=None, *, input_forget: bool=False, direction: Literal['forward', 'reverse', 'bidirectional']='forward', activations: Sequence[str] | None=None, alpha: Sequence[float]=(), beta: Sequence[float]=(), clip: float | None=None, layout: int=0) -> tuple[Value, Value, Value]: ...
    def gru(self, w: Value, r: Value, b: Value | None=None, sequence_lens: Value | None=None, initial_h: Value | None=None, *, linear_before_reset: bool=False, direction: Literal['forward', 'reverse', 'bidirectional']='forward', activations: Sequence[str] | None=None, alpha: Sequence[float]=(), beta: Sequence[float]=(), clip: float | None=None, layout: int=0) -> tuple[Value, Value]: ...
    def rnn(self, w: Value, r: Value, b: Value | None=None, sequence_lens: Value | None=None, initial_h: Value | None=None, *, direction: Literal['forward', 'reverse', 'bidirectional']='forward', activations: Sequence[str] | None=None, alpha: Sequence[float]=(), beta: Sequence[float]=(), clip: float | None=None, layout: int=0) -> tuple[Value, Value]: ...
    def dft(self, axis: int=-2, length: int | None=None, inverse: bool=False, onesided: bool=False) -> Value: ...
    def stft(self, step: int, window: Operand | None=None, length: int | None=None, onesided: bool=True) -> Value: ...
