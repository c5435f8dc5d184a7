"""Two "hosts" on one machine: network namespaces joined by a veth pair."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


def run(*command: str) -> None:
    """Run a command. Raises CalledProcessError with its standard error."""
    subprocess.run(command, check=True, capture_output=True, timeout=10)


@dataclass(frozen=True)
class Namespaces:
    """Names of the two namespaces, of the veth end in each, and its address (RFC 5737)."""

    names: tuple[str, str]
    ends: tuple[str, str]
    addresses: tuple[str, str] = ("192.0.2.1", "192.0.2.2")


@contextlib.contextmanager
def two_namespaces() -> Iterator[Namespaces]:
    """Make them and remove them; skips the test where that is not allowed. The loopback interfaces stay down."""
    found = Namespaces(
        (f"uccl-ep-{os.getpid()}-a", f"uccl-ep-{os.getpid()}-b"),
        (f"ue{os.getpid() % 100_000}a", f"ue{os.getpid() % 100_000}b"),
    )
    with contextlib.ExitStack() as stack:
        try:
            for name in found.names:
                run("ip", "netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False, capture_output=True)
            one, two = found.names
            run("ip", "link", "add", found.ends[0], "netns", one, "type", "veth", "peer", found.ends[1], "netns", two)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", b"") or str(error).encode()
            pytest.skip(f"network namespaces cannot be made here: {detail.decode().strip()}")
        for name, end, address in zip(found.names, found.ends, found.addresses, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            run("ip", "-n", name, "link", "set", end, "up")
        yield found
