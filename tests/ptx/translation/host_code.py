"""From LLVM's language to host code, which is kept between processes."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import __version__ as llvmlite_version

from uccl_ep_serving.native.cache import places, read_object, usable, write_object
from uccl_ep_serving.native.machine import processor

from .event import CAUSES, CTAX, CTAY, CTAZ, FAULT, FAULT_CAUSE, TID, Event
from .program import Program, parse
from .translate import translate

__all__ = ["Kernel"]

#: Of code generation, 0 to 3, and of the passes before it. A trial takes a twentieth less time with 1, whose compiling
#: takes ten times as long.
_LEVEL = 0
_Drive = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)


class Kernel:
    """A compiled kernel of PTX.

    Attributes:
        program: what it was compiled from.
        events: by number.
        nslots: 64-bit slots of a thread's state (event.py).
        drive: ``drive(base, lanes, n, out)`` runs ``n`` threads, one after another, each until its next event. ``base``
            is the address of the states, int64 [threads, nslots]; ``lanes`` that of the threads' numbers, int32 [n];
            ``out`` that of int32 [threads], where each one's event is written: 0 it has exited, -n it stopped at the
            fault of event n.
    """

    def __init__(self, ptx: str, weak: bool) -> None:
        self.program: Program = parse(ptx)
        translation = translate(self.program, weak)
        self.events: dict[int, Event] = translation.events
        self.nslots = translation.nslots
        self._engine = _loaded(translation.ir)
        self.drive = _Drive(self._engine.get_function_address("drive"))

    def fault(self, number: int, state: Sequence[int]) -> str:
        """What is wrong where a thread stopped.

        Args:
            number: of the event, positive.
            state: of the thread, as many slots.
        """
        event, block = self.events[number], tuple(int(state[slot]) for slot in (CTAX, CTAY, CTAZ))
        return (
            f"{self.program.name}: block {block}, thread {int(state[TID])}: {CAUSES[int(state[FAULT_CAUSE])]} "
            f"{int(state[FAULT]):#x} at PTX line {event.line}: {event.text}; from {event.source}"
        )


def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = processor()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=name, features=features, opt=_LEVEL, jit=True, codemodel="jitdefault")


def _loaded(ir: str) -> Any:
    """An engine that holds the code of ``ir``: from the cache, or compiled into it."""
    machine = _target_machine()
    empty = llvm.parse_assembly("")
    empty.triple = llvm.get_process_triple()
    engine = llvm.create_mcjit_compiler(empty, machine)
    key = hashlib.sha256(repr((ir, processor(), llvmlite_version, _LEVEL)).encode()).hexdigest()[:32]
    directory = next(filter(usable, places("ptx")), None)
    code = read_object(directory / key) if directory else None
    if code is None:
        code = _compiled(ir, machine)
        if directory:
            write_object(directory / key, code)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def _compiled(ir: str, machine: Any) -> bytes:
    module = llvm.parse_assembly(ir)
    module.triple = llvm.get_process_triple()
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=_LEVEL))
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    return code
