"""What the words of an error mean in a check, where they say no next step themselves."""

from __future__ import annotations

from dataclasses import replace

from ..check.faults import REPORT, Fault

__all__ = ["explained"]

#: By words of an error in lower case: the likely cause ("": it says so itself), and the next step.
_CAUSES = (
    (
        "ulimit -l",
        "",
        "raise memlock: ulimit -l unlimited, docker --ulimit memlock=-1, or that of the container runtime",
    ),
    (
        "secret",
        "another job answers on this address and port, or something between the nodes changes what it carries",
        "end what else runs there, or another UCCL_EP_PORT_RANGE; without proxies between the nodes",
    ),
)


def explained(fault: Fault) -> Fault:
    """``fault`` with a cause and a next step of ours, where its error had none."""
    if fault.step != REPORT:
        return fault
    for words, cause, step in _CAUSES:
        if words in f"{fault.found} {fault.cause}".lower():
            return replace(fault, cause=cause or fault.cause, step=step)
    return replace(fault, step="what the other ranks say of it; uccl-ep doctor on both nodes")
