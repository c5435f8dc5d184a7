"""What Python calls: a built-in function around each entry point, emitted with it.

A call through ctypes takes 0.6 us more than one of a built-in function, and an operation makes half a dozen. The
built-in takes integers by position, lets go of the GIL, calls, and takes the GIL again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

__all__ = ["INTERPRETER", "add_python_entry", "built_in", "python_symbol"]

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_OBJECT, _DOUBLE = _I8.as_pointer(), ir.DoubleType()

#: Functions of the interpreter that a built-in calls: result and arguments.
_FUNCTIONS: dict[str, tuple[ir.Type, list[ir.Type]]] = {
    "PyLong_AsLongLong": (_I64, [_OBJECT]),
    "PyObject_IsTrue": (_I32, [_OBJECT]),
    "PyFloat_AsDouble": (_DOUBLE, [_OBJECT]),
    "PyErr_Occurred": (_OBJECT, []),
    "PyErr_BadArgument": (_I32, []),
    "PyEval_SaveThread": (_OBJECT, []),
    "PyEval_RestoreThread": (ir.VoidType(), [_OBJECT]),
    "PyLong_FromLongLong": (_OBJECT, [_I64]),
    "PyBool_FromLong": (_OBJECT, [_I64]),
    "PyFloat_FromDouble": (_OBJECT, [_DOUBLE]),
    "Py_IncRef": (ir.VoidType(), [_OBJECT]),
}
_NONE = "_Py_NoneStruct"
#: Symbols that the process of any Python defines.
INTERPRETER = frozenset((*_FUNCTIONS, _NONE))

#: methodobject.h: called as ``function(self, arguments, count)``.
_METH_FASTCALL = 0x80


class _MethodDef(ctypes.Structure):
    """``PyMethodDef``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


#: Definition, self and module. An object of our own: what ``ctypes.pythonapi`` holds is everybody's.
_new_built_in = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)
#: A built-in points at its definition.
_definitions: list[_MethodDef] = []


def python_symbol(symbol: str) -> str:
    """Symbol of the built-in around the entry point ``symbol``."""
    return f"{symbol} for Python"


def add_python_entry(module: ir.Module, entry: ir.Function, kinds: Sequence[str], returned: str) -> None:
    """Emit the built-in around ``entry``; ``kinds`` and ``returned`` as in its signature."""
    kind = ir.FunctionType(_OBJECT, [_OBJECT, _OBJECT.as_pointer(), _I64])
    function = ir.Function(module, kind, python_symbol(entry.name))
    builder = ir.IRBuilder(function.append_basic_block())
    _, arguments, count = function.args

    def call(name: str, *values: Any) -> Any:
        declared = module.globals.get(name) or ir.Function(module, ir.FunctionType(*_FUNCTIONS[name]), name)
        return builder.call(declared, values)

    with builder.if_then(builder.icmp_signed("!=", count, _I64(len(kinds))), likely=False):
        call("PyErr_BadArgument")
        builder.ret(_OBJECT(None))
    values = []
    for place, (word, argument) in enumerate(zip(kinds, entry.args, strict=True)):
        given = builder.load(builder.gep(arguments, [_I64(place)]))
        if word in ("bool", "boolean"):
            truth = call("PyObject_IsTrue", given)
            values.append(builder.icmp_signed("!=", truth, _I32(0)))
        elif word.startswith("float"):
            double = call("PyFloat_AsDouble", given)
            values.append(double if word == "float64" else builder.fptrunc(double, argument.type))
        else:
            whole = call("PyLong_AsLongLong", given)
            values.append(whole if argument.type == _I64 else builder.trunc(whole, argument.type))
    if kinds:
        with builder.if_then(builder.icmp_unsigned("!=", call("PyErr_Occurred"), _OBJECT(None)), likely=False):
            builder.ret(_OBJECT(None))
    thread = call("PyEval_SaveThread")
    result = builder.call(entry, values)
    call("PyEval_RestoreThread", thread)
    if returned in ("void", "none"):
        none = module.globals.get(_NONE) or ir.GlobalVariable(module, _I8, _NONE)
        call("Py_IncRef", none)
        builder.ret(none)
    elif returned in ("bool", "boolean"):
        builder.ret(call("PyBool_FromLong", builder.zext(result, _I64)))
    elif returned.startswith("float"):
        builder.ret(call("PyFloat_FromDouble", result if returned == "float64" else builder.fpext(result, _DOUBLE)))
    else:
        widen = builder.zext if returned.startswith("u") else builder.sext
        builder.ret(call("PyLong_FromLongLong", result if result.type == _I64 else widen(result, _I64)))


def built_in(name: str, address: int) -> Callable[..., Any]:
    """The built-in function at ``address``, which :func:`add_python_entry` emitted."""
    definition = _MethodDef(name.encode(), address, _METH_FASTCALL, None)
    _definitions.append(definition)
    made: Callable[..., Any] = _new_built_in(ctypes.addressof(definition), None, None)
    return made
