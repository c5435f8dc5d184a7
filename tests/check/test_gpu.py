"""The check of GPUs on a stub of the driver, with kernels in Triton's interpreter: what passes, how faults are told."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from uccl_ep_serving.check import gpu

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

ROOT = Path(__file__).parents[2]

STUBBED = """
import json, sys
from tests.check import stub_driver
from uccl_ep_serving.check import gpu, workers

workers._GRACE_SECONDS = 0.3
parts = [part._replace(seconds=10.0) for part in gpu.PARTS if part.group == "probe"]
for function, wrong, body, ranks in json.loads(sys.argv[1]):
    limit = 0.3 if wrong == "hangs" else 10.0
    arguments = (function, wrong, body)
    parts.append(gpu.Part(f"{function} {wrong}", "probe", limit, ranks, stub_driver.with_fault, arguments))
report = gpu.run(("probe",), 100.0, setup=stub_driver.place, parts=parts)
print(json.dumps(report.plain()))
"""

#: (function of the driver, what it does, which check notices, ranks), and what is said.
WRONG = {
    ("HostRegister", "refuses", "host_memory", 1): ("cudaHostRegister", "operation not supported", "ulimit -l"),
    ("HostGetDevicePointer", "lies", "host_memory", 1): ("cudaHostRegister", "expected 0x123456789abcdef0", ""),
    ("Malloc", "refuses", "device_memory", 1): ("cudaMalloc", "operation not supported", "memory fraction"),
    ("Memset", "lies", "device_memory", 1): ("cudaMemset", "found -0x1111111111111112", ""),
    ("IpcOpenMemHandle", "lies", "peers", 2): ("cudaIpcOpenMemHandle", "the other process's kernel has stored", ""),
}
#: Those for which a process is ended, so that the next part begins with another.
ENDED = {
    ("Free", "hangs", "device_memory", 1): ("cudaFree", "an end within", "nvidia-smi"),
    ("IpcOpenMemHandle", "refuses", "peers", 2): ("cudaIpcOpenMemHandle", "operation not supported", "--ipc=host"),
}


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *arguments], env=given, capture_output=True, text=True, check=False, timeout=590
    )


def check_told(found: dict[str, Any], wrong: dict[tuple[str, str, str, int], tuple[str, ...]]) -> None:
    """Just what is wrong has failed, and is told."""
    failing = {f"{function} {how}" for function, how, _, _ in wrong}
    assert {name for name, part in found.items() if not part["passed"]} == failing, found
    for (function, how, _, _), said in wrong.items():
        fault = found[f"{function} {how}"]["fault"]
        assert all(words in fault for words in (*said, "Likely cause: ", "Next step: ")), fault


def saved(directory: Path, code: str) -> str:
    """``code`` as a script whose processes can start processes."""
    script = directory / "script.py"
    script.write_text("if __name__ == '__main__':\n" + textwrap.indent(code, "    "))
    return str(script)


def parts_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """By name, what became of each part."""
    try:
        return {part["name"]: part for part in json.loads(done.stdout)["parts"]}
    except ValueError:
        raise AssertionError(done.stdout + done.stderr) from None


def test_the_driver_call_by_call(tmp_path: Path) -> None:
    found = parts_of(python(saved(tmp_path, STUBBED), json.dumps(list(WRONG))))
    check_told(found, WRONG)
    assert found["peers"]["said"] == "opened by another process"
    assert "by two processes" in found["segments"]["said"]
    clock = re.fullmatch(r"steps of (\d+) ns, a look takes (\d+\.\d) ns", found["clock"]["said"])
    assert clock is not None, found["clock"]
    # a look of the interpreter takes microseconds, and is no step when it reads the same time again
    assert 0 < int(clock[1]) <= 2 * float(clock[2])


def test_the_store_of_a_check_is_nobody_elses() -> None:
    """It asks nobody who he is, and holds the secret of the check's Buffers."""
    store = gpu._private_store()
    local = f":{store.port:04X}"
    found = [
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[1].endswith(local) and line.split()[3] == "0A"  # it listens
    ]
    assert found == [f"0100007F{local}"]
    store.set("one", "1")
    assert store.get("one") == b"1"


@pytest.mark.interpreter
def test_a_call_that_hangs_and_one_that_leaves_the_other_rank_alone(tmp_path: Path) -> None:
    found = parts_of(python(saved(tmp_path, STUBBED), json.dumps(list(ENDED))))
    check_told(found, ENDED)
    assert found["Free hangs"]["seconds"] < 5


@pytest.mark.interpreter
@pytest.mark.timeout(600)
def test_everything_as_the_command_runs_it() -> None:
    command = ("-m", "uccl_ep_serving.cli.main", "check", "--gpu", "--json", "--seconds", "570")
    done = python(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["passed"], found["machine"], found["record"]) == (True, None, "")
    assert len(found["parts"]) == 20
    assert "Triton's interpreter" in found["device"]


LOSING = """
import json, sys
from uccl_ep_serving.check import gpu, operations
from tests.check import lost_kernel

parts = [gpu.Part(f"{mode} without {kernel}", "first", 60.0, ranks, lost_kernel.without, (kernel, mode))
         for mode, kernel, ranks in json.loads(sys.argv[1])]
print(json.dumps(gpu.run(("first",), 500.0, parts=parts).plain()))
"""

LOST = {
    ("low_latency", "combine_recv", 1): "kernels combine_send and combine_recv",
    ("low_latency", "dispatch_recv", 1): "kernel dispatch_recv",
    ("normal", "combine_rows", 2): "kernel combine_rows",
    ("normal", "dispatch_rows", 2): "kernel dispatch_rows",
}


@pytest.mark.interpreter
@pytest.mark.timeout(600)
def test_a_kernel_that_does_nothing_is_named(tmp_path: Path) -> None:
    found = parts_of(python(saved(tmp_path, LOSING), json.dumps(list(LOST))))
    for (mode, kernel, _), where in LOST.items():
        part = found[f"{mode} without {kernel}"]
        assert not part["passed"]
        assert part["fault"].startswith(where), part
