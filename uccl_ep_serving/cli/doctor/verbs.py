"""What pyverbs says of the NICs: a second opinion from the library's own Python bindings.

pyverbs is optional, and must match the installed rdma-core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from uccl_ep_serving.cli.doctor.findings import Finding, Status, settings_or_defaults
from uccl_ep_serving.data_plane.nics import makes_verbs_objects, root_logger_kept
from uccl_ep_serving.errors import ConfigError

__all__ = ["examine_with_bindings"]


def examine_with_bindings() -> Iterator[Finding]:
    """Who makes the objects of verbs; one finding per device that pyverbs can open, none where it is not installed."""
    try:
        yield Finding("verbs", f"objects are made by {makes_verbs_objects(settings_or_defaults())}")
    except ConfigError as error:
        yield Finding("verbs", str(error), Status.PROBLEM, "unset UCCL_EP_VERBS, or install pyverbs")
    try:
        with root_logger_kept():
            from pyverbs.device import Context, get_device_list
    except ModuleNotFoundError:
        return  # optional: the same questions are asked without it
    except ImportError as error:
        step = "install the pyverbs of the installed rdma-core: apt-get install python3-pyverbs, or pip install pyverbs"
        yield Finding("pyverbs", f"does not match the installed rdma-core: {error}", Status.NOTE, step)
        return
    try:
        devices = get_device_list()
    except Exception as error:  # a kernel without RDMA, among others: one image serves nodes with NICs and without
        yield Finding("pyverbs", f"finds no devices: {error}", Status.NOTE, "nothing, where this node has no RDMA NIC")
        return
    for device in devices:
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
        with root_logger_kept():
            from pyverbs.providers.efa.efadv import EfaContext
        with EfaContext(name=name) as efa:
            found = efa.query_efa_device()
        yield f"EFA: RDMA up to {found.max_rdma_size >> 20} MiB, capabilities {found.device_caps:#x}"
    except Exception:
        return  # no EFA device, or pyverbs was built without its provider


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
