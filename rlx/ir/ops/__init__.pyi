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

def log1p(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Natural logarithm of 1 + x, accurate near 0."""
def expm1(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """exp(x) - 1, accurate near 0."""
def relu(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """max(x, 0)."""
def sigmoid(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """1 / (1 + exp(-x))."""
def silu(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x * sigmoid(x)."""
def softplus(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """log(1 + exp(x))."""
def gelu(x: Operand, /, approximate: Literal['none', 'tanh'] = 'none', *, shape: Any = None, name: str | None = None) -> Value:
    """x * Φ(x), with Φ the standard normal CDF. `approximate`: 'none' (exact, with erf) or 'tanh' (the tanh formula)."""
def clip(x: Operand, /, low: float = ..., high: float = ..., *, shape: Any = None, name: str | None = None) -> Value:
    """min(max(x, low), high); NaN stays NaN. Either bound may be omitted."""
def attention(q: Operand, k: Operand, v: Operand, *operands: Operand, scale: float = 0.0, mask: Literal['none', 'causal', 'sliding_window', 'custom', 'bias'] = 'none', window: int = 0, positioned: bool = False, cap: float = 0.0, shape: Any = None, name: str | None = None) -> Value:
    """Scaled dot-product attention: softmax(q @ kᵀ * scale + mask) @ v over [batch, heads, sequence, head_dim]. With grouped
    heads, k and v have fewer heads, each shared by the same number of consecutive query heads. k and v may be f16 or bf16
    with any dtype of q; the result has q's dtype. A fully masked row gives zeros. With `positioned`, the last operand,
    start ([] or [batch]), is the position of the first query; k and v may be a whole KV cache, and keys past the last query
    are ignored. A query past the last key is an IndexRangeError."""
def attention_parts(q: Operand, k: Operand, v: Operand, *operands: Operand, scale: float = 0.0, mask: Literal['none', 'causal', 'sliding_window', 'custom', 'bias'] = 'none', window: int = 0, positioned: bool = False, cap: float = 0.0, parts: int = 2, block: int = 1, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
    """Split-key attention: the partial result for each part of the keys, [parts, batch, heads, sequence, head_dim] (zeros
    where a part has no visible key), and its logsumexp, [parts, batch, heads, sequence], used to merge the parts."""
def rope(x: Operand, positions: Operand, /, theta: float = 10000.0, interleaved: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Rotary position embedding: rotates pair i of x [..., sequence, head_dim] by position * theta ** (-2i / head_dim)
    radians. positions: [sequence], or [batch, sequence] where dim 0 of x is the batch."""
def non_max_suppression(boxes: Operand, scores: Operand, /, most: int, overlap: float = 0.5, least: float = ..., *, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
    """The best of boxes [batch, n, 4], each of two opposite corners, by scores [batch, classes, n]: (ids i64 [batch, classes,
    min(most, n)], best first, then -1; their number i64 [batch, classes]). Of two boxes that overlap too much, the one with
    the lower score goes."""
def exchange(x: Operand, /, what: Literal['all_reduce', 'all_gather', 'reduce_scatter', 'broadcast', 'all_to_all', 'rank_part'], ranks: int, kind: Literal['sum', 'mean', 'max', 'min'] = 'sum', root: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """The core collective, on row-major operands. all_gather adds a leading dim of size `ranks`, all_to_all keeps it,
    reduce_scatter and rank_part (which moves no data) remove it; all_reduce and broadcast keep the operand's dims."""
def all_reduce(x: Operand, /, ranks: int, kind: Literal['sum', 'mean', 'max', 'min'] = 'sum', *, shape: Any = None, name: str | None = None) -> Value:
    """Combines the operands of all ranks elementwise in rank order (sum, mean, max or min) and gives every rank the result.
    16-bit and 8-bit floats are summed in f32 and integers in 64 bits; a mean of integers is truncated."""
def all_gather(x: Operand, /, ranks: int, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Concatenates the operands of all ranks along `axis` in rank order, on every rank."""
def reduce_scatter(x: Operand, /, ranks: int, axis: int = 0, kind: Literal['sum', 'mean', 'max', 'min'] = 'sum', *, shape: Any = None, name: str | None = None) -> Value:
    """Splits the all_reduce result into equal parts along `axis` and gives part r to rank r."""
def broadcast_rank(x: Operand, /, ranks: int, root: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Copies the operand of rank `root` to every rank."""
def all_to_all(x: Operand, /, ranks: int, split_axis: int = 0, concat_axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Splits every rank's operand into equal parts along `split_axis` and sends part r to rank r, which concatenates the
    received parts along `concat_axis` in rank order."""
def rank_slice(x: Operand, /, ranks: int, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Splits the operand into equal parts along `axis` and keeps part r on rank r. No data moves between ranks."""
def view_as_real(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """A view of c64 [...] as f32 [..., 2]: real and imaginary parts."""
def view_as_complex(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """A view of f32 [..., 2] as c64 [...]: the last dim holds the real and imaginary parts."""
def real(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """The real part of c64, f32."""
def imag(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """The imaginary part of c64, f32."""
def conj(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Complex conjugate."""
def complex(re: Operand, im: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """A c64 tensor from its real and imaginary parts, both f32."""
def matmul(a: Operand, b: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Matrix product as numpy's matmul: [..., m, k] @ [..., k, n], batch dims broadcast. 16-bit floats accumulate in f32;
    integers wrap. Mixed float dtypes give the dtype that holds both (f32 if neither does), 8-bit floats f32; a narrow
    weight is read in its own dtype."""
def int8_matmul(a: Operand, b: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Matrix product of u8 by i8 in i32. Sums wrap; they are exact up to a depth of 65,000."""
def flatten_matmul(a: Operand, b: Operand, /, axes: int, batch: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Matrix product of a, with its last `axes` dims as one, and b: [batch, rows, k] by [batch, k, columns], with `batch`
    leading dims in both and any number of dims of rows. The flattened dims need no common stride: windows are read where
    they lie. The dtypes are those of matmul; u8 with i8 gives i32."""
def linear(x: Operand, w: Operand, b: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x @ w + b, with w [in, out] and an optional bias b [out]."""
def branch(*operands: Operand | Sequence[Operand], then_body: Body, else_body: Body, shape: Any = None, name: str | None = None) -> Value:
    """The results of one of two bodies on the operands behind the condition, a bool (). rlx.cond makes it."""
def loop(*operands: Operand | Sequence[Operand], body: Body, carried: int = 0, limit: int = -1, tests: bool = False, shape: Any = None, name: str | None = None) -> tuple[Value, Value, Value]:
    """Repeats `body` on the first `carried` operands, at most `limit` times and, with `tests`, while the first of them holds.
    Results: the number of iterations, the carried values, and the rows of the body's further results, [limit, ...] (zeros
    behind the last iteration). rlx.while_loop and rlx.scan make it."""
def conv(x: Operand, w: Operand, b: Operand, /, strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), groups: int = 1, channels_last: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Convolution (cross-correlation) over 1 to 3 spatial dims: x [batch, channels, *spatial], w [out, channels / groups,
    *window], an optional bias b [out]; with channels_last x [batch, *spatial, channels] and w [*window, channels / groups,
    out]. `low` and `high` are the zeros before and after each spatial dim. The dtypes are those of matmul; u8 with i8
    weights gives i32. Narrow floats are summed in f32."""
def conv_transpose(x: Operand, w: Operand, b: Operand, /, strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), groups: int = 1, channels_last: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Transposed convolution over 1 to 3 spatial dims: x [batch, channels, *spatial], w [channels, out / groups, *window], an
    optional bias b [out]; with channels_last x [batch, *spatial, channels] and w [*window, channels, out / groups]. The
    windows that it adds up are `strides` apart. `low` and `high` elements are cut off before and after each spatial dim; a
    negative number adds elements, which have the bias alone. The dtypes are those of conv."""
def neg(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Negation; unsigned integers wrap."""
def abs(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Absolute value; the least signed integer is unchanged. For c64: the magnitude as f32, without intermediate overflow."""
def sqrt(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Square root; NaN for negative x."""
def rsqrt(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Reciprocal of the square root, 1 / sqrt(x)."""
def reciprocal(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Reciprocal, 1 / x."""
def exp(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Exponential, e**x."""
def log(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Natural logarithm; NaN for negative x, -inf at 0."""
def sin(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Sine; x is in radians."""
def cos(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Cosine; x is in radians."""
def tanh(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Hyperbolic tangent."""
def erf(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Error function."""
def floor(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Rounds down to an integer."""
def ceil(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Rounds up to an integer."""
def round(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Rounds to the nearest integer, ties to even."""
def trunc(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Rounds toward zero to an integer."""
def sign(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Sign of x: -1, 0 or 1; -0.0 and NaN are kept."""
def is_nan(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """True where x is NaN."""
def logical_not(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Logical NOT."""
def bitwise_not(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Bitwise NOT."""
def add(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x + y; integers wrap."""
def sub(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x - y; integers wrap."""
def mul(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x * y; integers wrap."""
def div(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Quotient x / y. Integer division truncates toward zero, and x / 0 is 0."""
def rem(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Remainder with the sign of x, as C's fmod; for integers x rem 0 is 0."""
def mod(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Remainder with the sign of y, as Python's %; for integers x mod 0 is 0."""
def floor_div(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """floor(x / y); integers: x // 0 is 0."""
def pow(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x**y, as C's pow: NaN for negative x and fractional y, 1 where y is 0 or x is 1."""
def maximum(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Elementwise maximum; NaN if either operand is NaN. Of 0 and -0 either one."""
def minimum(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Elementwise minimum; NaN if either operand is NaN. Of 0 and -0 either one."""
def less(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x < y; False if either is NaN."""
def less_equal(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x <= y; False if either is NaN."""
def equal(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x == y; False with a NaN."""
def not_equal(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x != y; True if either is NaN."""
def logical_and(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Logical AND."""
def logical_or(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Logical OR."""
def logical_xor(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Logical XOR."""
def bitwise_and(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Bitwise AND."""
def bitwise_or(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Bitwise OR."""
def bitwise_xor(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Bitwise XOR."""
def shift_left(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Left shift, x << y; a count outside 0 … bits-1 gives 0."""
def shift_right(x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Right shift, x >> y: arithmetic for signed x, else logical. A count outside 0 … bits-1 gives 0, or -1 where x < 0."""
def multiply_add(x: Operand, y: Operand, z: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """x * y + z, rounded twice. As a single op it is fused into the producer of z, even where x * y alone would not be."""
def where(condition: Operand, x: Operand, y: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Elements of x where the condition is True, else of y; the three operands broadcast together."""
def cast(x: Operand, /, dtype: DType | str, *, shape: Any = None, name: str | None = None) -> Value:
    """Converts to another dtype. Float to integer truncates and saturates (NaN gives 0); to bool is x != 0; c64 to real drops
    the imaginary part."""
def bitcast(x: Operand, /, dtype: DType | str, *, shape: Any = None, name: str | None = None) -> Value:
    """The same bits as another dtype of equal size. A NaN of 16 or 8 bits may become another NaN."""
def router(ids: Operand, /, experts: int, ahead: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Marks the choice of experts, i32 [tokens, k]: the result is ids, in memory of its own, where the runtime finds it after
    a run. `route` has one inside."""
def route(scores: Operand, *more: Operand, k: int, scoring: Literal['softmax', 'top_k_softmax', 'sigmoid'] = 'softmax', renormalise: bool = False, scale: float = 1.0, groups: int = 1, top_groups: int = 1, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
    """Chooses k experts for each token by scores [tokens, experts]: (ids i32 [tokens, k], best first; their weights [tokens,
    k]). A bias [experts] is added to the softmax or sigmoid for the choice, and not to the weights. Ties are ordered by id.
    A guess of what the next router will choose, i32 [tokens, k], is kept beside the choice for the runtime."""
def group_rows(ids: Operand, /, groups: int, *, shape: Any = None, name: str | None = None) -> tuple[Value, Value, Value]:
    """Groups rows by id, i32 [rows]: (order i32 [rows]: the row at each place, stable; place i32 [rows]: its inverse; ends i32
    [groups]: the end of each group). An id is below `groups`, or 2**31 - 1: a row of no group, which comes last. Other ids
    are an IndexRangeError."""
def group_ends(sizes: Operand, /, rows: int, *, shape: Any = None, name: str | None = None) -> Value:
    """Ends of groups, i32 [groups], from their sizes. Sizes below 0, or that do not sum to `rows`, are an IndexRangeError."""
def segment_matmul(x: Operand, w: Operand, ends: Operand, /, format: str = '', exact: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Product of groups of rows with a matrix each: rows ends[g - 1] to ends[g] of x [rows, k] times w[g] of w [groups, k, n];
    the last group has all rows that are left. `ends`, i32 [groups], must ascend. With a `format`, the weights are quantised
    blocks, u8 [groups, n, row bytes], as in dequant_matmul."""
def grouped_matmul(x: Operand, w: Operand, ends: Operand, /, format: str = '', exact: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Product of groups of rows with a matrix each: the first sizes[0] rows of x [rows, k] times w[0], the next sizes[1] times
    w[1], and so on, with w [groups, k, n] and sizes i32 [groups]; a group may be empty. Sizes that do not sum to the rows
    are an IndexRangeError. `format`: as in segment_matmul."""
def gather(x: Operand, indices: Operand, /, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Takes slices of x along `axis`, one per index; the result has dims x[:axis] + indices + x[axis+1:]. An index below 0 or
    not below the dim is an IndexRangeError on every backend if a result depends on its row; else it may or may not be one."""
def embedding(table: Operand, ids: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Looks up rows of a table [entries, width], one per id."""
def concat(*operands: Operand | Sequence[Operand], axis: int = 0, shape: Any = None, name: str | None = None) -> Value:
    """Concatenates the operands along `axis`."""
def pad(x: Operand, /, low: int | Sequence[int], high: int | Sequence[int], value: float = 0.0, *, shape: Any = None, name: str | None = None) -> Value:
    """Pads every dim with `value`: `low` elements before and `high` elements after."""
def iota(dims: Dims, axis: int = 0, dtype: DType | str = ..., *, shape: Any = None, name: str | None = None) -> Value:
    """A tensor of shape `dims` whose elements are their index along `axis`."""
def copy(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """A row-major copy of x, made at every run: never a view of x, and its memory is not shared."""
def layer_norm(x: Operand, *affine: Operand, axis: int = -1, eps: float = 1e-05, shape: Any = None, name: str | None = None) -> Value:
    """Layer normalisation over the dims from `axis` to the last: (x - mean) / sqrt(variance + eps) * scale + bias."""
def rms_norm(x: Operand, *affine: Operand, axis: int = -1, eps: float = 1e-06, shape: Any = None, name: str | None = None) -> Value:
    """RMS normalisation over the dims from `axis` to the last: x / sqrt(mean(x²) + eps) * scale."""
def group_norm(x: Operand, *affine: Operand, groups: int, eps: float = 1e-05, shape: Any = None, name: str | None = None) -> Value:
    """Group normalisation of x [batch, channels, …] over each group of channels and all later dims; scale and bias are per
    channel."""
def batch_norm(x: Operand, scale: Operand, bias: Operand, mean: Operand, variance: Operand, /, axis: int = 1, eps: float = 1e-05, *, shape: Any = None, name: str | None = None) -> Value:
    """Batch normalisation with known statistics, each [x.dims[axis]]: (x - mean) / sqrt(variance + eps) * scale + bias."""
def argmax(x: Operand, /, axis: int = -1, keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Index (i64) of the greatest element along `axis`: the first on ties, the first NaN if there is one."""
def argmin(x: Operand, /, axis: int = -1, keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Index (i64) of the least element along `axis`: the first on ties, the first NaN if there is one."""
def cumsum(x: Operand, /, axis: int = -1, exclusive: bool = False, reverse: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Cumulative sum along `axis`, inclusive unless `exclusive`; integers wrap."""
def cumprod(x: Operand, /, axis: int = -1, exclusive: bool = False, reverse: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Cumulative product along `axis`, inclusive unless `exclusive`; integers wrap."""
def sort(x: Operand, /, descending: bool = False, *, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
    """Stable sort along the last dim: the sorted elements and their original indices (i64)."""
def argsort(x: Operand, /, descending: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Indices (i64) that sort the last dim; the sort is stable."""
def top_k(x: Operand, /, k: int, largest: bool = True, *, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
    """The k largest (or smallest) elements along the last dim, sorted, and their indices (i64); ties are ordered by index."""
def top_few(x: Operand, /, k: int, *, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
    """top_k, with the greatest first and indices in i32, by k passes over the row: for a few elements of short rows."""
def pack(x: Operand, /, layout: tuple[tuple[int, int], ...], *, shape: Any = None, name: str | None = None) -> Value:
    """x stored in padded tiles. The compiler decides where to pack; in a graph from the user, pack(x) is the same as x."""
def quant_rows(w: Operand, ids: Operand, /, format: str, columns: int, *, shape: Any = None, name: str | None = None) -> Value:
    """Looks up and decodes rows of a quantised table, one per id: dequantize(gather(w, ids)), u8 [entries, row bytes] -> f32
    [ids..., columns]. The table may be w or pack_quant(w)."""
def max_pool(x: Operand, /, window: int | Sequence[int], strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), channels_last: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """The greatest element of each window of x [batch, channels, *spatial], or with channels_last [batch, *spatial, channels];
    NaN if one is. Padding is -inf, or the least integer. Windows are `strides` apart, by default 1."""
def max_pool_indices(x: Operand, /, window: int | Sequence[int], strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), *, shape: Any = None, name: str | None = None) -> tuple[Value, Value]:
    """max_pool of x [batch, channels, *spatial], and the i64 position of each maximum in x, row-major: of the first of several
    that are equal, or of the first NaN; -1 for a window of padding alone."""
def avg_pool(x: Operand, /, window: int | Sequence[int], strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), count_padding: bool = False, extra: int | Sequence[int] = (0,), channels_last: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """The mean of each window, as max_pool takes them. Padding is 0, and does not count in the divisor unless `count_padding`
    says so. `extra` is more padding after each dim, which never counts: for windows that begin in the padding. A window in
    which nothing counts is NaN."""
def lp_pool(x: Operand, /, window: int | Sequence[int], strides: int | Sequence[int] = (1,), low: int | Sequence[int] = (0,), high: int | Sequence[int] = (0,), dilation: int | Sequence[int] = (1,), p: float = 2.0, channels_last: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """The p-norm of each window, as max_pool takes them: the p-th root of the sum of |x| to the p. Padding is 0."""
def dequantize(packed: Operand, /, format: str, columns: int, *, shape: Any = None, name: str | None = None) -> Value:
    """Decodes rows of quantised blocks, u8 [..., row bytes], to f32 [..., columns]."""
def dequant_matmul(x: Operand, packed: Operand, /, format: str, exact: bool = False, wide: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Matrix product with quantised weights: x @ dequantize(packed).T, from x [..., k] and packed [n, row bytes] to [..., n]
    in x's dtype, or in that of the sums if wide; sums are f32 (f64 for f64 x). Unless exact, the CPU rounds x to 8 bits
    where it has integer dot products; for products with many rows, a CPU with AMX and a GPU round f32 x and the weights to
    bf16."""
def pack_quant(w: Operand, /, format: str, rows: int, step: int, *, shape: Any = None, name: str | None = None) -> Value:
    """Weights of quantised blocks u8[n, row bytes], or several of these, stored as panels u8[ceil(n / rows), panel bytes] in
    the order in which a backend's dequant_matmul reads them (rlx.ir.blocks.Panel); missing rows are zeros. In a user's
    graph, the same as w."""
def random_bits(key: Operand, counter: Operand, /, dims: Dims, *, shape: Any = None, name: str | None = None) -> Value:
    """Uniform random u32 bits of shape `dims` from a key u32 [2] and a counter u32 (); equal operands give equal bits. With
    counter 0 the bits are those of JAX for the same key."""
def random_uniform(key: Operand, counter: Operand, /, dims: Dims, *, shape: Any = None, name: str | None = None) -> Value:
    """Uniform random f32 in [0, 1), multiples of 2^-24, from a key u32 [2] and a counter u32 ()."""
def gumbel(key: Operand, counter: Operand, /, dims: Dims, *, shape: Any = None, name: str | None = None) -> Value:
    """Random f32 from the standard Gumbel distribution: argmax(logits + gumbel) samples from softmax(logits)."""
def threshold(x: Operand, amount: Operand, /, weighted: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """For each row (last dim) of x, the largest element t such that at least `amount` elements are >= t or, with `weighted`,
    such that the elements >= t sum to at least `amount`; -inf if the whole row falls short. NaN is never counted. Nothing
    is sorted."""
def sum(x: Operand, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Sum; 0 if empty. Integers wrap. Long f32 sums are computed in blocks: off by less than 2e-4, usually 1e-7, at any
    length."""
def prod(x: Operand, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Product; 1 if empty."""
def max(x: Operand, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Maximum; NaN if any element is NaN; of 0 and -0 either one. If empty: -inf, or the least integer."""
def min(x: Operand, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Minimum; NaN if any element is NaN; of 0 and -0 either one. If empty: inf, or the greatest integer."""
def any(x: Operand, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """True if any element is True; False if empty."""
def all(x: Operand, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """True if all elements are True; True if empty."""
def mean(x: Operand, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Arithmetic mean; NaN if empty."""
def variance(x: Operand, /, axis: int | Sequence[int] | None = (), keepdims: bool = False, correction: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Variance, computed in two passes; the divisor is n - correction."""
def softmax(x: Operand, /, axis: int = -1, *, shape: Any = None, name: str | None = None) -> Value:
    """exp(x) / sum(exp(x)) along `axis`, stable: the maximum is subtracted first. A row of only -inf is NaN."""
def log_softmax(x: Operand, /, axis: int = -1, *, shape: Any = None, name: str | None = None) -> Value:
    """log(softmax(x)) along `axis`, computed without loss of precision."""
def gather_elements(x: Operand, indices: Operand, /, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Element by element, takes x at an index along `axis` and at its own place in all other dims, which may be fewer than of
    x. An index out of range is an IndexRangeError."""
def scatter_elements(x: Operand, indices: Operand, updates: Operand, /, axis: int = 0, mode: Literal['replace', 'add', 'mul', 'max', 'min'] = 'replace', *, shape: Any = None, name: str | None = None) -> Value:
    """Writes each update to a copy of x, at its index along `axis` and at its own place in all other dims, which may be fewer
    than of x. `mode`: 'replace' (of several, the last one stays), or what combines it with the element there. An index out
    of range is an IndexRangeError."""
def scatter_add(x: Operand, indices: Operand, updates: Operand, /, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Adds `updates` to a copy of x at the given indices along `axis`; updates have the dims of gather(x, indices). An index
    may repeat."""
def update_rows(state: Operand, rows: Operand, at: Operand, /, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Replaces rows of `state` by `rows`, starting at position `at` (an integer of dims ()) along `axis`. Rows that do not all
    fit are an IndexRangeError."""
def take_rows(state: Operand, at: Operand, /, count: int, axis: int = 0, *, shape: Any = None, name: str | None = None) -> Value:
    """Takes `count` rows of `state`, starting at position `at` (an integer of dims ()) along `axis`. Rows out of range are an
    IndexRangeError."""
def valid_rows(x: Operand, extent: Operand, /, axis: int = 0, upper: int = 0, inner: int = 1, fill: Literal['0', '1', 'least', 'greatest'] = '0', guard: bool = False, *, shape: Any = None, name: str | None = None) -> Value:
    """Replaces the rows of x from index `extent` (an integer of dims ()) on, along `axis`, by `fill`: '0', '1', or the 'least'
    or 'greatest' number of the dtype."""
def tan(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Tangent; x is in radians."""
def asin(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Angle in -π/2 … π/2 whose sine is x; NaN if |x| > 1."""
def acos(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Angle in 0 … π whose cosine is x; NaN if |x| > 1."""
def atan(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Angle in -π/2 … π/2 whose tangent is x."""
def sinh(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Hyperbolic sine."""
def cosh(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Hyperbolic cosine."""
def asinh(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Inverse hyperbolic sine."""
def acosh(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Inverse hyperbolic cosine, at least 0; NaN if x < 1."""
def atanh(x: Operand, /, *, shape: Any = None, name: str | None = None) -> Value:
    """Inverse hyperbolic tangent; NaN if |x| > 1."""
def reshape(x: Operand, /, dims: Dims, *, shape: Any = None, name: str | None = None) -> Value:
    """The same elements in row-major order with new dims; one of them may be -1 (inferred)."""
def transpose(x: Operand, /, axes: int | Sequence[int] | None = (), *, shape: Any = None, name: str | None = None) -> Value:
    """Permutes the dims: result dim i is operand dim axes[i]. Without axes, reverses them."""
def broadcast_to(x: Operand, /, dims: Dims, *, shape: Any = None, name: str | None = None) -> Value:
    """Broadcasts to `dims`: repeats the operand along new leading dims and along its dims of size 1."""
def slice(x: Operand, /, starts: int | Sequence[int], stops: int | Sequence[int], steps: int | Sequence[int] | None = (), *, shape: Any = None, name: str | None = None) -> Value:
    """Slices every dim: start, stop and step as in Python's slices, negative values counted from the end."""
def split(x: Operand, /, parts: int | Sequence[int], axis: int = 0, *, shape: Any = None, name: str | None = None) -> tuple[Value, ...]:
    """Splits along `axis` into consecutive parts: `parts` equal ones, or parts of the given sizes."""
def squeeze(x: Operand, /, axes: int | Sequence[int], *, shape: Any = None, name: str | None = None) -> Value:
    """Removes the dims `axes`, which must be of size 1."""
def unsqueeze(x: Operand, /, axes: int | Sequence[int], *, shape: Any = None, name: str | None = None) -> Value:
    """Inserts dims of size 1 at `axes` of the result."""
def windows(x: Operand, /, window: int | Sequence[int], axes: int | Sequence[int], strides: int | Sequence[int] | None = (), dilation: int | Sequence[int] | None = (), *, shape: Any = None, name: str | None = None) -> Value:
    """Sliding windows along `axes`: each of these dims counts the windows, which are `strides` apart, and new last dims, one
    per axis, hold the elements of a window, which are `dilation` apart. A dim too small for a window is refused."""

OWN: frozenset[OpDef]
astype = cast
take = gather

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "all",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "any",
    "argmax",
    "argmin",
    "argsort",
    "asin",
    "asinh",
    "astype",
    "atan",
    "atanh",
    "attention",
    "attention_parts",
    "avg_pool",
    "batch_norm",
    "bitcast",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "branch",
    "broadcast_rank",
    "broadcast_to",
    "cast",
    "ceil",
    "clip",
    "complex",
    "concat",
    "conj",
    "conv",
    "conv_transpose",
    "copy",
    "cos",
    "cosh",
    "cumprod",
    "cumsum",
    "dequant_matmul",
    "dequantize",
    "div",
    "embedding",
    "equal",
    "erf",
    "exchange",
    "exp",
    "expm1",
    "flatten_matmul",
    "floor",
    "floor_div",
    "gather",
    "gather_elements",
    "gelu",
    "group_ends",
    "group_norm",
    "group_rows",
    "grouped_matmul",
    "gumbel",
    "imag",
    "int8_matmul",
    "iota",
    "is_nan",
    "layer_norm",
    "less",
    "less_equal",
    "linear",
    "log",
    "log1p",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "loop",
    "lp_pool",
    "matmul",
    "max",
    "max_pool",
    "max_pool_indices",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mod",
    "mul",
    "multiply_add",
    "neg",
    "non_max_suppression",
    "not_equal",
    "pack",
    "pack_quant",
    "pad",
    "pow",
    "prod",
    "quant_rows",
    "random_bits",
    "random_uniform",
    "rank_slice",
    "real",
    "reciprocal",
    "reduce_scatter",
    "relu",
    "rem",
    "reshape",
    "rms_norm",
    "rope",
    "round",
    "route",
    "router",
    "rsqrt",
    "scatter_add",
    "scatter_elements",
    "segment_matmul",
    "shift_left",
    "shift_right",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "slice",
    "softmax",
    "softplus",
    "sort",
    "split",
    "sqrt",
    "squeeze",
    "sub",
    "sum",
    "take",
    "take_rows",
    "tan",
    "tanh",
    "threshold",
    "top_few",
    "top_k",
    "transpose",
    "trunc",
    "unsqueeze",
    "update_rows",
    "valid_rows",
    "variance",
    "view_as_complex",
    "view_as_real",
    "where",
    "windows",
]
