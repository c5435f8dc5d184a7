"""The gate for operations that only some lanes reach: IR and kernels that are wrong are caught, right ones pass."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.divergence import divergences
from tests.kernels.other_tritons import other_tritons

HERE = Path(__file__).parent
SHUFFLE = "%s = call i32 @llvm.nvvm.shfl.sync.idx.i32(i32 -1, i32 %a, i32 0, i32 31), !dbg !6"
BARRIER = "call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0), !dbg !6"
TID = "%t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x(), !dbg !5"
#: A branch around an operation, and a loop with one; {0} is the operation.
BRANCH = """
  br i1 %c, label %inside, label %after, !dbg !7
inside:
  {0}
  br label %after
after:
  ret void
"""
LOOP = """
  br label %head
head:
  %i = phi i32 [ 0, %0 ], [ %next, %head ]
  {0}
  %next = add i32 %i, 1
  %c = icmp eq i32 %next, %n
  br i1 %c, label %after, label %head, !dbg !7
after:
  ret void
"""
#: A loop that threads leave in different turns, and what they do then with the number of turns.
LEFT = """
  br label %head
head:
  %i = phi i32 [ 0, %0 ], [ %next, %head ]
  %next = add i32 %i, 1
  %out = icmp eq i32 %next, %n
  br i1 %out, label %over, label %head
over:
  %c = icmp eq i32 %i, 3
"""
#: Two ways that meet, with a value from each.
MEET = """
  br i1 %p, label %left, label %meet
left:
  br label %meet
meet:
  %v = phi i32 [ 1, %0 ], [ 2, %left ]
  %c = icmp eq i32 %v, 1
"""
#: Two ways on which lanes part, and values that meet before the lanes do: of one way, the same for all.
MEET_EARLY = """
  %p = icmp ult i32 %t, 9
  br i1 %same, label %left, label %right
left:
  br i1 %p, label %early, label %meet
right:
  br i1 %p, label %early, label %meet
early:
  %w = phi i32 [ 1, %left ], [ 2, %right ]
  br label %meet
meet:
  %v = phi i32 [ 1, %left ], [ 2, %right ], [ %w, %early ]
  %c = icmp eq i32 %v, 1
"""
#: Where the first thread tells, and all go on unless {over}: as LLVM makes one branch of two, in either form.
MERGED_AND = """
  %u = icmp eq i32 %t, 0
  %c = and i1 %u, {over}
  br i1 %c, label %tell, label %ask, !dbg !7
tell:
  store i32 1, ptr addrspace(1) %from
  br label %after
ask:
  br i1 {over}, label %after, label %on, !dbg !7
on:
  {operation}
  br label %after
after:
  %v = phi i32 [ 1, %tell ], [ 1, %ask ], [ 2, %on ]
  ret void
"""
MERGED_OR = (
    MERGED_AND.replace("and i1 %u, {over}", "select i1 %u, i1 true, i1 {over}")
    .replace("label %tell, label %ask, !dbg !7\ntell", "label %ask, label %tell, !dbg !7\ntell")
    .replace("br i1 {over}, label %after, label %on", "br i1 {over}, label %on, label %after")
)
ACQUIRED = '%a0 = call i64 asm sideeffect "ld.acquire.sys.global.b64 $0, [$1];", "=l,l"(i64 %base) #2, !dbg !5'
PLAIN = '%a0 = call i64 asm sideeffect "ld.global.b64 { $0 }, [ $1 + 0 ];", "=l,l"(i64 %base) #2, !dbg !5'
LANE_WORD = """%at = getelementptr i32, ptr addrspace(1) %from, i32 %t
  %w = load i32, ptr addrspace(1) %at
"""


def reduced(*steps: int) -> str:
    """A sum of what threads have, by exchanges with those ``steps`` away."""
    lines, last = [TID], "%t"
    for number, step in enumerate(steps):
        lines.append(f"%x{number} = call i32 @llvm.nvvm.shfl.sync.bfly.i32(i32 -1, i32 {last}, i32 {step}, i32 31)")
        lines.append(f"%r{number} = add i32 {last}, %x{number}")
        last = f"%r{number}"
    return "\n  ".join([*lines, f"%c = icmp eq i32 {last}, 7", ""])


def reduced_on_rocm(banks: int) -> str:
    """The same by all, where those four away are asked in two steps; ``banks`` takes part in the second."""
    four = "%x2 = call i32 @llvm.nvvm.shfl.sync.bfly.i32(i32 -1, i32 %r1, i32 4, i32 31)"
    taken = "call i32 @llvm.amdgcn.update.dpp.i32(i32 {}, i32 %r1, i32 {}, i32 15, i32 {}, i1 false)"
    return reduced(16, 8, 4, 2, 1).replace(
        four, f"%h = {taken.format('%r1', 276, 10)}\n  %x2 = {taken.format('%h', 260, banks)}"
    )


def calling(passed: str, result: str, *, then: str = "ret void", behind: str = "ret void") -> str:
    """A call of ``called`` with ``passed``, and what comes ``behind`` it; the function does ``then``."""
    call = f"{'%r = ' if result != 'void' else ''}tail call fastcc {result} @called(i32 {passed})"
    return f"""{TID}
  %u = icmp ult i32 %t, 9
  {call}
  {behind}
}}

define internal fastcc {result} @called(i32 range(i32 0, 9) %0) #0 {{
  {then.strip()}"""


#: What a function does that branches as it is told, and what one returns: what all have, and what each thread has.
TOLD = "%c = icmp eq i32 %0, 3" + BRANCH.format(BARRIER)
TWO = f"""{TID}
  %one = insertvalue {{ i32, i32 }} poison, i32 %0, 0
  %two = insertvalue {{ i32, i32 }} %one, i32 %t, 1
  ret {{ i32, i32 }} %two"""


def taken(field: int) -> str:
    return f"%x = extractvalue {{ i32, i32 }} %r, {field}\n  %c = icmp eq i32 %x, 3" + BRANCH.format(BARRIER)


def ir(body: str, threads: int) -> str:
    """A kernel of so many threads with that ``body``, and the debug information of three lines."""
    return f"""
define ptx_kernel void @wrong(i64 %base, i32 %a, i32 %n, i1 %same, ptr addrspace(1) %from) #0 !dbg !3 {{
  {body.strip()}
}}

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x() #2
declare i32 @llvm.nvvm.shfl.sync.idx.i32(i32, i32, i32, i32) #1
declare i32 @llvm.nvvm.shfl.sync.bfly.i32(i32, i32, i32, i32) #1
declare i32 @llvm.nvvm.redux.sync.max(i32, i32) #1
declare void @llvm.nvvm.barrier.cta.sync.aligned.all(i32) #1
attributes #0 = {{ nounwind "nvvm.reqntid"="{threads}" }}
attributes #1 = {{ convergent nocallback nounwind }}
attributes #2 = {{ nounwind }}
!1 = !DIFile(filename: "sends.py", directory: "/kernels")
!2 = !DIFile(filename: "waits.py", directory: "/kernels")
!3 = distinct !DISubprogram(name: "wrong", scope: !1, file: !1, line: 1)
!4 = distinct !DILexicalBlockFile(scope: !3, file: !2, discriminator: 0)
!5 = !DILocation(line: 31, column: 1, scope: !4, inlinedAt: !7)
!6 = !DILocation(line: 12, column: 1, scope: !3)
!7 = !DILocation(line: 11, column: 1, scope: !3)
"""


#: What is right, by what it shows; threads of the program, and the body.
RIGHT = {
    "an argument": (32, BRANCH.replace("%c", "%same").format(SHUFFLE)),
    "a plain load from one address": (32, PLAIN + "\n  %c = icmp eq i64 %a0, 0" + BRANCH.format(SHUFFLE)),
    "the first warp, an exchange in it": (128, TID + "\n  %c = icmp ult i32 %t, 32" + BRANCH.format(SHUFFLE)),
    "a number of the warp": (
        128,
        TID + "\n  %w = lshr i32 %t, 5\n  %c = icmp eq i32 %w, 1" + BRANCH.format(SHUFFLE),
    ),
    "a reduction": (
        32,
        TID
        + "\n  %m = call i32 @llvm.nvvm.redux.sync.max(i32 %t, i32 -1)\n  %c = icmp eq i32 %m, 3"
        + BRANCH.format(BARRIER),
    ),
    "a reduction by exchanges in pairs": (32, reduced(16, 8, 4, 2, 1) + BRANCH.format(BARRIER)),
    "a reduction by exchanges of ROCm's": (32, reduced_on_rocm(5) + BRANCH.format(BARRIER)),
    "behind the branch": (
        32,
        TID
        + "\n  %c = icmp ult i32 %t, 16"
        + BRANCH.format("store i32 1, ptr addrspace(1) %from").replace("  ret void", f"  {BARRIER}\n  ret void"),
    ),
    "as many turns for all": (32, LOOP.format(SHUFFLE)),
    "turns for all, counted behind the loop": (32, LEFT + BRANCH.format(BARRIER)),
    "a function told by all": (32, calling("%n", "void", then=TOLD)),
    "a function whose name is quoted": (
        32,
        calling("%n", "void", then=TOLD).replace("@called(", '@"called__(i64,)c<8>"('),
    ),
    "what a function returns, told by all": (
        32,
        calling("%n", "i32", then="ret i32 %0", behind="%c = icmp eq i32 %r, 3" + BRANCH.format(BARRIER)),
    ),
    "what is the same of two that a function returns": (32, calling("%n", "{ i32, i32 }", then=TWO, behind=taken(0))),
    "values of one way that meet early": (32, TID + MEET_EARLY + BRANCH.format(SHUFFLE)),
    "a branch of all that the compiler made one with the first thread's": (
        32,
        TID + MERGED_AND.format(over="%same", operation=BARRIER),
    ),
    "the same in the other form": (32, TID + MERGED_OR.format(over="%same", operation=BARRIER)),
    "ways of all": (32, MEET.replace("%p", "%same") + BRANCH.format(BARRIER)),
}
#: What is wrong: also the operation and the cause that are named.
WRONG = {
    "two branches made one, of which neither is of all": (
        32,
        TID + "\n  %out = icmp ult i32 %t, 16" + MERGED_AND.format(over="%out", operation=BARRIER),
        "barrier.cta",
        "tid.x",
    ),
    "two branches made one, and the first thread alone": (
        32,
        TID + MERGED_AND.format(over="%same", operation="").replace("store i32 1, ptr addrspace(1) %from", BARRIER),
        "barrier.cta",
        "tid.x",
    ),
    "half a warp, a barrier": (
        128,
        TID + "\n  %c = icmp ult i32 %t, 16" + BRANCH.format(BARRIER),
        "barrier.cta",
        "tid.x",
    ),
    "half a warp, an exchange": (
        128,
        TID + "\n  %c = icmp ult i32 %t, 48" + BRANCH.format(SHUFFLE),
        "shfl.sync.idx",
        "tid.x",
    ),
    "the first warp, a barrier": (
        128,
        TID + "\n  %c = icmp ult i32 %t, 32" + BRANCH.format(BARRIER),
        "barrier.cta",
        "tid.x",
    ),
    "what each warp has reduced, a barrier": (
        128,
        TID
        + "\n  %m = call i32 @llvm.nvvm.redux.sync.max(i32 %t, i32 -1)\n  %c = icmp eq i32 %m, 3"
        + BRANCH.format(BARRIER),
        "barrier.cta",
        "tid.x",
    ),
    "an ordered load": (
        32,
        ACQUIRED + "\n  %c = icmp eq i64 %a0, 0" + BRANCH.format(SHUFFLE),
        "shfl.sync.idx",
        "ld.acquire",
    ),
    "a volatile load": (
        32,
        ACQUIRED.replace("acquire.sys", "volatile") + "\n  %c = icmp eq i64 %a0, 0" + BRANCH.format(SHUFFLE),
        "shfl.sync.idx",
        "ld.volatile",
    ),
    "a load from an address of the lane's own": (
        32,
        TID + "\n  " + LANE_WORD + "  %c = icmp eq i32 %w, 0" + BRANCH.format(SHUFFLE),
        "shfl.sync.idx",
        "tid.x",
    ),
    "a reduction of half the lanes": (32, reduced(8, 4, 2, 1) + BRANCH.format(SHUFFLE), "shfl.sync.idx", "tid.x"),
    "a reduction of which some lanes miss a step": (
        32,
        reduced_on_rocm(1) + BRANCH.format(SHUFFLE),
        "shfl.sync.idx",
        "",
    ),
    "turns of each lane's own": (
        32,
        TID + LOOP.replace("%n\n", "%t\n").format(SHUFFLE),
        "shfl.sync.idx",
        "tid.x",
    ),
    "turns of each lane's own, counted behind the loop": (
        32,
        TID + LEFT.replace("%n\n", "%t\n") + BRANCH.format(SHUFFLE),
        "shfl.sync.idx",
        "tid.x",
    ),
    "ways of each lane's own": (
        32,
        TID + "\n  %p = icmp ult i32 %t, 9" + MEET + BRANCH.format(SHUFFLE),
        "shfl.sync.idx",
        "tid.x",
    ),
    "another value that meets early": (
        32,
        TID
        + MEET_EARLY.replace("phi i32 [ 1, %left ], [ 2, %right ]\n", "phi i32 [ 3, %left ], [ 2, %right ]\n")
        + BRANCH.format(SHUFFLE),
        "shfl.sync.idx",
        "tid.x",
    ),
    "after some have returned": (
        32,
        TID + "\n  %c = icmp ult i32 %t, 9\n  br i1 %c, label %gone, label %go, !dbg !7\ngone:\n  ret void\ngo:\n"
        f"  {SHUFFLE}\n  ret void",
        "shfl.sync.idx",
        "tid.x",
    ),
    "a function told by each lane": (32, calling("%t", "void", then=TOLD), "barrier.cta", "tid.x"),
    "a function that only some call": (
        32,
        calling("%n", "void", then=f"{BARRIER}\n  ret void").replace(
            "  tail call", "  br i1 %u, label %in, label %out, !dbg !7\nout:\n  ret void\nin:\n  tail call"
        ),
        "barrier.cta",
        "tid.x",
    ),
    "what a function returns": (
        32,
        calling("%t", "i32", then="ret i32 %0", behind="%c = icmp eq i32 %r, 3" + BRANCH.format(BARRIER)),
        "barrier.cta",
        "tid.x",
    ),
    "what differs of two that a function returns": (
        32,
        calling("%n", "{ i32, i32 }", then=TWO, behind=taken(1)),
        "barrier.cta",
        "tid.x",
    ),
    "inline assembly": (
        32,
        ACQUIRED
        + "\n  %c = icmp eq i64 %a0, 0"
        + BRANCH.format('call void asm sideeffect "bar.warp.sync 0xffffffff;", "~{memory}"() #2, !dbg !6'),
        "bar.warp.sync",
        "ld.acquire",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_all_reach_passes(name: str) -> None:
    threads, body = RIGHT[name]
    assert divergences(ir(body, threads)) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_only_some_reach_is_found(name: str) -> None:
    """With the kernel, the operation, its line of source, the branch and its line, and what it depends on."""
    threads, body, operation, cause = WRONG[name]
    faults = [one for one in divergences(ir(body, threads)) if "hides" not in one]
    assert len(faults) == 1
    before, after = faults[0].split("they part at")
    assert before.startswith("wrong: ")
    assert operation in before
    assert "sends.py:12" in before
    assert re.search(r"br i1 %(?:\d+\.)?c\b|br i1 %(?:out|u)\b", after)
    assert "sends.py:11" in after
    assert cause in after
    assert "waits.py:31 < sends.py:11" in after


def test_what_the_compiler_may_move_is_refused_wherever_it_stands() -> None:
    hidden = (
        '%h = call i32 asm sideeffect "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r"(i32 %a) #2, !dbg !6\n  ret void'
    )
    (fault,) = divergences(ir(hidden, 32))
    assert "hides shfl." in fault
    assert "sends.py:12" in fault
    assert divergences(ir(hidden.replace("#2", "#1"), 32)) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("indirectbr ptr null, [label %a]", "does not know"),
        ("ret void\n}\n\ndefine void @more() #0 {\n  ret void", "2 kernels"),
        (calling("%n", "void", then="tail call fastcc void @called(i32 %0)\n  ret void"), "calls itself"),
        (
            calling("%n", "i32", then=BRANCH.format(BARRIER).replace("void", "i32 1") + "more:\n  ret i32 %0"),
            "returns at several places",
        ),
    ],
)
def test_ir_that_is_not_understood_is_refused(body: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        divergences(ir(body, 32))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", [pytest.param("", id="installed"), *other_tritons()])
def test_kernels_in_which_lanes_part(place: str) -> None:
    """Each is caught, for NVIDIA and AMD; and passes when the lanes have agreed before."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (place, environment.get("PYTHONPATH", ""))))
    command = [sys.executable, "-P", str(HERE / "diverging_kernels.py"), "sm_90", "gfx942"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 28
    for one in found:
        assert (one["faults"] == []) == one["agreed"], one
        assert all(one["kernel"] in fault and "diverging_kernels.py:" in fault for fault in one["faults"])
