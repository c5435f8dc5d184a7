"""What a check is good for: these GPUs, this driver, Triton and version of ours.

The driver is asked in a process of its own, and not through torch: a launcher that has called CUDA cannot fork workers
that use it, and importing torch takes longer than the answer.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

__all__ = ["Machine", "environment_of_a_check", "has_gpu_devices", "present"]

_PACKAGE = Path(__file__).resolve().parent.parent
#: What the kernels, and what they share with the host, are made of.
_SOURCES = ("kernels", "protocol", "gpu")
#: Under which names Triton comes.
_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
#: How long a driver may take to say which GPUs there are.
_DRIVER_SECONDS = 60.0
_MODULE, _PROC = Path("/sys/module"), Path("/proc/driver/nvidia/version")
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
#: Of NVIDIA's driver; of AMD's and WSL's, which integrated graphics have as well.
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
#: ``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`` and ``_MINOR``.
_MAJOR, _MINOR = 75, 76


class Machine(NamedTuple):
    """What must be the same for a check to count.

    Attributes:
        gpus: each kind once, as "NVIDIA H200 (sm_90)"; none where no GPU is visible.
        driver: its version, and on NVIDIA that of CUDA which it brings.
        triton: its version.
        version: of this package.
        kernels: digest of the kernels' sources.
    """

    gpus: tuple[str, ...]
    driver: str
    triton: str
    version: str
    kernels: str

    def differences(self, kept: Machine) -> list[str]:
        """In words, what is other than when ``kept`` was checked; GPUs that were not checked count."""
        found = []
        if missing := [gpu for gpu in self.gpus if gpu not in kept.gpus]:
            found.append(f"GPU {', '.join(kept.gpus)}, here is {', '.join(missing)}")
        for name, words in (
            ("driver", "driver"),
            ("triton", "Triton"),
            ("version", "uccl_ep_serving"),
            ("kernels", "kernel sources"),
        ):
            before, now = getattr(kept, name), getattr(self, name)
            if before != now:
                found.append(f"{words} {before}, here is {now}")
        return found


def has_gpu_devices(*, that_compute: bool = False) -> bool:
    """Whether a driver has made devices of GPUs here. Asks no driver.

    Args:
        that_compute: only those that no GPU has which is for graphics alone.
    """
    return any(os.path.exists(device) for device in _DEVICES[: 1 if that_compute else None])


def present() -> Machine:
    """This machine, as processes with this environment see it. Raises RuntimeError where the driver does not answer."""
    gpus, driver = _asked()
    return Machine(tuple(gpus), driver, _triton(), metadata.version("uccl_ep_serving"), _kernels())


def environment_of_a_check() -> dict[str, str]:
    """For a process that has nothing to do with the settings and the working directory of this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UCCL_EP_")}
    if (cache := os.environ.get("UCCL_EP_CACHE_DIR")) is not None:
        kept["UCCL_EP_CACHE_DIR"] = cache
    return {**kept, "PYTHONSAFEPATH": "1"}


def _triton() -> str:
    for name in _TRITON:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return "not installed"


@functools.cache
def _kernels() -> str:
    digest = hashlib.sha256()
    for part in _SOURCES:
        root = (_PACKAGE / part).resolve()
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{part}/{path.relative_to(root)}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _asked() -> tuple[list[str], str]:
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, env=environment_of_a_check(), capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=True
        )
        gpus, driver = json.loads(done.stdout)
        return list(gpus), str(driver)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the driver has not said within {_DRIVER_SECONDS:.0f} s which GPUs there are") from None
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise RuntimeError(f"the driver could not be asked which GPUs there are: {' '.join(said)}") from error


# -- in the process that asks ---------------------------------------------------------------------------------------


def _nvidia() -> tuple[list[str], str] | None:
    """The GPUs that CUDA shows to this process, and the driver; None without CUDA."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    cuda.cuDriverGetVersion(ctypes.byref(version))
    found = set()
    for index in range(count.value):
        device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        capability = []
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int(0)
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(str(value.value))
        found.add(f"{name.value.decode(errors='replace')} (sm_{''.join(capability)})")
    major, minor = divmod(version.value // 10, 100)
    return sorted(found), f"{_module_version('nvidia') or _proc_version()} (CUDA {major}.{minor})".strip()


def _amd() -> tuple[list[str], str] | None:
    """The GPUs whose properties the kernel shows to this process, and its driver; None without any."""
    found = set()
    for node in sorted(_KFD.glob("*/properties")):
        try:
            words = dict(line.split(maxsplit=1) for line in node.read_text().splitlines() if " " in line)
            version, render = int(words["gfx_target_version"]), int(words["drm_render_minor"])
        except (OSError, KeyError, ValueError):
            continue  # of a GPU that belongs to others, or of a processor
        if version:
            major, rest = divmod(version, 10000)
            product = Path(f"/sys/class/drm/renderD{render}/device/product_name")
            name = product.read_text().strip() if product.is_file() else "AMD GPU"
            found.add(f"{name or 'AMD GPU'} (gfx{major}{rest // 100:x}{rest % 100:x})")
    return (sorted(found), _module_version("amdgpu") or f"of Linux {os.uname().release}") if found else None


def _module_version(name: str) -> str:
    file = _MODULE / name / "version"
    return file.read_text().strip() if file.is_file() else ""


def _proc_version() -> str:
    """From a line such as "NVRM version: NVIDIA UNIX x86_64 Kernel Module  560.35.03  Fri Aug 16 21:39:15 UTC 2024"."""
    words: Iterator[str] = iter(_PROC.read_text().split() if _PROC.is_file() else ())
    return next((word for word in words if word[:1].isdigit() and "." in word), "of unknown version")


if __name__ == "__main__":
    print(json.dumps(_nvidia() or _amd() or ([], "")))
