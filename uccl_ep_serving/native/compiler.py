"""From decorated functions to machine code: the one module that imports Numba.

Numba by itself optimises, emits and caches every function that another one calls, each time with all that it calls in
turn; most of that work is thrown away. Here Numba only translates each function to LLVM's language, once in a process.
What a group of entry points reaches is linked into one module, where nothing but the entry points is visible from
outside, and that is optimised and emitted once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba._dynfunc import make_function
from numba.core import sigutils
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUContext
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUTarget
from numba.core.target_extension import CPU, dispatcher_registry, jit_registry, target_registry
from numba.core.typing.typeof import typeof_impl
from numba.extending import intrinsic as numba_intrinsic
from numba.np.arrayobj import make_array, populate_array

from .machine import target_machine
from .parts import External, Function, Intrinsic, View
from .python_entry import INTERPRETER, add_python_entry, python_symbol

__all__ = ["emit", "optimised"]


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """The code of one function, not linked with what it calls, never emitted."""

    def finalize(self) -> None:
        self._finalized = True

    @property
    def reached(self) -> Iterator[_Library]:
        """The libraries of the functions that it calls; Numba's own one, which counts references, is not needed."""
        return (library for library in self._linking_libraries if isinstance(library, _Library))

    @property
    def module(self) -> llvm.ModuleRef:
        """Its code."""
        return self._final_module


class _Codegen(JITCPUCodegen):  # type: ignore[misc]
    _library_class = _Library


class _Context(CPUContext):  # type: ignore[misc]
    """Lowers functions that nobody will call before their group is emitted."""

    def init(self) -> None:
        super().init()
        self._internal_codegen = _Codegen("uccl_ep_serving")

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> Any:
        # only an identity, by which callers find the function: there is no code behind it
        return make_function(fndesc.lookup_module(), fndesc.qualname, "", 0, env, (library,))


class _Target(CPUTarget):  # type: ignore[misc]
    """This processor, with contexts of its own: what Numba compiles for others in this process stays apart."""

    @functools.cached_property
    def _toplevel_target_context(self) -> Any:
        return _Context(self.typing_context, self._target_name)


class _Processor(CPU):  # type: ignore[misc]
    """The same to Numba's registries: what is written for a CPU serves it."""


#: For every function: no reference counts, since nothing holds an object.
_OPTIONS = {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False}
_OPTIONS |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class _Dispatcher(Dispatcher):  # type: ignore[misc]
    """A function that Numba writes itself, such as ``max``."""

    targetdescr = _Target("uccl_ep_serving")


class _OurDispatcher(_Dispatcher):
    """Numba's side of a :class:`.parts.Function`."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # one copy of a function for all integers, literal or not, whatever their width
        kinds = (types.int64 if isinstance(kind, types.Integer) else kind for kind in args)
        return super().get_call_template(tuple(kinds), kws)


def _written_by_numba(function: Any = None, **_: Any) -> Any:
    """In place of ``numba.jit`` for this target."""
    return _written_by_numba if function is None else _Dispatcher(function, targetoptions=dict(_OPTIONS))


target_registry["uccl_ep_serving"] = _Processor
dispatcher_registry[_Processor] = _Dispatcher
jit_registry[_Processor] = _written_by_numba
_typing = _Dispatcher.targetdescr.typing_context
_dispatchers: dict[Function, _OurDispatcher] = {}
_intrinsics: dict[Intrinsic | View, Any] = {}
#: What LLVM calls by itself; and the functions of libc that compiled code asked for.
_LIBC = frozenset(("memcpy", "memmove", "memset"))
_externals: set[str] = set()


def _dispatcher(item: Function) -> _OurDispatcher:
    if item not in _dispatchers:
        _dispatchers[item] = _OurDispatcher(item.function, targetoptions=_OPTIONS | {"forceinline": item.inline})
    return _dispatchers[item]


@typeof_impl.register(Function)
def _type_of_compiled(item: Function, _: Any) -> Any:
    return types.Dispatcher(_dispatcher(item))


@typeof_impl.register(Intrinsic)
def _type_of_intrinsic(item: Intrinsic, _: Any) -> Any:
    if item not in _intrinsics:
        signature = _signature(item.signature)

        def emitted(context: Any, builder: Any, _: Any, args: Any) -> Any:
            value = item.emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        def typed(*_: Any) -> Any:
            return signature, emitted

        # Numba takes the names of the parameters from it, and the first of them away
        typed.__signature__ = inspect.signature(item.emit)  # type: ignore[attr-defined]
        typed.__name__ = item.emit.__name__
        _intrinsics[item] = _registered(typed)
    return _typing.resolve_value_type(_intrinsics[item])


@typeof_impl.register(External)
def _type_of_external(item: External, _: Any) -> Any:
    _externals.add(item.symbol)
    return types.ExternalFunction(item.symbol, _signature(item.signature))


@typeof_impl.register(View)
def _type_of_view(item: View, _: Any) -> Any:
    if item not in _intrinsics:
        element = getattr(types, item.element)
        kind = types.Array(element, 1, "C")

        def emitted(context: Any, builder: Any, _: Any, args: Any) -> Any:
            address, count = args
            llvm_type = context.get_data_type(element)
            size = context.get_constant(types.intp, context.get_abi_sizeof(llvm_type))
            array = make_array(kind)(context, builder)
            data = builder.inttoptr(address, llvm_type.as_pointer())
            populate_array(array, data=data, shape=[count], strides=[size], itemsize=size, meminfo=None)
            return array._getvalue()

        def view(typingctx: Any, address: Any, count: Any) -> Any:
            return kind(types.int64, types.int64), emitted

        _intrinsics[item] = _registered(view)
    return _typing.resolve_value_type(_intrinsics[item])


def _registered(typed: Callable[..., Any]) -> Any:
    made = numba_intrinsic(typed)
    _typing.refresh()
    return made


def _signature(words: str) -> Any:
    args, result = sigutils.normalize_signature(words)
    return result(*args)


def emit(entries: Mapping[str, Function]) -> bytes:
    """Object code for this machine; see :func:`optimised`."""
    return bytes(target_machine().emit_object(optimised(entries)))


def optimised(entries: Mapping[str, Function]) -> llvm.ModuleRef:
    """A module for this machine with the given entry points, by symbol, as C functions.

    Raises:
        numba.core.errors.NumbaError: a function is not what can be compiled.
        TypeError: compiled code would need what nobody defines where it is loaded.
    """
    with global_compiler_lock, _uncollected():
        linked = _link(entries)
    visible = {*entries, *map(python_symbol, entries)}
    for item in (*linked.functions, *linked.global_variables):
        if not item.is_declaration and item.name not in visible:
            item.linkage = "internal"
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    # as Numba: SLP vectorisation costs time and gains nothing here
    tuning.loop_vectorization, tuning.slp_vectorization = True, False
    builder = llvm.create_pass_builder(target_machine(), tuning)
    builder.getModulePassManager().run(linked, builder)
    _check_symbols(linked)
    return linked


def _check_symbols(module: llvm.ModuleRef) -> None:
    """Raise TypeError for what nobody defines where ``module`` will be loaded: calling it would end the process.

    Numba's own helpers are among it. They are there in a process that imports Numba, and in no other.
    """
    libc = ctypes.CDLL(None)
    declared = (item.name for item in (*module.functions, *module.global_variables) if item.is_declaration)
    needed = [name for name in declared if not name.startswith("llvm.") and name not in INTERPRETER]
    if strange := [name for name in needed if name not in _LIBC and not (name in _externals and hasattr(libc, name))]:
        raise TypeError(
            f"compiled code needs {', '.join(strange)}, which nobody defines where it is loaded. Likely cause: it "
            "holds Python objects, raises, or calls a function that this libc lacks"
        )


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, an eighth of a translation: it walks again and again what Numba builds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _link(entries: Mapping[str, Function]) -> llvm.ModuleRef:
    """One module of the entry points and everything they reach."""
    context = _Dispatcher.targetdescr.target_context
    wrappers = ir.Module("uccl_ep_serving")
    wrappers.triple = llvm.get_process_triple()
    pending: list[_Library] = []
    for symbol, item in entries.items():
        signature = _signature(item.signature)
        dispatcher = _dispatcher(item)
        dispatcher.compile(signature)
        result = dispatcher.overloads[signature.args]
        _add_entry(context, wrappers, symbol, signature.return_type, result.fndesc)
        pending.append(result.library)
    linked = llvm.parse_assembly(str(wrappers))
    linked.data_layout = str(target_machine().target_data)
    seen: set[int] = set()
    while pending:
        library = pending.pop()
        if id(library) not in seen:
            seen.add(id(library))
            linked.link_in(library.module, preserve=True)
            pending.extend(library.reached)
    linked.verify()
    return linked


def _add_entry(context: Any, module: ir.Module, symbol: str, returned: Any, fndesc: Any) -> None:
    """A C function ``symbol`` that calls what Numba made, whose status is always OK: nothing here raises. And what
    Python calls in its place."""
    convention = context.call_conv
    callee = ir.Function(module, convention.get_function_type(fndesc.restype, fndesc.argtypes), fndesc.llvm_func_name)
    kinds = [context.get_value_type(kind) for kind in fndesc.argtypes]
    result = ir.VoidType() if returned == types.void else context.get_value_type(returned)
    wide = ir.IntType(8) if returned == types.boolean else result
    entry = ir.Function(module, ir.FunctionType(wide, kinds), symbol)
    builder = ir.IRBuilder(entry.append_basic_block())
    _, value = convention.call_function(builder, callee, fndesc.restype, fndesc.argtypes, entry.args)
    if returned == types.void:
        builder.ret_void()
    elif returned == types.boolean:
        builder.ret(builder.zext(value, wide))
    else:
        builder.ret(context.cast(builder, value, fndesc.restype, returned))
    add_python_entry(module, entry, [str(kind) for kind in fndesc.argtypes], str(returned))
