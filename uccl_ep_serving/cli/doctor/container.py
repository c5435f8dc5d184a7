"""What an unprivileged container lacks: what of it is needed, and what is not though other libraries ask for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from uccl_ep_serving.cli.doctor.findings import Finding, Status, size

__all__ = ["container", "pins_freely"]

_STATUS, _USERS, _MODULES = Path("/proc/self/status"), Path("/proc/self/uid_map"), Path("/sys/module")
_DRIVER_OPTIONS = Path("/proc/driver/nvidia/params")
_SHM = "/dev/shm"
#: linux/capability.h.
_SYS_ADMIN, _IPC_LOCK = 21, 14
#: Of /proc/self/uid_map, where there is no user namespace but the system's own.
_ALL_USERS = ["0", "0", "4294967295"]
#: Options of NVIDIA's driver that GPU-initiated transports ask for, and their defaults.
_ASKED = {"EnableStreamMemOPs": "0", "RegistryDwords": '""'}
#: What Docker gives a container, and too little for the engines: NCCL, and tensors that workers hand to each other.
_DOCKER_SHM = 64 << 20


def container(
    status: Path = _STATUS, modules: Path = _MODULES, options: Path = _DRIVER_OPTIONS, shm: str = _SHM
) -> Iterator[Finding]:
    """Privileges, drivers and tools beyond the NICs' and GPUs' own: none is needed; then ``/dev/shm``."""
    held = _capabilities(status)
    words = ["held" if held >> _SYS_ADMIN & 1 else "not held", "held" if held >> _IPC_LOCK & 1 else "not held"]
    yield Finding("SYS_ADMIN", f"{words[0]}, not needed")
    yield Finding("IPC_LOCK", f"{words[1]}, needed only where memlock is too low for the windows of NICs")
    yield Finding("gdrdrv", f"{'loaded' if (modules / 'gdrdrv').is_dir() else 'not loaded'}, not needed")
    yield Finding("nvcc", f"{shutil.which('nvcc') or 'not there'}, not needed: kernels are Triton's")
    yield Finding("driver options", f"{_options(options)}, not needed")
    yield _shm(shm)


def pins_freely(status: Path = _STATUS, users: Path = _USERS) -> bool:
    """Whether this process may pin more memory than memlock says: with IPC_LOCK in force, of the system's own user
    namespace, as the kernel asks when it registers memory."""
    try:
        own = users.read_text().split() == _ALL_USERS
    except OSError:
        return False
    return own and bool(_capabilities(status) >> _IPC_LOCK & 1)


def _capabilities(status: Path) -> int:
    """Those in force, as bits; 0 where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(lines["CapEff"], 16)
    except (OSError, KeyError, ValueError):
        return 0


def _options(file: Path) -> str:
    """Options of NVIDIA's driver that others ask for, in words."""
    try:
        lines = dict(line.split(": ", 1) for line in file.read_text().splitlines() if ": " in line)
    except OSError:
        return "no NVIDIA driver"
    changed = [f"{name}={lines[name]}" for name, usual in _ASKED.items() if lines.get(name, usual) != usual]
    return ", ".join(changed) or "as they come"


def _shm(path: str) -> Finding:
    """Room for the engines' shared memory; windows of ours are no files there."""
    try:
        found = psutil.disk_usage(path)
    except OSError as error:
        return Finding(path, f"missing: {error.strerror}", Status.NOTE, f"mount a tmpfs on {path}")
    value = f"{size(found.free)} free of {size(found.total)}; windows lie in memory of their own"
    if found.total <= _DOCKER_SHM:
        step = "--shm-size 16g, or an emptyDir of medium Memory: engines and NCCL need it"
        return Finding(path, f"{value}. That is what a container gets that asks for nothing", Status.NOTE, step)
    return Finding(path, value)
