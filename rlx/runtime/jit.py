"""rlx.jit: a Python function on values becomes a compiled function of arrays.

The first call with arguments of new dims, dtypes or structure traces the function once on values, which builds a graph, and
compiles it. Later calls run the executable. If all arguments are arrays, machine code compares their dtypes and dims with
those of the preceding call; everything else is decided here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial, update_wrapper
from itertools import zip_longest
from typing import Any, NamedTuple, overload
from weakref import ref

import numpy as np

from rlx import knobs
from rlx.compiler.options import CompileOptions
from rlx.driver.device import Device
from rlx.driver.foreign import DLPACK_CPU, detached, on_host
from rlx.errors import BindingError, GraphError, OptionError, items, known, unmasked
from rlx.forks import Lock
from rlx.ir.dtype import DType, as_dtype
from rlx.ir.graph import Graph, Value, constant
from rlx.ir.node import TRACING
from rlx.ir.pytree import LEAF, Tree, flatten
from rlx.ir.shape import Dim, DimLike, Shape
from rlx.records import record
from rlx.runtime.buckets import BucketedGraph
from rlx.runtime.calls import positional
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session, with_more

Function = Callable[..., Any]
DEFAULT = object()  # stands for the value of a parameter that was not given
REMEMBERED = 64  # compiled functions of a Jitted; the oldest is dropped first


class Signature(NamedTuple):
    """A compiled function is reused if all of this is equal."""

    static: tuple[tuple[str, object, object], ...]  # name, value, and its distinction from equal values (_exact)
    trees: tuple[tuple[str, Tree], ...]
    leaves: tuple[tuple[DType, tuple[DimLike, ...]], ...]
    binding: tuple[tuple[str, int], ...] = ()  # of the named dims; the graph is the same without it
    numbers: tuple[int, ...] = ()  # the leaves that are an int or a float of Python


@record
class _Traced:
    graph: Graph
    tree: Tree  # of the results
    donated: tuple[tuple[int, int], ...]  # (leaf of the arguments, output that takes its memory)


@record
class _Compiled(_Traced):
    compiled: CompiledGraph
    fast: Callable[[Sequence[Any]], Any] | None  # for plain calls, if its executable supports that

    def run(self, arrays: Sequence[Any]) -> Any:
        outputs = self.compiled.run({str(v.name): array for v, array in zip(self.graph.inputs, arrays)})
        taken: list[np.ndarray] = []
        for leaf, output in self.donated:
            given = arrays[leaf]
            whole = isinstance(given, np.ndarray) and given.flags.writeable and given.flags.forc  # no two elements in one place
            if whole and not any(np.may_share_memory(given, t) for t in taken):
                np.copyto(given, outputs[output])
                outputs[output] = given
                taken.append(given)
        return self.tree.build(outputs)


class Jitted:
    """A function of arrays made by rlx.jit. `reasons`: why it was compiled, once for each time."""

    def __init__(
        self, function: Function, session: Session, options: CompileOptions, static: Iterable[str | int],
        donate: Iterable[str | int], dims: Mapping[str, Mapping[int, str]],
    ) -> None:  # fmt: skip
        update_wrapper(self, function)
        self.name = getattr(function, "__name__", type(function).__name__)
        self.function, self.session, self.options = function, session, options
        try:
            self.__signature__ = inspect.signature(function)
        except (TypeError, ValueError) as e:
            raise OptionError(f"jit takes a function with a signature, got {function!r}: {e}") from None
        self.static, self.donate = self._names("static", static), self._names("donate", donate)
        parameters = self.__signature__.parameters
        self._fixed = {name: p.default for name, p in parameters.items() if not _is_data(p.default)}  # defaults that are static
        axes = dims.values() if isinstance(dims, Mapping) else [None]
        if not all(isinstance(of, Mapping) and all(type(a) is int and isinstance(n, str) for a, n in of.items()) for of in axes):
            raise OptionError(f"dims are {{parameter: {{axis: name}}}}, as {{'x': {{0: 'batch'}}}}; got {dims!r:.80}")
        self.dims = {name: dims[name] for name in self._names("dims", list(dims))}
        self.reasons: list[str] = []
        self._traced: dict[Signature, _Traced] = {}
        self._kept: dict[Signature, _Compiled] = {}
        self._fast: Callable[[Sequence[Any]], Any] | None = None  # the last compiled function, if all its arguments are arrays
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<rlx.jit of {self.name}{self.__signature__} on {self.session.device}, compiled {len(self._kept)} times>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the function, as fresh arrays in the structure that it returns. Of values, when another function is
        being traced: values.

        BindingError: an argument is no array, number or container of them, and not static."""
        if kwargs or self._fast is None:
            return self._general(args, kwargs)
        return self._fast(args)

    def __reduce__(self) -> str:
        """Copied and pickled as functions are: by name."""
        return str(getattr(self, "__qualname__", self.name))

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return self if owner is None else partial(self, owner)

    def compiled(self, *args: Any, **kwargs: Any) -> CompiledGraph:
        """The compiled graph that a call with these arguments runs: its report, plan, program. Compiles it, but does not run.
        Shapes may stand for arrays."""
        signature, _, _ = self._signature(args, kwargs)
        return self._get(signature).compiled

    # -- one call

    def _general(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        signature, arrays, plain = self._signature(args, kwargs)
        if any(isinstance(a, Value) for a in arrays):
            return self.function(*args, **kwargs)
        if any(isinstance(a, Shape) for a in arrays):
            raise BindingError(f"{self.name} is called with arrays; a Shape stands for one in compiled() and rlx.compile alone")
        found = self._get(signature)
        if plain and not found.donated:
            self._fast = found.fast
        return found.run(arrays)

    def _signature(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Signature, list[Any], bool]:
        """(signature, leaves as arrays, True if the arguments are arrays by position and nothing else)."""
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as e:
            raise BindingError(f"{self.name}{self.__signature__}: {e}") from None
        bound.apply_defaults()
        leaves: list[Any] = []
        static, trees = [], []
        for name, given in bound.arguments.items():
            if name in self.static:
                static.append((name, _hashable(name, given), _exact(given)))
            elif name in self._fixed and given is self._fixed[name]:
                static.append((name, DEFAULT, None))  # which may have no hash
            else:
                trees.append((name, flatten(given, leaves, lambda x: isinstance(x, (Value, Shape)))))
        arrays = [x if isinstance(x, Value) else _array(x, self.name) for x in leaves]
        described = [(a.dtype, a.dims) if isinstance(a, Value) else _described(a) for a in arrays]
        plain = not kwargs and not static and len(leaves) == len(args) and all(type(x) is np.ndarray for x in leaves)
        binding = self._bind(trees, described) if self.dims else ()
        number = lambda x: isinstance(x, (int, float)) and not isinstance(x, (bool, np.generic))  # noqa: E731
        numbers = () if plain else tuple(i for i, x in enumerate(leaves) if number(x))
        return Signature(tuple(static), tuple(trees), tuple(described), binding, numbers), arrays, plain

    def _bind(
        self, trees: Sequence[tuple[str, Tree]], leaves: list[tuple[DType, tuple[DimLike, ...]]]
    ) -> tuple[tuple[str, int], ...]:
        """Puts names in place of the sizes of named dims, in `leaves`, and returns name and size of each."""
        found: dict[str, int] = {}
        first: dict[str, str] = {}  # the argument that has set each
        at = 0
        for name, tree in trees:
            for i in range(at, at + tree.leaves) if name in self.dims else ():
                dtype, dims = leaves[i]
                sizes = dict(enumerate(dims))
                for axis, dim in self.dims[name].items():
                    axis = axis + len(dims) if axis < 0 else axis
                    if axis not in sizes:
                        raise BindingError(f"{self.name}: {name!r} has {len(dims)} dims, and dims names its dim {axis} {dim!r}")
                    if found.setdefault(dim, sizes[axis]) != sizes[axis]:  # type: ignore[arg-type]
                        said = f"{found[dim]} in {first[dim]!r}, {sizes[axis]} in {name!r}"
                        raise BindingError(f"{self.name}: arguments disagree on dim {dim!r}: {said}")
                    first.setdefault(dim, name)
                    sizes[axis] = Dim(dim)
                leaves[i] = dtype, tuple(sizes.values())
            at += tree.leaves
        return tuple(sorted(found.items()))

    def _in_machine_code(self, compiled: CompiledGraph, tree: Tree) -> Callable[[Sequence[Any]], Any] | None:
        this = ref(self)  # the function does not keep the Jitted alive, which keeps it

        def slow(args: Sequence[Any]) -> Any:
            owner = this()
            assert owner is not None
            return owner._general(args, {})

        return positional(compiled, slow, None if tree is LEAF else tree.build)

    # -- compiling

    def _get(self, signature: Signature) -> _Compiled:
        found = self._kept.get(signature)
        if found is not None:
            return found
        with self._lock:
            if signature not in self._kept:
                made = self._compile(signature)
                reason = self._reason(signature)
                self.reasons.append(reason)
                if knobs.DEBUG.get() > 0:
                    print(f"rlx.jit: {self.name} compiled, {reason}", file=sys.stderr)
                for kept in (self._kept, self._traced):
                    if len(kept) >= REMEMBERED:
                        del kept[next(iter(kept))]
                self._kept[signature] = made
            return self._kept[signature]

    def _compile(self, signature: Signature) -> _Compiled:
        open_ = signature._replace(binding=())
        if open_ not in self._traced:
            self._traced[open_] = self._trace(open_)
        traced = self._traced[open_]
        options = self.options.replace(dims={**dict(self.options.dims), **dict(signature.binding)})
        compiled = self.session.compile(traced.graph, options)
        fast = self._in_machine_code(compiled, traced.tree)
        return _Compiled(traced.graph, traced.tree, traced.donated, compiled, fast)

    def _trace(self, signature: Signature) -> _Traced:
        graph = Graph(self.name)
        names = _unique([path for name, tree in signature.trees for path in tree.paths(name)])
        values = [graph.input(name, dims, dtype) for name, (dtype, dims) in zip(names, signature.leaves)]
        given, at = {name: self._fixed[name] if x is DEFAULT else x for name, x, _ in signature.static}, 0
        for name, tree in signature.trees:
            given[name] = tree.build(values[at : at + tree.leaves])
            at += tree.leaves
        results: list[Any] = []
        call = inspect.BoundArguments(self.__signature__, given)  # type: ignore[arg-type]  a dict is what it holds
        outer, TRACING.numbers = TRACING.numbers, {values[i].node for i in signature.numbers}
        try:
            tree = flatten(self.function(*call.args, **call.kwargs), results, lambda x: isinstance(x, Value))
        finally:
            TRACING.numbers = outer
        outputs = [self._output(x, name) for x, name in zip(results, tree.paths("output"))]
        if not outputs:
            raise BindingError(f"{self.name} returns no value, so there is nothing to compute")
        graph.set_outputs(outputs)
        return _Traced(graph, tree, tuple(self._donated(signature, outputs)))

    def _output(self, x: object, name: str) -> Value:
        try:
            return x if isinstance(x, Value) else constant(x)
        except GraphError as e:
            raise BindingError(f"{self.name} returns a {type(x).__name__} as {name}, which is no value: {e}") from None

    def _donated(self, signature: Signature, outputs: Sequence[Value]) -> Iterable[tuple[int, int]]:
        """Each donated leaf with the first output of its dims and dtype that no other has taken."""
        leaf, free = 0, list(range(len(outputs)))
        for name, tree in signature.trees:
            for at in range(leaf, leaf + tree.leaves) if name in self.donate else ():
                dtype, dims = signature.leaves[at]
                output = next((i for i in free if outputs[i].shape == Shape(dims, dtype)), None)
                if output is not None:
                    free.remove(output)
                    yield at, output
            leaf += tree.leaves

    def _reason(self, new: Signature) -> str:
        """How the signature differs from the most similar one before."""
        if not self._kept:
            return "first call"
        return "; ".join(min((list(_differences(old, new)) for old in self._kept), key=len)) or "dropped, as too many were kept"

    def _names(self, label: str, given: Iterable[str | int]) -> frozenset[str]:
        names = list(self.__signature__.parameters)
        found = set()
        wanted = f"{label} are names or positions of parameters of {self.name}"
        for x in (given,) if isinstance(given, (str, int)) else items(wanted, given, OptionError):
            if isinstance(x, int) and -len(names) <= x < len(names):
                x = names[x]
            if x not in names:
                raise OptionError(f"{label}={x!r} is no parameter of {self.name}; it has {known(names)}")
            found.add(str(x))
        return frozenset(found)


def _differences(old: Signature, new: Signature) -> Iterable[str]:
    was = {n: rest for n, *rest in old.static}
    yield from (f"{n} is {now[0]!r}, was {was[n][0]!r}" for n, *now in new.static if n in was and was[n] != now)
    yield from (f"{name} is {b}, was {a}" for (name, a), (_, b) in zip(old.binding, new.binding) if a != b)
    names = [path for name, tree in new.trees for path in tree.paths(name)]
    if old.trees != new.trees:
        before, now = dict(old.trees), dict(new.trees)
        yield "arguments of another structure: " + ", ".join(n for n in before | now if before.get(n) != now.get(n))
        return
    for i, (name, a, b) in enumerate(zip_longest(names, old.leaves, new.leaves)):
        first, then = (f"{Shape(dims, dtype)}{', a number' * (i in s.numbers)}" for s, (dtype, dims) in ((old, a), (new, b)))
        if first != then:
            yield f"{name} is {then}, was {first}"


def _unique(names: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    out = []
    for name in names:
        while name in seen:
            name += "_"
        seen.add(name)
        out.append(name)
    return out


def _hashable(name: str, x: Any) -> Any:
    try:
        hash(x)
    except TypeError:
        raise BindingError(f"the static argument {name!r} must be hashable, got {type(x).__name__}") from None
    return x


def _exact(x: Any) -> Any:
    """Tells static values apart that Python takes as equal: 1, 1.0 and True, 0.0 and -0.0, also inside of others."""
    if isinstance(x, tuple):
        return (type(x), *map(_exact, x))
    if isinstance(x, frozenset):
        return frozenset(map(_exact, x))
    if is_dataclass(x) and not isinstance(x, type):
        return (type(x), *(_exact(getattr(x, f.name)) for f in fields(x) if f.compare))
    return (type(x), repr(x)) if isinstance(x, (float, complex)) else type(x)


def _is_data(x: Any) -> bool:
    """Whether a default is arrays and numbers, which are arguments like others; else it is static where nothing is given."""
    leaves: list[Any] = []
    flatten(x, leaves)
    return all(isinstance(leaf, (np.generic, bool, int, float, complex)) or hasattr(leaf, "__array__") for leaf in leaves)


def _array(x: Any, name: str) -> Any:
    """A leaf as an array: numpy's, or one that its device adopts. Numbers of Python become f32, i64, bool or c64."""
    if isinstance(unmasked(name, x), (np.ndarray, Shape)):  # a Shape: of Jitted.compiled, which does not run
        return x
    if isinstance(x, np.generic):  # before Python's numbers: np.float64 is a float
        return np.asarray(x)
    try:
        if isinstance(x, (bool, int, float, complex)):
            dtype = {bool: np.bool_, int: np.int64, float: np.float32, complex: np.complex64}
            with np.errstate(over="ignore"):  # infinity, as in a constant
                return np.asarray(x, next(d for kind, d in dtype.items() if isinstance(x, kind)))
        if hasattr(x, "__dlpack_device__") and hasattr(x, "shape"):
            return on_host(x) if x.__dlpack_device__()[0] == DLPACK_CPU[0] else detached(x)
        if hasattr(x, "__array__"):
            return on_host(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise BindingError(f"{name}: the {type(x).__name__} does not share its memory: {e}") from e
    except OverflowError as e:
        raise BindingError(f"{name}: {x!r:.60} is no i64: {e}; make it static") from None
    raise BindingError(f"{name}: an argument is arrays, numbers and containers of them, got a {type(x).__name__}; make it static")


def _described(a: Any) -> tuple[DType, tuple[int, ...]]:
    if isinstance(a, np.ndarray):
        return as_dtype(a.dtype), a.shape
    if isinstance(a, Shape):
        return a.dtype, a.static
    return as_dtype(str(a.dtype).rpartition(".")[2]), tuple(a.shape)


@overload
def jit(function: Function, /, **options: Any) -> Jitted: ...
@overload
def jit(function: None = None, /, **options: Any) -> Callable[[Function], Jitted]: ...
def jit(
    function: Function | None = None, /, *, device: Device | str | Session = Device.CPU, static: Iterable[str | int] = (),
    donate: Iterable[str | int] = (), dims: Mapping[str, Mapping[int, str]] | None = None,
    options: CompileOptions | None = None, **more: Any,
) -> Jitted | Callable[[Function], Jitted]:  # fmt: skip
    """Compiles a function of arrays, as `@rlx.jit` or `rlx.jit(f, device="cuda")`.

    The function takes and returns values, in any nesting of tuples, lists, dicts, namedtuples and dataclasses. It runs once for
    each structure, dims and dtypes of its arguments, and each value of a `static` one (names or positions; hashable). `donate`:
    arguments whose memory may be used for results of the same dims and dtype: such an array is returned, with new contents.
    `dims`: names for dims of arguments, {"x": {0: "batch"}}: the function is not run again for other sizes, its graph is only
    compiled. `device`: a device, its name, or a Session. `options`, or fields of CompileOptions by name.

    An int or a float of Python takes the dtype of an array that it is combined with, as a constant does: `x * n` is f16 if x is.
    A float does not become an integer, nor f64, since it is an f32 already.

    OptionError: there is no such parameter or option. Calls raise BindingError for arguments, and what a compile and a run do.
    """
    if function is None:
        return partial(jit, device=device, static=static, donate=donate, dims=dims, options=options, **more)  # type: ignore[return-value]
    if not callable(function):
        raise OptionError(f"jit takes a function, got {type(function).__name__}")
    session = device if isinstance(device, Session) else Session(device)
    return Jitted(function, session, with_more(options, more), static, donate, {} if dims is None else dims)


@overload
def compile(
    what: Graph, /, *, device: Device | str | Session = ..., options: CompileOptions | None = ..., dims: Mapping[str, int] = ...,
    **more: Any,
) -> CompiledGraph: ...
@overload
def compile(
    what: Graph, /, *, device: Device | str | Session = ..., options: CompileOptions | None = ...,
    dims: Mapping[str, int | str], **more: Any,
) -> BucketedGraph: ...
@overload
def compile(
    what: Function, /, *args: Any, device: Device | str | Session = ..., static: Iterable[str | int] = ...,
    options: CompileOptions | None = ..., **more: Any,
) -> CompiledGraph: ...
def compile(
    what: Graph | Function, /, *args: Any, device: Device | str | Session = Device.CPU, static: Iterable[str | int] = (),
    options: CompileOptions | None = None, **more: Any,
) -> CompiledGraph | BucketedGraph:  # fmt: skip
    """A graph, or a function of values, compiled for a device. `args`: for a function, arguments like those it will be called
    with: arrays, or Shapes in their place. `static`, `options` and fields of CompileOptions by name: as in rlx.jit. A dim of a
    graph may stay open, dims={"batch": "auto"}: a BucketedGraph compiles for the powers of two that runs reach.

    Raises as Session.compile does; OptionError: neither a graph nor a function."""
    session = device if isinstance(device, Session) else Session(device)
    if isinstance(what, Graph):
        if args or static:
            raise OptionError(f"graph {what.name!r} has its inputs; arguments are those of a function")
        options = with_more(options, more)
        if options.open_dim:
            return BucketedGraph(session, what, options.closed, options.open_dim)
        return session.compile(what, options)
    if not callable(what):
        raise OptionError(f"compile takes a Graph or a function, got {type(what).__name__}")
    if "dims" in more or with_more(options, {}).dims:
        raise OptionError("dims are those of a graph; of a function: rlx.jit(f, dims={'x': {0: 'batch'}})")
    made = jit(what, device=session, static=static, options=options, **more)
    try:
        made.__signature__.bind(*args)
    except TypeError as e:
        how = "give arrays as in its calls, or Shapes in their place: rlx.compile(f, x, y); or rlx.jit(f), whose calls compile"
        raise BindingError(f"compile of {made.name}{made.__signature__}: {e}; {how}") from None
    return made.compiled(*args)


__all__ = ["Jitted", "compile", "jit"]
