"""Compiling while the engine imports and loads its weights: in a process of its own, ended with the launcher's.

When the ranks open their Buffers they load what it has compiled, wait for what it is at, and compile the rest. Nothing
is started where everything is in the cache.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys

from uccl_ep_serving.errors import TransportError
from uccl_ep_serving.kernels.select import cpu_groups
from uccl_ep_serving.native.background import die_with_parent, start_thread
from uccl_ep_serving.native.failure import STICKY_ERROR
from uccl_ep_serving.native.groups import Group, load
from uccl_ep_serving.proxy.loop import LOOP

__all__ = ["compile_ahead"]

_log = logging.getLogger("uccl_ep_serving")


def _groups(cpu: bool) -> list[Group]:
    """What every rank needs, and what ranks of CPU tensors need. Transports are known once the ranks have met."""
    return [LOOP, STICKY_ERROR, *(cpu_groups() if cpu else ())]


@functools.cache
def compile_ahead(device: str) -> None:
    """Begin to compile what ranks on ``device`` ("cpu", "cuda") will need, once in a process and in the background.

    A convenience, so that nothing it meets may keep an engine from starting.
    """
    try:
        start_thread("uccl_ep ahead", _compile, device.partition(":")[0] == "cpu")
    except TransportError as error:
        _log.debug("uccl_ep: nothing is compiled ahead: %s", error)


def _compile(cpu: bool) -> None:
    """Run the process to its end: it is killed when the thread that started it ends."""
    try:
        if not all(group.cached for group in _groups(cpu)):
            command = [sys.executable, "-m", __name__, str(os.getpid()), *(["cpu"] if cpu else [])]
            # as for the console scripts of the engines, the working directory holds no modules
            environment = {**os.environ, "PYTHONSAFEPATH": "1"}
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    except Exception as error:  # of any kind: the ranks compile when they start
        _log.debug("uccl_ep: nothing is compiled ahead: %s", error)


def main(parent: int, cpu: bool) -> None:
    """Compile what is missing, unless process ``parent`` has ended."""
    try:
        die_with_parent(parent)
    except OSError:
        return
    load(*_groups(cpu))


if __name__ == "__main__":
    main(int(sys.argv[1]), "cpu" in sys.argv[2:])
