"""Reads the LLVM IR that Triton keeps of a kernel and the functions that it calls: basic blocks, instructions, and the
lines of Python they come from.

Of a text that it does not understand it says so, with the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["NAME", "Function", "Instruction", "arguments", "read"]

#: Of a value or a label.
NAME = r"%[\w.$-]+"
#: Quoted text holds no quotation mark: LLVM writes those as ``\\22``.
_QUOTED = re.compile(r'"([^"]*)"')
_ASSEMBLY = re.compile(r'\basm (?:\w+ )*"([^"]*)", "([^"]*)"')


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        line: in the text, from 1.
        block: number of its basic block.
        name: of its result with the ``%``, or "".
        opcode: its first word, of calls "call".
        callee: function that a call names, or "".
        assembly, constraints: inline assembly and its operands, or "".
        convergent: control flow around it must stay what it is.
        operands: names of the values it uses. Labels are none.
        text: as it stands there, without metadata and quoted text.
        place: number of its debug location, or "".
    """

    line: int
    block: int
    name: str
    opcode: str
    callee: str
    assembly: str
    constraints: str
    convergent: bool
    operands: tuple[str, ...]
    text: str
    place: str


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel, or a function that it calls.

    Attributes:
        name: of a kernel, as a profile shows it. parameters: with the ``%``.
        threads: of a program, 0 where the text does not say.
        lanes: of a warp.
        blocks: the last instruction of each ends it.
        ahead: numbers of the blocks that follow each.
        labels: numbers of the blocks by name; the first one's may be missing.
        metadata: nodes of the debug information, by their numbers.
    """

    name: str
    parameters: tuple[str, ...]
    threads: int
    lanes: int
    blocks: list[list[Instruction]]
    ahead: list[list[int]]
    labels: dict[str, int]
    metadata: dict[str, str]

    def source(self, instruction: Instruction) -> str:
        """``file:line`` of the kernel's source, then of the calls that led there."""
        found, number = [], instruction.place
        while number:
            node = self.metadata[number]
            found.append(f"{self._file(_part(node, 'scope'))}:{_part(node, 'line')}")
            number = _part(node, "inlinedAt")
        return " < ".join(found) or "no line of source"

    def _file(self, scope: str) -> str:
        node = self.metadata[scope]
        file = _part(node, "file")
        name = re.search(r'filename: "([^"]*)"', self.metadata[file]) if file else None
        return name.group(1) if name else self._file(_part(node, "scope"))


def _part(node: str, key: str) -> str:
    """The number that a node of the debug information has under ``key``, or ""."""
    found = re.search(rf"\b{key}: !?(\d+)", node)
    return found.group(1) if found else ""


def read(text: str) -> tuple[Function, dict[str, Function]]:
    """The kernel that ``text`` defines, and by name the functions that it calls.

    Raises:
        ValueError: there are more kernels or none, or an instruction that ends a block and is not known.
    """
    # Triton 3.6 puts types into names of functions, which LLVM then quotes
    text = re.sub(r'@"([^"]*)"\(', lambda name: "@" + re.sub(r"[^\w.]", "_", name.group(1)) + "(", text)
    lines = text.splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("define ")]
    called = [place for place in starts if lines[place].startswith("define internal ")]
    if len(starts) != len(called) + 1:
        raise ValueError(f"the IR defines {len(starts) - len(called)} kernels: one is read")
    attributes = dict(re.findall(r"^attributes #(\d+) = \{(.*)\}", text, re.MULTILINE))
    metadata = dict(re.findall(r"^!(\d+) = (?:distinct )?!(DI\w+\(.*\))$", text, re.MULTILINE))
    convergent = {number for number, words in attributes.items() if "convergent" in _QUOTED.sub("", words).split()}
    declared = re.findall(r"^declare .*?@([\w.]+)\(.*#(\d+)", text, re.MULTILINE)
    converging = {name for name, number in declared if number in convergent}
    found = [_function(lines, place, attributes, metadata, converging, convergent) for place in starts]
    kernel = found[starts.index(next(place for place in starts if place not in called))]
    return kernel, {one.name: one for one in found if one is not kernel}


def _function(
    lines: list[str],
    start: int,
    attributes: dict[str, str],
    metadata: dict[str, str],
    converging: set[str],
    convergent: set[str],
) -> Function:
    """The function whose head is line ``start``; ``converging`` are functions, ``convergent`` numbers of attributes."""
    head = re.match(r"define .*?@([\w.]+)\((.*)\).*?#(\d+)", lines[start])
    if not head:
        raise ValueError(f"line {start + 1} of the IR defines a function without attributes: {lines[start][:200]}")
    name, parameters, number_of = head.groups()
    size = re.search(r'"nvvm\.reqntid"="(\d+)|"amdgpu-flat-work-group-size"="\d+,(\d+)', attributes[number_of])
    labels: dict[str, int] = {}
    blocks: list[list[Instruction]] = [[]]
    targets: list[list[str]] = [[]]
    place = start + 1
    while lines[place] != "}":
        line, number = lines[place], place + 1
        label = re.match(r"([\w.$-]+):", line)
        if label:
            labels[label.group(1)] = len(blocks)
            blocks.append([])
            targets.append([])
        elif line.strip() and not line.lstrip().startswith((";", "#dbg")):
            # the targets of a switch stand on lines of their own
            while line.count("[") > line.count("]"):
                place += 1
                line += lines[place]
            blocks[-1].append(_instruction(line, number, len(blocks) - 1, converging, convergent))
            targets[-1] += re.findall(rf"label ({NAME})", line)
        place += 1
    for block in blocks:
        if not block or block[-1].opcode not in {"br", "switch", "ret", "unreachable"}:
            last = block[-1].text if block else "nothing"
            raise ValueError(f"a basic block of the IR ends with {last}: tests/kernels/llvm_ir.py does not know it")
    names = tuple(re.findall(NAME, parameters))
    # the label of the first block, where the text leaves it out: a number as the next unnamed value would have
    labels.setdefault(str(len(names)), 0)
    return Function(
        name,
        names,
        int(size.group(1) or size.group(2)) if size else 0,
        64 if "amdgpu_kernel" in lines[start] else 32,
        blocks,
        [list(dict.fromkeys(labels[one[1:]] for one in following)) for following in targets],
        labels,
        metadata,
    )


def _instruction(line: str, number: int, block: int, converging: set[str], convergent: set[str]) -> Instruction:
    """What ``line`` says; ``converging`` are functions, ``convergent`` numbers of attributes."""
    place = re.search(r"!dbg !(\d+)", line)
    assembly = _ASSEMBLY.search(line)
    text = re.sub(r", ![\w.]+ !\d+", "", _QUOTED.sub('""', line)).strip()
    name, equals, rest = text.partition(" = ")
    if not equals or not re.fullmatch(NAME, name):
        name, rest = "", text
    opcode = re.sub(r"^(?:tail|musttail|notail) ", "", rest).split(" ", 1)[0]
    callee = re.search(r"@([\w.]+)\(", rest) if opcode == "call" else None
    group = re.search(r"\) #(\d+)", rest)
    if opcode == "phi":
        operands = re.findall(rf"\[ ({NAME}),", rest)
    else:
        operands = re.findall(NAME, re.sub(rf"label {NAME}", "", rest))
    return Instruction(
        number,
        block,
        name,
        opcode,
        callee.group(1) if callee else "",
        assembly.group(1).replace("\\0A", "\n").replace("\\09", "\t") if assembly else "",
        assembly.group(2) if assembly else "",
        bool(callee and callee.group(1) in converging) or bool(group and group.group(1) in convergent),
        tuple(operands),
        text,
        place.group(1) if place else "",
    )


def arguments(call: Instruction) -> list[str]:
    """Names or numbers that a call passes: the last word before each comma outside of other parentheses."""
    parts, depth = [""], 0
    for letter in call.text.partition(f"@{call.callee}(")[2]:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [one.split()[-1] for one in parts if one.strip()]
