"""The C functions of libibverbs, found at run time: nothing is linked, and a machine without RDMA loses nothing.

:class:`VerbsLibrary` is the only way to a C function here. It takes and returns plain integers (addresses, numbers), so
that the in-memory providers of the tests can stand in for the library with functions of their own.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ....errors import TransportError

#: What to install, for messages.
PACKAGES = (
    "Debian and Ubuntu: apt-get install ibverbs-providers; Fedora and RHEL: dnf install libibverbs; "
    "AWS: the EFA installer"
)

_SIGNATURES = {
    "ibv_fork_init": "i:",
    "ibv_get_device_list": "p:p",
    "ibv_free_device_list": "v:p",
    "ibv_get_device_name": "p:p",
    "ibv_open_device": "p:p",
    "ibv_close_device": "i:p",
    "ibv_query_device": "i:pp",
    "ibv_query_port": "i:pup",
    "_ibv_query_gid_table": "l:pplul",
    "ibv_alloc_pd": "p:p",
    "ibv_dealloc_pd": "i:p",
    "ibv_reg_mr": "p:pplu",
    "ibv_reg_mr_iova2": "p:ppllu",
    "ibv_reg_dmabuf_mr": "p:plllii",
    "ibv_dereg_mr": "i:p",
    "ibv_create_cq": "p:pippi",
    "ibv_destroy_cq": "i:p",
    "ibv_create_qp": "p:pp",
    "ibv_destroy_qp": "i:p",
    "ibv_modify_qp": "i:ppi",
    "ibv_create_ah": "p:pp",
    "ibv_destroy_ah": "i:p",
    "ibv_qp_to_qp_ex": "p:p",
    "ibv_get_async_event": "i:pp",
    "ibv_ack_async_event": "v:p",
}
_TYPES: dict[str, type | None] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "v": None,
}
#: Not in every library that is new enough for the rest.
_OPTIONAL = {"ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr"}

#: errno of a refused call -> what usually brings it about.
_CAUSES = {
    errno.ENOMEM: "the limit on locked memory (ulimit -l) is too low, or the NIC has no more room for such objects; "
    "memory of huge pages takes less of it (vm.nr_hugepages)",
    errno.EPERM: "the process may not use the device: check /dev/infiniband and the rights of the container",
    errno.EACCES: "the process may not use the device: check the permissions of /dev/infiniband",
    errno.ENODEV: "the device is gone or its kernel modules (ib_uverbs) are not loaded",
    errno.EOPNOTSUPP: "the NIC, its driver or the kernel does not offer this",
    errno.EINVAL: "the NIC or its driver refused the arguments",
    errno.EFAULT: "the memory is not mapped, or is device memory that the NIC cannot reach",
    errno.ETIMEDOUT: "the peer's address could not be resolved: check routes and neighbours of the NIC's interface",
    errno.EHOSTUNREACH: "no route from the NIC's interface to the peer's GID",
    errno.ENETUNREACH: "no route from the NIC's interface to the peer's GID",
}


class VerbsLibrary:
    """Named C functions, taking and returning integers, with errors in words.

    Args:
        functions: by C name. One that returns an address or an int and fails sets ``ctypes.set_errno``.
        addresses: by C name, the addresses of those that compiled code calls.
        name: what to call the library in messages.
        release: of rdma-core, 0 = not known.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., int | None]],
        addresses: Mapping[str, int],
        name: str,
        release: int = 0,
    ) -> None:
        self._functions, self._addresses = dict(functions), dict(addresses)
        self.name, self.release = name, release

    def __contains__(self, name: str) -> bool:
        return name in self._functions

    def address(self, name: str) -> int:
        """Address of a C function, for compiled code."""
        return self._addresses[name]

    def extended(
        self, functions: Mapping[str, Callable[..., int | None]], addresses: Mapping[str, int], name: str
    ) -> VerbsLibrary:
        """This library with the functions of another one added."""
        both = {**self._functions, **functions}, {**self._addresses, **addresses}
        return VerbsLibrary(*both, f"{self.name} with {name}", self.release)

    def call(self, name: str, *arguments: int) -> int:
        """The bare result; a null address is 0."""
        ctypes.set_errno(0)
        return self._functions[name](*arguments) or 0

    def pointer(self, name: str, *arguments: int, device: str, doing: str) -> int:
        """Call what returns an object. Raises TransportError when it returns null."""
        result = self.call(name, *arguments)
        if not result:
            raise self.refused(name, ctypes.get_errno(), device, doing)
        return result

    def status(self, name: str, *arguments: int, device: str, doing: str) -> None:
        """Call what returns 0, an errno, or -1 with errno set. Raises TransportError unless 0."""
        result = self.call(name, *arguments)
        if result:
            raise self.refused(name, result if result > 0 else ctypes.get_errno(), device, doing)

    def refused(self, name: str, number: int, device: str, doing: str) -> TransportError:
        """The exception for a call that failed with errno ``number``."""
        cause = _CAUSES.get(number, "see the kernel log")
        words = os.strerror(number) if number else "none given"
        return TransportError(
            f"{device}: {doing}: {name} failed with errno {number} ({words}). Likely cause: {cause}",
            device=device,
            errno=number,
        )


def bind(
    file: str, signatures: Mapping[str, str], optional: Collection[str], needs: str
) -> tuple[dict[str, Callable[..., int | None]], dict[str, int]]:
    """Functions and addresses of a shared library.

    Args:
        file: its soname.
        signatures: ``"<result>:<arguments>"`` by C name; p = address, i = int, u = unsigned of 32 bits, l = 64 bits,
            v = nothing.
        optional: names that may be missing.
        needs: which release has the others, for the message.

    Raises:
        TransportError: it is not installed, or too old.
    """
    try:
        library = ctypes.CDLL(file, use_errno=True)
    except OSError as error:
        raise TransportError(f"{file} cannot be loaded ({error}). {PACKAGES}", device=file) from None
    functions: dict[str, Callable[..., int | None]] = {}
    addresses = {}
    for name, signature in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            if name in optional:
                continue
            raise TransportError(f"{file} has no {name}: {needs} is needed. {PACKAGES}", device=file)
        result, _, arguments = signature.partition(":")
        function.restype = _TYPES[result]
        function.argtypes = [_TYPES[letter] for letter in arguments]
        functions[name] = function
        addresses[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    return functions, addresses


def release_in(maps: str) -> int:
    """The release of rdma-core, by the file of libibverbs among those that a process has mapped
    (libibverbs.so.1.14.44.0 is that of 44); 0 where its name does not say."""
    found = re.search(r"/libibverbs\.so\.1\.\d+\.(\d+)\.", maps)
    return int(found[1]) if found else 0


@functools.cache
def load_libibverbs() -> VerbsLibrary:
    """libibverbs of this machine.

    Raises:
        TransportError: it is not installed, or older than rdma-core 31.
    """
    found = bind("libibverbs.so.1", _SIGNATURES, _OPTIONAL, "rdma-core 31 or newer")
    library = VerbsLibrary(*found, name="libibverbs", release=release_in(Path("/proc/self/maps").read_text()))
    # Queues of the provider must not become copy-on-write in a forked child; recent kernels need no help. Of older ones
    # the library has to know which memory is of huge pages: they refuse to keep a part of such a page from the child.
    os.environ.setdefault("RDMAV_HUGEPAGES_SAFE", "1")
    library.call("ibv_fork_init")
    return library
