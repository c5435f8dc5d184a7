"""Operations between the lanes of a warp, and barriers, that only some of their threads may reach: found in LLVM IR.

Such an operation waits for ever, or takes what a lane never gave. No compiler says a word, and the optimizer may be
what moved it there: of intrinsics it knows that it must not (``convergent``), of inline assembly it does not.

For each value the analysis knows over which bits of the thread's index it may vary. No bit: it is the same in all
threads of a program. None of the low bits, five on CUDA and six on ROCm: the same in all lanes of a warp. A branch
parts threads where its condition varies, up to the block through which all ways lead. An operation between lanes must
not stand in between where the lanes of a warp part, a barrier not where any threads do.

What it takes for the same in all threads, beside constants and arguments: plain loads from an address that is the
same, because kernel boundaries and barriers order them. An ordered load is another thing: each thread asks for itself,
and the word changes meanwhile.

Behind the block through which all ways lead it takes the lanes to be together again. That they are on CUDA as soon as
one waits for another, which is all that counts here.
"""

from __future__ import annotations

import re
from functools import cached_property
from itertools import permutations

from tests.kernels.flow_graph import loops, postdominators, reached
from tests.kernels.llvm_calls import inlined
from tests.kernels.llvm_ir import Function, Instruction, arguments, read
from tests.kernels.merged_branches import apart

__all__ = ["divergences"]

#: More than any program has.
_THREADS = 1024
_BARRIER = re.compile(r"llvm\.nvvm\.(?:barrier|bar\.sync)|llvm\.amdgcn\.s\.barrier")
#: Convergent, and nothing that lanes wait for: these keep the compiler from moving instructions.
_NO_OPERATION = re.compile(r"llvm\.amdgcn\.(?:sched|wave)\.")
#: What they give is the same in all lanes of a warp.
_REDUCES = re.compile(
    r"llvm\.nvvm\.(?:redux\.sync|vote\.(?:any|all|uni|ballot)|activemask)|llvm\.amdgcn\.(?:readfirstlane|readlane|ballot)"
)
_HIDDEN = re.compile(
    r"\b(?:shfl|redux|vote|match|elect|barrier|bar|mma|wgmma|ldmatrix|stmatrix)\.|\bbarrier\b|activemask"
    r"|s_barrier|v_read(?:first)?lane|v_writelane|ds_b?permute|ds_swizzle|v_permlane|_dpp\b|\brow_|quad_perm"
)
#: Inline assembly that reads what each thread reads for itself: a word that others write meanwhile, a clock, its place.
_OWN = re.compile(
    r"\b(?:ld\.(?:volatile|acquire|relaxed|mmio)|atom|multimem)\b|%(?:tid|laneid|lanemask|warpid|clock|globaltimer)"
    r"|\b(?:global|flat|buffer)_(?:load|atomic)|s_memrealtime|s_memtime|v_mbcnt"
)
_SAME_EVERYWHERE = re.compile(r"sreg\.(?:n?ctaid|ntid)\.[xyz]$|workgroup\.id|dispatch\.ptr|implicitarg|kernarg")
_INDEX = re.compile(r"sreg\.tid\.x|workitem\.id\.x")
#: Operations whose operands may change places.
_EVEN = re.compile(r"(?:tail )?(?:call .*@llvm\.[su]?(?:min|max)\w*\.|(?:add|mul|and|or|xor|fadd|fmul) )")
#: Values in halves, and whole again.
_CONVERSIONS = {"zext", "trunc", "shl", "lshr", "or", "bitcast", "insertelement", "extractelement", "freeze"}
#: How ``update.dpp`` changes a lane's number, by its control word: quad_perm, row_ror:8, row_mirror, row_half_mirror.
_DPP = {"177": 1, "78": 2, "27": 3, "296": 8, "320": 15, "321": 7}
#: Lanes four away take each other's values in two steps, row_shr:4 into the second four of eight, row_shl:4 into the
#: first: control word, rows and banks.
_DOWN, _UP = ["276", "15", "10"], ["260", "15", "5"]
_READS = re.compile(r"\.sreg\.|workitem|mbcnt|memtime|memrealtime|s\.getreg|clock")


def divergences(text: str) -> list[str]:
    """What is wrong in the IR ``text`` of a kernel: which operation, on which line of the source, and the branch at
    which threads part."""
    return _Analysis(apart(inlined(*read(text)))).faults()


class _Analysis:
    """Of one kernel: over which bits of the thread's index each value varies, as a mask."""

    def __init__(self, function: Function) -> None:
        self._function, self._name = function, function.name
        self._all = (function.threads or _THREADS) - 1
        self._lanes = function.lanes - 1
        self._ahead = function.ahead
        self._code = [one for block in function.blocks for one in block]
        self._defined = {one.name: one for one in self._code if one.name}
        merged: dict[int, frozenset[int]] = {}
        for head, blocks in loops(self._ahead):
            merged[head] = merged.get(head, frozenset()) | blocks
        self._loops, self._heads = list(merged.values()), set(merged)
        self._around = [
            frozenset(number for number, blocks in enumerate(self._loops) if place in blocks)
            for place in range(len(self._ahead))
        ]
        self._varies: dict[str, int] = {}
        #: of a value, the one from which it first had its bits
        self._from: dict[str, str] = {}
        #: of a value that is part of the thread's index: by how many bits that was shifted right
        self._index: dict[str, int] = {}
        for one in self._code:
            self._find_index(one)
        #: blocks at whose ends threads part
        self._parting: set[int] = set()
        #: of a block: the branches that part threads before it, and those behind which they meet in it
        self._under: list[set[int]] = [set() for _ in self._ahead]
        self._meet: list[set[int]] = [set() for _ in self._ahead]
        #: of a loop: the bits over which the number of its turns varies
        self._turns = [0] * len(self._loops)
        #: of a value made of another and of what other lanes have of it: that one, how the lanes' numbers differ, and
        #: what else it is made of
        self._folds = {one.name: fold for one in self._code if (fold := self._fold(one))}
        while self._values() | self._branches():
            pass

    @cached_property
    def _passed(self) -> list[frozenset[int]]:
        return postdominators(self._ahead)

    def faults(self) -> list[str]:
        found = []
        for one in self._code:
            hidden = _HIDDEN.search(one.assembly)
            if hidden and not one.convergent:
                found.append(f"{self._name}: {self._say(one)} hides {hidden.group()}: the compiler may move it")
            if hidden or (one.convergent and not _NO_OPERATION.search(one.callee)):
                waiting = self._all if _BARRIER.search(one.callee or one.assembly) or hidden else self._lanes
                parting = [place for place in self._under[one.block] if self._condition(place) & waiting]
                parting = [place for place in parting if not self._packed(one, place)]
                if parting:
                    found.append(self._fault(one, parting))
        return found

    def _packed(self, one: Instruction, place: int) -> bool:
        """The branch and the exchange are one atomic of Triton's on ROCm, which moves the lanes that take part to the
        front of the warp, and has these sum up what they add to the same word."""
        branch = self._function.blocks[place][-1]
        return ".amdgcn." in one.callee and one.place != "" and one.place == branch.place

    def _fault(self, one: Instruction, parting: list[int]) -> str:
        """The nearest branch before the operation is named, else the first after it."""
        place = max(parting, key=lambda block: (block < one.block, block if block < one.block else -block))
        branch = self._function.blocks[place][-1]
        origin = branch.operands[0]
        while origin in self._from:
            origin = self._from[origin]
        cause = self._defined[origin]
        return (
            f"{self._name}: {self._say(one)} is not reached by all threads that it waits for: "
            f"they part at {self._say(branch)}, because of {self._say(cause)}"
        )

    def _say(self, one: Instruction) -> str:
        what = one.callee or " ".join(one.assembly.split())[:80] or one.text
        return f"{what!r} (line {one.line} of the IR, {self._function.source(one)})"

    def _condition(self, place: int) -> int:
        """Bits over which the branch at the end of a block varies."""
        operands = self._function.blocks[place][-1].operands
        return self._seen(operands[0], place) if operands and len(self._ahead[place]) > 1 else 0

    def _seen(self, name: str, place: int) -> int:
        """Bits over which a value varies in a block: when threads leave a loop in different turns, also over those."""
        bits = self._varies.get(name, 0)
        if name in self._defined:
            for left in self._around[self._defined[name].block] - self._around[place]:
                bits |= self._turns[left]
        return bits

    def _branches(self) -> bool:
        """Note what the branches that part threads do; True when one is new, or parts more."""
        changed = False
        for place, following in enumerate(self._ahead):
            bits = self._condition(place)
            if not bits:
                continue
            if place not in self._parting:
                changed = True
                self._parting.add(place)
                beyond = self._passed[place] - {place}
                between = reached(self._ahead, following, beyond)
                for one in between:
                    self._under[one].add(place)
                # where ways from the branch may meet, the next block that all pass included
                for one in between | {one for block in [*between, place] for one in self._ahead[block]}:
                    self._meet[one].add(place)
        for number, blocks in enumerate(self._loops):
            bits = self._turns[number]
            for place in blocks:
                if not blocks.issuperset(self._ahead[place]):
                    bits |= self._condition(place)
                    for branch in self._under[place] & blocks:
                        bits |= self._condition(branch)
            changed |= bits != self._turns[number]
            self._turns[number] = bits
        return changed

    def _values(self) -> bool:
        """Carry the bits from operands to results until nothing changes; True when something did."""
        changed, again = False, True
        while again:
            again = False
            for one in self._code:
                if one.name:
                    bits = self._varies.get(one.name, 0) | self._result(one)
                    if bits != self._varies.get(one.name, 0):
                        self._note(one)
                        self._varies[one.name] = bits
                        changed = again = True
        return changed

    def _note(self, one: Instruction) -> None:
        """Remember from which value the result first has bits."""
        if one.name in self._varies:
            return
        causes = [name for name in one.operands if self._varies.get(name, 0)]
        places = set(self._meet[one.block]) if one.opcode == "phi" else set()
        for name in one.operands:
            if name in self._defined:
                for left in self._around[self._defined[name].block] - self._around[one.block]:
                    places |= self._loops[left] & self._parting
        branches = [self._function.blocks[place][-1].operands[0] for place in sorted(places)]
        causes += [name for name in branches if self._varies.get(name, 0)]
        if causes and causes[0] != one.name:
            self._from[one.name] = causes[0]

    def _result(self, one: Instruction) -> int:
        bits = 0
        for name in one.operands:
            bits |= self._seen(name, one.block)
        if one.name in self._folds:
            folded, change, others = self._folds[one.name]
            bits = self._seen(folded, one.block)
            change &= bits
            # two lanes that exchange their values and combine them have the same then
            if change & change - 1 == 0:
                bits &= ~change
            for name in others:
                bits |= self._seen(name, one.block)
            return bits
        if one.opcode == "phi":
            return bits | self._joined(one)
        if one.opcode == "call":
            return self._called(one, bits)
        if re.match(r"load (?:volatile|atomic)|atomicrmw|cmpxchg|alloca", one.text.partition(" = ")[2]):
            return self._all
        return self._indexed(one, bits)

    def _joined(self, one: Instruction) -> int:
        """Of a phi, what it has from the branches behind which threads meet in its block: where the ways from there
        bring different values."""
        bits = 0
        for place in self._meet[one.block]:
            if len(self._brought(one, place)) > 1:
                bits |= self._condition(place)
        return bits

    def _brought(self, phi: Instruction, place: int) -> set[str]:
        """How the values of ``phi`` come about on the ways from ``place``. What another phi joins on such a way counts
        as what it has from there: the compiler brings ways together before they meet."""
        found: set[str] = set()
        joined, left = set[str](), [phi]
        while left:
            for name, way in _ways(left.pop()):
                inner = self._defined.get(name)
                if not self._leads(place, self._function.labels.get(way, 0)) or name in joined:
                    continue
                if inner and inner.opcode == "phi" and self._joins_between(inner, place):
                    joined.add(name)
                    left.append(inner)
                else:
                    found.add(self._form(name))
        return found

    def _joins_between(self, phi: Instruction, place: int) -> bool:
        """Threads that part at ``place`` come to ``phi`` before they meet, and not in another turn of a loop."""
        return (
            place in self._under[phi.block]
            and phi.block not in self._heads
            and self._around[phi.block] == self._around[place]
        )

    def _leads(self, place: int, block: int) -> bool:
        """Threads that part at ``place`` may come through ``block`` before all of them meet."""
        return block == place or place in self._under[block]

    def _form(self, name: str) -> str:
        """How a value comes about, as far as it is the same wherever that is asked for: the compiler does that twice,
        also on one of two ways only."""
        one = self._defined.get(name)
        if one is None:
            return name
        form = one.text.partition(" = ")[2]
        if not (
            _INDEX.search(one.callee) or re.match(r"(?:load (?!volatile|atomic)|extractelement|[sz]ext|trunc) ?", form)
        ):
            return name
        return re.sub(r"%[\w.$-]+", lambda operand: self._form(operand.group()), form.removeprefix("tail "))

    def _called(self, one: Instruction, bits: int) -> int:
        if one.assembly:
            if _OWN.search(one.assembly):
                bits = self._all
            # on ROCm a scalar register, one for a warp
            return bits & ~self._lanes if re.match(r"=&?s", one.constraints) else bits
        if _SAME_EVERYWHERE.search(one.callee):
            return 0
        if _READS.search(one.callee):
            return self._all
        if _REDUCES.search(one.callee):
            return bits & ~self._lanes
        if self._exchanged(one):
            return self._seen(arguments(one)[1], one.block)
        if "shfl.sync" in one.callee:
            return self._shuffled(one, bits)
        return bits | self._lanes if one.convergent else bits

    def _shuffled(self, one: Instruction, bits: int) -> int:
        """``shfl.sync(lanes, value, place, segments)``."""
        _, _, place, segments = arguments(one)
        # some forms also say which lanes had nobody to take from
        if not one.callee.endswith(("i32", "f32")):
            return bits | self._lanes
        if "idx" in one.callee and segments == "31" and not self._seen(place, one.block) & self._lanes:
            return bits & ~self._lanes
        return bits | self._lanes if bits & self._lanes else bits

    def _exchanged(self, one: Instruction) -> int:
        """Where lanes exchange values in pairs: how the numbers of a pair differ. 0 for other operations."""
        if "shfl.sync.bfly" in one.callee and one.callee.endswith(("i32", "f32")):
            _, _, change, segments = arguments(one)
            return int(change) if change.isdigit() and segments == "31" else 0
        if "amdgcn.update.dpp" in one.callee:
            old, value, *how, _ = arguments(one)
            first = self._defined.get(old)
            if how == _UP and first and first.callee == one.callee and arguments(first)[1:-1] == [value, *_DOWN]:
                return 4
            control, rows, banks = how
            return _DPP.get(control, 0) if (rows, banks) == ("15", "15") else 0
        if "amdgcn.ds.bpermute" in one.callee:
            # the address is four times the lane
            place = self._defined.get(arguments(one)[0])
            change = re.search(r"xor i32 %\S+, (\d+)$", place.text) if place else None
            return int(change.group(1)) >> 2 if change and self._index.get(place.operands[0]) == -2 else 0
        return 0

    def _fold(self, one: Instruction) -> tuple[str, int, list[str]] | None:
        operation = _EVEN.match(one.text.partition(" = ")[2])
        if len(one.operands) != 2 or not operation:
            return None
        # the compiler may have brought a third value in between
        ways = [list(one.operands)]
        for name, rest in permutations(one.operands):
            inner = self._defined.get(name)
            if inner and len(inner.operands) == 2 and inner.text.partition(" = ")[2].startswith(operation.group()):
                ways.append([rest, *inner.operands])
        for parts, (own, other) in ((way, pair) for way in ways for pair in permutations(way, 2)):
            taken = [self._taken(name) for name in self._whole(other)]
            changes = {change for change, _ in taken}
            sources = {name for _, source in taken for name in self._whole(source)}
            if len(changes) == 1 and 0 not in changes and sources == self._whole(own):
                return own, changes.pop(), [name for name in parts if name not in (own, other)]
        return None

    def _taken(self, name: str) -> tuple[int, str]:
        """How far away a value comes from, over several exchanges, and which one it is there."""
        away = 0
        while one := self._defined.get(name):
            if change := self._exchanged(one):
                name = arguments(one)[1]
            elif swapped := self._swapped(one):
                change, name = swapped
            else:
                break
            away ^= change
        return away, name

    def _swapped(self, one: Instruction) -> tuple[int, str] | None:
        """``permlane*.swap`` of a value with itself gives a lane both its own and that of its pair: the one of the two
        that is not its own is chosen. How the numbers of the pair differ, and the value."""
        chosen = re.search(r"select i1 (%\S+), i32 (%\S+), i32 (%\S+)", one.text)
        if not chosen:
            return None
        compared, other, first = (self._defined.get(name) for name in chosen.groups())
        swap = first and self._defined.get(first.operands[0])
        width = swap and re.search(r"permlane(\d+)\.swap\(i32 (%\S+), i32 (%\S+),", swap.text)
        if not (width and compared and other and width[2] == width[3]):
            return None
        own = compared.text.endswith(f"icmp eq i32 {chosen[3]}, {width[2]}")
        halves = first.text.endswith(", 0") and other.text.endswith(", 1") and other.operands == first.operands
        return (int(width[1]), width[2]) if own and halves else None

    def _whole(self, name: str) -> set[str]:
        """The values of which ``name`` is another form, or a half, or halves."""
        one = self._defined.get(name)
        if one is None or one.opcode not in _CONVERSIONS or not one.operands:
            return {name}
        return {whole for part in one.operands for whole in self._whole(part)}

    def _find_index(self, one: Instruction) -> None:
        if one.opcode == "phi":
            # also where the index was asked for on both ways
            if all(self._index.get(name) == 0 and self._defined[name].callee for name, _ in _ways(one)):
                self._index[one.name] = 0
        elif _INDEX.search(one.callee):
            self._index[one.name] = 0
        elif len(one.operands) == 1 and one.operands[0] in self._index:
            shift = self._index[one.operands[0]]
            if one.opcode in {"zext", "sext", "trunc", "freeze", "or", "xor", "and"}:
                self._index[one.name] = shift
            elif one.opcode in {"lshr", "shl"}:
                self._index[one.name] = shift + (_constant(one) if one.opcode == "lshr" else -_constant(one))

    def _indexed(self, one: Instruction, bits: int) -> int:
        """Of arithmetic. Parts of the thread's index are followed bit by bit: its warp is the same in all lanes."""
        if len(one.operands) != 1 or one.operands[0] not in self._index:
            return bits
        shift, constant = self._index[one.operands[0]], _constant(one)
        if one.opcode == "and":
            return bits & (constant << shift if shift >= 0 else constant >> -shift)
        if one.opcode == "lshr":
            return bits & -1 << max(shift + constant, 0)
        if shift >= 0 and (compared := re.search(r"icmp (?:samesign )?[su](\w\w) ", one.text)):
            # below a multiple of 32, all lanes of a warp are or none is
            border = constant + (compared.group(1) in {"gt", "le"})
            return bits & -1 << shift + (border & -border).bit_length() - 1 if border > 0 else bits
        return bits


def _ways(phi: Instruction) -> list[tuple[str, str]]:
    """Values, names or constants, and the blocks that they come from."""
    return re.findall(r"\[ ([^,]+), %([^ \]]+) \]", phi.text)


def _constant(one: Instruction) -> int:
    """The number that is the second operand, or 0."""
    number = re.search(r", (-?\d+)$", one.text)
    return int(number.group(1)) if number else 0
