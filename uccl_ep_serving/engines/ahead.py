"""Compiling while the engine imports and loads its weights: in a process of its own, ended with the launcher's.

When the ranks open their Buffers they load what it has compiled, wait for what it is at, and compile the rest. Nothing
is started where everything is in the cache.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys

from uccl_ep_serving.kernels.select import cpu_groups
from uccl_ep_serving.native.background import start_thread
from uccl_ep_serving.native.failure import STICKY_ERROR
from uccl_ep_serving.native.groups import Group, load
from uccl_ep_serving.proxy.loop import LOOP

__all__ = ["compile_ahead"]

_log = logging.getLogger("uccl_ep_serving")

#: prctl(2): the signal that this process gets when the one that started it ends.
_PR_SET_PDEATHSIG = 1


def _groups(cpu: bool) -> list[Group]:
    """What every rank needs, and what ranks of CPU tensors need."""
    return [LOOP, STICKY_ERROR, *(cpu_groups() if cpu else ())]


def compile_ahead(device: str) -> subprocess.Popen[bytes] | None:
    """Begin to compile what ranks on ``device`` ("cpu", "cuda") will need; None where nothing is missing, or no process
    can be started. The process ends by itself, and no later than this one."""
    cpu = device.partition(":")[0] == "cpu"
    if all(group.cached for group in _groups(cpu)):
        return None
    command = [sys.executable, "-m", __name__, str(os.getpid()), *(["cpu"] if cpu else [])]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    except OSError as error:
        _log.info("uccl_ep: nothing is compiled ahead (%s): the ranks do it when they start", error)
        return None
    # taken off the system's list of processes once it has ended
    start_thread("uccl_ep ahead", _wait, process)
    return process


def _wait(process: subprocess.Popen[bytes]) -> None:
    process.wait()


def main(parent: int, cpu: bool) -> None:
    """Compile what is missing, unless process ``parent`` has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent:
        load(*_groups(cpu))


if __name__ == "__main__":
    main(int(sys.argv[1]), "cpu" in sys.argv[2:])
