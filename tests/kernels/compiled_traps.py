"""The traps of Triton, as they show in PTX and AMDGCN, and what a GPU's file says of its kernel.

All of them pass a compiler without a word. Each was met in one of Triton's versions 3.6 to 3.9.
"""

from __future__ import annotations

import math
import re
import struct
from typing import NamedTuple

from tests.kernels import flow_graph

__all__ = [
    "COPYING",
    "EXCHANGING",
    "IN_FLIGHT",
    "PUBLISHING",
    "WAITING",
    "cubin_resources",
    "cuda_faults",
    "exchanges_of_rows",
    "hip_faults",
    "loads_at_once",
]

#: Those of low latency whose last program to arrive goes on alone.
ARRIVING = {"dispatch_send", "dispatch_recv", "combine_send"}
#: Those of normal mode, which do all of that.
EXCHANGING = {"dispatch_rows", "combine_rows"}
PUBLISHING = {"dispatch_send", "combine_send", *EXCHANGING}
WAITING = {*ARRIVING, *PUBLISHING, "combine_recv"}
COPYING = {*ARRIVING, *EXCHANGING, "combine_recv"}

#: Bytes of rows that must be on their way to one program of these, on CUDA and ROCm.
IN_FLIGHT = {
    "dispatch_rows": (32 << 10, 8 << 10),
    "combine_rows": (32 << 10, 8 << 10),
    # with Triton 3.6 on ROCm, 8 KiB with later ones
    "combine_recv": (8 << 10, 6 << 10),
    "combine_send": (4 << 10, 4 << 10),
    "dispatch_recv": (7 << 10, 7 << 10),
}

#: Elements of the smallest tensor that holds a part of a row, and of no other.
OF_A_ROW = 128


def loads_at_once(text: str) -> int:
    """Most loads of 16 bytes that a thread asks for before it waits for one, in PTX or AMDGCN. The assembler of PTX
    decides that itself, but moves no load over a barrier and no sum. In AMDGCN it stands there: a branch over a load
    that nobody needs is no wait."""
    if ".target sm_" in text:
        load, end = r"\bld\.global\.v(?:4\.b32|2\.b64)", r"\bbar\.sync|\bbra\b|^\$L__BB|\badd\S*\.f32|\bst\.global"
    else:
        load, end = r"\b(?:global|buffer)_load_dwordx4", r"s_waitcnt vmcnt|s_branch|\bglobal_store"
    return max(len(re.findall(load, part)) for part in re.split(end, text, flags=re.MULTILINE))


class _Wait(NamedTuple):
    """A loop: its basic blocks, by their places in the text."""

    blocks: tuple[str, ...]
    places: frozenset[int]


def _loops(text: str, label: str, branch: str, end: str) -> list[_Wait]:
    """Natural loops of PTX or AMDGCN.

    Args:
        label, branch: of a basic block, and to one; the name is their group.
        end: what nothing is executed after in the order of the text, if a line matches it.
    """
    blocks: list[list[str]] = [[]]
    named: dict[str, int] = {}
    for line in text.splitlines():
        found = re.search(label, line)
        if found:
            blocks.append([])
            named[found.group(1)] = len(blocks) - 1
        blocks[-1].append(line)
        if re.search(branch, line) or re.search(end, line):
            blocks.append([])
    ahead: list[list[int]] = []
    for place, lines in enumerate(blocks):
        last = lines[-1] if lines else ""
        target = re.search(branch, last)
        following = [named[target.group(1)]] if target and target.group(1) in named else []
        if not re.search(end, last) and place + 1 < len(blocks):
            following.append(place + 1)
        ahead.append(following)
    found = [inside for _, inside in flow_graph.loops(ahead)]
    return [_Wait(tuple("\n".join(blocks[place]) for place in sorted(inside)), inside) for inside in found]


def _poll_faults(loops: list[_Wait], load: str, clock: str) -> list[str]:
    """What is wrong with the innermost loops in which a ``load`` and a look at the ``clock`` have stayed. After the
    clock comes the sticky error, which is not what they wait for."""

    def both(blocks: tuple[str, ...]) -> bool:
        return any(re.search(load, one) for one in blocks) and any(clock in one for one in blocks)

    waits = [one for one in loops if both(one.blocks)]
    polls = [one for one in waits if not any(other.places < one.places for other in waits)]
    faults = []
    if not any(re.search(rf"{load}[\s\S]*?{clock}", "\n".join(one.blocks)) for one in polls):
        faults.append("no loop polls past the caches and then looks at the clock: the poll was hoisted")
    # host memory, over PCIe
    if any(re.search(rf"{clock}[\s\S]*?{load}", block) for one in polls for block in one.blocks):
        faults.append("every spin of a wait reads the sticky error, not only when the clock says so")
    return faults


def cuda_faults(name: str, ptx: str) -> list[str]:
    """Traps of Triton in PTX."""
    faults = []
    releases = re.findall(r"st\.release[.\w]*", ptx)
    if any(".sys." not in one for one in releases):
        faults.append(f"a release that the host may not see: {set(releases)}")
    if name in PUBLISHING:
        commands = [match.start() for match in re.finditer(r"st\.release\.sys\.global\.v2\.b64", ptx)]
        if not commands:
            faults.append("a command is not one 16-byte store")
        if any("bar." not in ptx[max(ptx.rfind("st.global", 0, place), 0) : place] for place in commands):
            faults.append("no barrier between what a message holds and its command")
    counted = [match.start() for match in re.finditer(r"atom\.[\w.]*acq_rel[\w.]*add", ptx)]
    if name in ARRIVING and not counted:
        faults.append("no arrival is counted")
    for place in counted:
        if "bar." not in ptx[max(ptx.rfind("st.global", 0, place), 0) : place]:
            faults.append("stores of other threads are not ordered before the arrival")
    if re.search(r"atom\.[\w.]*acquire[\w.]*\s+_,", ptx):
        faults.append("an acquire whose result is not used, which the compiler may delete")
    if name in WAITING:
        label, branch = r"^\$(L__BB\w+):", r"bra(?:\.uni)?\s+\$(L__BB\w+);"
        load, clock, end = r"ld\.acquire\.sys\.global\.b64", "globaltimer", r"^\s*(?:bra\b|ret;|exit;)"
        faults += _poll_faults(_loops(ptx, label, branch, end), load, clock)
    # what a masked load leaves where it loads nothing: 0xffffffffffff8000 is -1 and -32768, as two of 16 bits
    if re.search(r"mov\.\w32\s+%\w+, 0x(?!f+;)[0-9a-f]{9,};", ptx):
        faults.append("a negative integer of few bits is repeated in a register with its sign")
    if name in COPYING and not re.search(r"st\.global\.v[24]\.b32", ptx):
        faults.append("stores are not vectorised")
    if name in COPYING and not re.search(r"ld\.global\.v(?:4\.b32|2\.b64)", ptx):
        faults.append("loads are not vectorised")
    return faults


def hip_faults(name: str, code: str) -> list[str]:
    """The same in AMDGCN."""
    faults = []
    command = r"buffer_wbl2 sc0 sc1\s+s_waitcnt vmcnt\(0\)\s+global_store_dwordx2 [^\n]*sc0 sc1"
    if name in PUBLISHING and not re.search(command, code):
        faults.append("a command is stored without a write-back before it")
    # Triton 3.6 drops its scope
    if "global_atomic_cmpswap" in code:
        faults.append("a compare-and-exchange, which may not be seen by the host")
    if name in WAITING:
        label, branch = r"^\.?(L?BB\w+):", r"s_c?branch\w*\s+\.?(L?BB\w+)"
        load, clock, end = r"global_load_dwordx2 [^\n]*sc0 sc1", "s_memrealtime", r"^\s*(?:s_branch|s_endpgm)"
        faults += _poll_faults(_loops(code, label, branch, end), load, clock)
        if "buffer_inv sc0 sc1" not in code:
            faults.append("no acquire")
    # what such stores do not choose goes to a sink of one word
    assembly = re.findall(r";;#ASMSTART([\s\S]*?);;#ASMEND", code)
    if any(re.search(r"_store_[^\n]*\boffset:", one) for one in assembly):
        faults.append("a store of a lane that sends nothing goes beyond the word that takes it")
    # other than that of a command
    if name in COPYING and not re.search(r"(?:global|buffer)_store_dwordx[24] (?!.* sc1)", code):
        faults.append("stores are not vectorised")
    if name in COPYING and not re.search(r"(?:global|buffer)_load_dwordx4", code):
        faults.append("loads are not vectorised")
    return faults


def exchanges_of_rows(ttgir: str) -> list[str]:
    """Values of rows that go from thread to thread in Triton's GPU dialect, because the compiler has chosen other
    threads for the load than for the store: by shuffles, three a word, or through shared memory. For at most 11 slots a
    token: tensors of slots by slots are no rows."""
    found = re.findall(r"ttg\.convert_layout \S+ : tensor<([\dx]+)x(\w+), ", ttgir)
    sizes = [(math.prod(map(int, shape.split("x"))), shape, dtype) for shape, dtype in found]
    return [f"{shape} of {dtype} change threads" for size, shape, dtype in sizes if size >= OF_A_ROW]


def cubin_resources(cubin: bytes) -> dict[str, int]:
    """What the ELF file for a GPU says of its one kernel and the functions that this calls, whichever has most:
    EIATTR_REGCOUNT and EIATTR_FRAME_SIZE of ``.nv.info``."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + index * size) for index in range(count)]
    strings = cubin[sections[names][4] :]
    found = {"registers": 0, "spilled": 0}
    for name, _, _, _, start, length, *_ in sections:
        if strings[name : strings.index(b"\0", name)] != b".nv.info":
            continue
        place = start
        while place < start + length:
            form, attribute, value = struct.unpack_from("<BBH", cubin, place)
            place += 4
            # only this form is followed by as many bytes as it says: a symbol and a number here
            if form == 4:
                if attribute in (0x2F, 0x11):
                    _, number = struct.unpack_from("<II", cubin, place)
                    what = "registers" if attribute == 0x2F else "spilled"
                    found[what] = max(found[what], number)
                place += value
    return found
