"""pyverbs as the control path: devices, protection domains, memory regions, queues and address handles are its objects.

Each function of libibverbs that makes or ends an object goes to pyverbs. Everything else (queries, the states of a
queue pair, the data path) calls the C functions on the address of the struct behind the object, as without pyverbs.
pyverbs shows no addresses: the struct is looked for among the words of the object's own memory, and taken only when its
fields say that it was made from the struct it was asked for. Where none does (another pyverbs, another layout), that
object, and what is made from it, comes from the C functions.

pyverbs must match the installed rdma-core, and sets up logging when it is imported: it is imported here when it is
asked for, and what it did to the root logger is undone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from ....errors import ConfigError
from .abi import AH, AH_ATTR, CONTEXT, CQ, DEVICE, MR, PD, QP, QP_INIT_ATTR, Struct
from .library import VerbsLibrary

__all__ = ["AUTO", "CTYPES", "PYVERBS", "control_path", "root_logger_kept", "standing"]

_log = logging.getLogger("uccl_ep_serving")

#: Values of UCCL_EP_VERBS.
AUTO, PYVERBS, CTYPES = "auto", "pyverbs", "ctypes"
_MODULES = {"Context": "device", "PD": "pd", "MR": "mr", "CQ": "cq", "QP": "qp", "QPCap": "qp", "QPInitAttr": "qp"}
_MODULES |= {"AH": "addr", "AHAttr": "addr", "GID": "addr", "GlobalRoute": "addr"}
#: An object begins with its reference count and its type; words follow.
_HEAD, _WORD = 16, 8
_STEP = "apt-get install python3-pyverbs, or pip install pyverbs, that of the installed rdma-core"


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """What an import inside does to the root logger is undone."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@functools.cache
def _bindings() -> SimpleNamespace | str:
    """The classes of pyverbs, or why there are none."""
    try:
        with root_logger_kept():
            found = {name: getattr(importlib.import_module(f"pyverbs.{of}"), name) for name, of in _MODULES.items()}
    except ModuleNotFoundError:
        return "pyverbs is not installed"
    except (ImportError, AttributeError) as error:
        return f"pyverbs does not match the installed rdma-core: {error}"
    return SimpleNamespace(**found)


def standing(wanted: str) -> str:
    """Who makes the objects of verbs with this value of UCCL_EP_VERBS, in words. Raises ConfigError as
    :func:`control_path` does."""
    if wanted == CTYPES:
        return "ctypes (UCCL_EP_VERBS=ctypes)"
    found = _bindings()
    if isinstance(found, SimpleNamespace):
        return f"pyverbs (UCCL_EP_VERBS={wanted})"
    if wanted == PYVERBS:
        raise ConfigError(f"UCCL_EP_VERBS=pyverbs: {found}. Next step: {_STEP}; or unset it")
    return f"ctypes: {found}"


def control_path(library: VerbsLibrary, wanted: str) -> VerbsLibrary:
    """``library`` whose objects are those of pyverbs, where ``wanted`` (a value of UCCL_EP_VERBS) and the machine say
    so. Raises ConfigError where pyverbs is demanded and cannot be had."""
    words = standing(wanted)
    found = _bindings()
    if wanted == CTYPES or isinstance(found, str):
        _log.debug("uccl_ep: objects of verbs are made by %s", words)
        return library
    return _over(library)


@functools.cache
def _over(library: VerbsLibrary) -> VerbsLibrary:
    classes = _bindings()
    assert isinstance(classes, SimpleNamespace)
    return library.extended(_Objects(library, classes).functions, {}, "pyverbs")


class _Objects:
    """The objects that pyverbs has made, by the address of their structs.

    Args:
        library: whose functions make what pyverbs cannot, and end it.
        classes: those of pyverbs.
    """

    def __init__(self, library: VerbsLibrary, classes: SimpleNamespace) -> None:
        self._library, self._classes = library, classes
        self._made: dict[int, Any] = {}
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @property
    def functions(self) -> dict[str, Callable[..., int | None]]:
        """By C name, what goes to pyverbs."""
        ending = ("ibv_close_device", "ibv_dealloc_pd", "ibv_dereg_mr", "ibv_destroy_cq", "ibv_destroy_qp")
        return {
            "ibv_open_device": self._open_device,
            "ibv_alloc_pd": self._alloc_pd,
            "ibv_reg_mr": self._reg_mr,
            "ibv_create_cq": self._create_cq,
            "ibv_create_qp": self._create_qp,
            "ibv_create_ah": self._create_ah,
            **{name: functools.partial(self._end, name) for name in (*ending, "ibv_destroy_ah")},
        }

    def _make(self, name: str, arguments: tuple[int, ...], make: Callable[[], Any], struct: Struct, **of: int) -> int:
        """Address of the struct behind what ``make`` makes, whose fields are ``of``; 0 with errno set where pyverbs is
        refused; what the C function ``name`` makes of ``arguments`` where the struct is not found."""
        try:
            made = make()
        except Exception as error:  # pyverbs raises several unrelated kinds
            ctypes.set_errno(getattr(error, "error_code", 0) or errno.EIO)
            _log.debug("pyverbs: %s: %s", name, error)
            return 0
        if address := _struct_behind(made, struct, of):
            self._made[address] = made
            return address
        made.close()
        _log.info("uccl_ep: no %s found in an object of this pyverbs; libibverbs makes it", struct.name)
        return self._library.call(name, *arguments)

    def _end(self, name: str, address: int) -> int:
        made = self._made.pop(address, None)
        if made is None:
            return self._library.call(name, address)
        try:
            made.close()
        except Exception as error:
            return getattr(error, "error_code", 0) or errno.EIO
        return 0

    def _open_device(self, device: int) -> int:
        name = DEVICE.get_bytes(device, "name").split(b"\0")[0].decode(errors="replace")
        make = functools.partial(self._classes.Context, name=name)
        return self._make("ibv_open_device", (device,), make, CONTEXT, device=device)

    def _alloc_pd(self, context: int) -> int:
        if context not in self._made:
            return self._library.call("ibv_alloc_pd", context)
        make = functools.partial(self._classes.PD, self._made[context])
        return self._make("ibv_alloc_pd", (context,), make, PD, context=context)

    def _reg_mr(self, pd: int, start: int, nbytes: int, access: int) -> int:
        if pd not in self._made:
            return self._library.call("ibv_reg_mr", pd, start, nbytes, access)
        make = functools.partial(self._classes.MR, self._made[pd], nbytes, access, address=start)
        return self._make("ibv_reg_mr", (pd, start, nbytes, access), make, MR, pd=pd, addr=start, length=nbytes)

    def _create_cq(self, context: int, entries: int, *others: int) -> int:
        if context not in self._made:
            return self._library.call("ibv_create_cq", context, entries, *others)
        make = functools.partial(self._classes.CQ, self._made[context], entries)
        return self._make("ibv_create_cq", (context, entries, *others), make, CQ, context=context)

    def _create_qp(self, pd: int, attributes: int) -> int:
        queues = [QP_INIT_ATTR.get(attributes, name) for name in ("send_cq", "recv_cq")]
        if not {pd, *queues} <= self._made.keys():
            return self._library.call("ibv_create_qp", pd, attributes)
        names = ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")
        cap = self._classes.QPCap(**{name: QP_INIT_ATTR.get(attributes, f"cap.{name}") for name in names})
        send, receive = (self._made[queue] for queue in queues)
        kind = QP_INIT_ATTR.get(attributes, "qp_type")
        every = QP_INIT_ATTR.get(attributes, "sq_sig_all")  # its default is 1
        given = self._classes.QPInitAttr(qp_type=kind, scq=send, rcq=receive, cap=cap, sq_sig_all=every)
        make = functools.partial(self._classes.QP, self._made[pd], given)
        of = {"pd": pd, "send_cq": queues[0], "recv_cq": queues[1], "qp_type": kind}
        return self._make("ibv_create_qp", (pd, attributes), make, QP, **of)

    def _create_ah(self, pd: int, attributes: int) -> int:
        if pd not in self._made:
            return self._library.call("ibv_create_ah", pd, attributes)
        raw = AH_ATTR.get_bytes(attributes, "grh.dgid").hex()
        route = self._classes.GlobalRoute(
            dgid=self._classes.GID(":".join(raw[at : at + 4] for at in range(0, 32, 4))),
            **{
                name: AH_ATTR.get(attributes, f"grh.{name}")
                for name in ("flow_label", "sgid_index", "hop_limit", "traffic_class")
            },
        )
        plain = {name: AH_ATTR.get(attributes, name) for name in ("dlid", "sl", "is_global", "port_num")}
        make = functools.partial(self._classes.AH, self._made[pd], attr=self._classes.AHAttr(gr=route, **plain))
        return self._make("ibv_create_ah", (pd, attributes), make, AH, pd=pd)

    def _leave_to_parent(self) -> None:
        """A forked child must not end the parent's objects, whose descriptors it has closed: they stay for good."""
        for made in self._made.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        self._made = {}


def _struct_behind(made: Any, struct: Struct, of: dict[str, int]) -> int:
    """Address of the struct that ``made`` holds: the word of its memory behind which the fields ``of`` stand; 0 where
    there is none."""
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at in range(id(made) + _HEAD, id(made) + made.__sizeof__(), _WORD):
            address = ctypes.c_uint64.from_address(at).value
            if address and address % _WORD == 0 and _stands(memory, struct, address, of):
                return address
    finally:
        os.close(memory)
    return 0


def _stands(memory: int, struct: Struct, address: int, of: dict[str, int]) -> bool:
    """Whether the fields stand there. Reads through the kernel, which refuses what is not mapped."""
    for name, value in of.items():
        field = struct.fields[name]
        try:
            found = os.pread(memory, field.nbytes, address + field.offset)
        except (OSError, OverflowError):
            return False
        if int.from_bytes(found, "little") != value:
            return False
    return True
