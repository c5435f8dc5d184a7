"""Runs a subject in a process of its own, and says how that ended: in order, with a wrong case, by a crash."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.subject import Wrong

__all__ = ["blocks"]

_ROOT = Path(__file__).resolve().parents[2]
#: Of a block, and of compiling before the first one: a case that hangs is ended after it.
_MOST_SECONDS = 600.0


def blocks(name: str, first: int, count: int) -> Iterator[dict[str, Any]]:
    """The lines of the child (see :mod:`.child`). Raises Wrong, also when the child has crashed or hangs."""
    with tempfile.NamedTemporaryFile(prefix="uccl-ep-fuzz-") as place:
        place.write(bytes(8))
        place.flush()
        command = [sys.executable, "-m", "tests.fuzz.child", name, str(first), str(count), place.name]
        with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                for line in _lines(child):
                    found = json.loads(line)
                    if "wrong" in found:
                        raise Wrong(found["wrong"], found["words"])
                    yield found
                status = child.wait(_MOST_SECONDS)
            except (TimeoutError, subprocess.TimeoutExpired):
                raise Wrong(_case(place.name), f"no block ended in {_MOST_SECONDS:g} s: it hangs") from None
            finally:
                child.kill()
            if status:
                assert child.stderr is not None
                how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
                raise Wrong(_case(place.name), f"{how}\n{child.stderr.read().decode()[-2000:]}")


def _case(place: str) -> int:
    return int.from_bytes(Path(place).read_bytes()[:8], "little", signed=True)


def _lines(child: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Lines as they come. Raises TimeoutError."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(_MOST_SECONDS):
                raise TimeoutError
            line = child.stdout.readline()
            if not line:
                return
            yield line
