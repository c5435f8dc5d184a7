"""What pyverbs says of the NICs: a second opinion from the library's own Python bindings.

pyverbs is optional, must match the installed rdma-core, and sets up logging when it is imported: it is imported only
here, when asked, and what it did to the root logger is undone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from uccl_ep_serving.cli.doctor.findings import Finding, Status

__all__ = ["examine_with_bindings"]


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def examine_with_bindings() -> Iterator[Finding]:
    """One finding per device that pyverbs can open; nothing where it is not installed."""
    try:
        with _logging_kept():
            from pyverbs.device import Context, get_device_list
    except ModuleNotFoundError:
        return  # optional: the same questions are asked without it
    except ImportError as error:
        step = "install the pyverbs of the installed rdma-core: apt-get install python3-pyverbs, or pip install pyverbs"
        yield Finding("pyverbs", f"does not match the installed rdma-core: {error}", Status.NOTE, step)
        return
    for device in get_device_list():
        name = _text(device.name)
        try:
            with Context(name=name) as context:
                yield Finding(f"{name} (pyverbs)", ", ".join(_words(context, name)))
        except Exception as error:  # pyverbs raises several unrelated kinds
            step = "check the permissions of /dev/infiniband and the driver"
            yield Finding(f"{name} (pyverbs)", f"cannot be opened: {error}", Status.NOTE, step)


def _words(context: Any, name: str) -> Iterator[str]:
    limits = context.query_device()
    yield f"firmware {_text(limits.fw_ver)}"
    yield f"{limits.max_qp_wr} work requests a queue pair"
    yield f"{limits.max_cqe} completions a queue"
    yield f"regions up to {limits.max_mr_size >> 30} GiB"
    try:
        with _logging_kept():
            from pyverbs.providers.efa.efadv import EfaContext
        with EfaContext(name=name) as efa:
            found = efa.query_efa_device()
        yield f"EFA: RDMA up to {found.max_rdma_size >> 20} MiB, capabilities {found.device_caps:#x}"
    except Exception:
        return  # no EFA device, or pyverbs was built without its provider


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
