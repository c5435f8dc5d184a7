"""The table of struct offsets against the headers of rdma-core, as a C compiler sees them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from uccl_ep_serving.config import cache_base
from uccl_ep_serving.proxy.transport.verbs.abi import QP_ATTR, SEND_WR, STRUCTS, Block, Struct


def _include_directories() -> list[Path]:
    """Installed headers, and those that the soft-RoCE guest keeps in its cache."""
    cached = [Path(base) / "uccl_ep_serving" / "rdma-guest" / "root" / "usr" / "include" for base in cache_base()]
    return [path for path in (Path("/usr/include"), *cached) if (path / "infiniband" / "efadv.h").exists()]


def _release(include: Path) -> int:
    """rdma-core's release, from libibverbs.pc beside the headers (its version is 1.<abi>.<release>.0)."""
    for file in sorted((include.parent / "lib").rglob("libibverbs.pc")):
        for line in file.read_text().splitlines():
            if line.startswith("Version:"):
                return int(line.split(".")[2])
    return 0


def _program(structs: tuple[Struct, ...], release: int) -> str:
    """C that prints name, offset (or size) and length of every field in the table."""
    lines = ["#include <stddef.h>", "#include <stdio.h>"]
    lines += [f"#include <{header}>" for header in sorted({struct.header for struct in structs})]
    lines.append("int main(void) {")
    for struct in structs:
        kind = f"struct {struct.name}"
        lines.append(f'printf("{struct.name} %zu\\n", sizeof({kind}));')
        for name, field in struct.fields.items():
            if field.since <= release:
                place = f"(long)offsetof({kind}, {name})"
                lines.append(f'printf("{struct.name}.{name} %ld %zu\\n", {place}, sizeof((({kind} *)0)->{name}));')
    return "\n".join([*lines, "return 0; }"])


def test_offsets_are_those_of_the_headers(tmp_path: Path) -> None:
    compiler, includes = shutil.which("cc"), _include_directories()
    if compiler is None or not includes:
        pytest.skip("no C compiler" if compiler is None else "no headers: apt-get install libibverbs-dev")
    for number, include in enumerate(includes):
        release = _release(include)
        source, program = tmp_path / f"offsets{number}.c", tmp_path / f"offsets{number}"
        source.write_text(_program(STRUCTS, release))
        flags = [] if include == Path("/usr/include") else ["-I", os.fspath(include)]
        subprocess.run([compiler, *flags, "-o", program, source], check=True, timeout=60)
        lines = subprocess.run([program], check=True, capture_output=True, text=True, timeout=10).stdout.splitlines()
        found = {name: tuple(map(int, numbers)) for name, *numbers in (line.split() for line in lines)}
        for struct in STRUCTS:
            # rdma-core appends to these, and to nothing else of the table
            grows = struct.name in {"ibv_qp_ex", "ibv_port_attr"}
            size = found[struct.name][0]
            assert size >= struct.nbytes if grows else size == struct.nbytes, struct.name
            for name, field in struct.fields.items():
                if field.since <= release:
                    assert found[f"{struct.name}.{name}"] == (field.offset, field.nbytes), f"{struct.name}.{name}"


def test_fields_lie_inside_their_struct_and_apart() -> None:
    for struct in STRUCTS:
        places = sorted((field.offset, field.nbytes, name) for name, field in struct.fields.items())
        for (start, nbytes, name), following in zip(places, [*places[1:], None], strict=True):
            end = struct.nbytes if following is None else following[0]
            assert start >= 0
            assert start + nbytes <= end, f"{struct.name}.{name} runs into what follows"


def test_blocks_hold_what_was_stored() -> None:
    block = Block(SEND_WR, wr_id=2**64 - 1, num_sge=1)
    block["imm_data"] = 0xDEADBEEF
    assert (block["wr_id"], block["num_sge"], block["imm_data"], block["next"]) == (2**64 - 1, 1, 0xDEADBEEF, 0)
    attributes = Block(QP_ATTR)
    QP_ATTR.set_bytes(attributes.address, "ah_attr.grh.dgid", bytes(range(16)))
    assert QP_ATTR.get_bytes(attributes.address, "ah_attr.grh.dgid") == bytes(range(16))
    assert attributes["ah_attr.grh.sgid_index"] == 0
    with pytest.raises(ValueError, match="17 bytes"):
        QP_ATTR.set_bytes(attributes.address, "ah_attr.grh.dgid", bytes(17))
