"""GPUs that torch can use, and what the kernels for them need on this machine."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from uccl_ep_serving.check.machine import has_gpu_devices, present
from uccl_ep_serving.check.stamp import COMMAND, State, directory, look
from uccl_ep_serving.cli.doctor.findings import Finding, Status, settings_or_defaults
from uccl_ep_serving.cli.doctor.software import package

__all__ = ["for_cpus_only", "gpus"]

#: Under which names Triton comes with the builds of torch for other devices.
_TRITON = ("pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
_ON_CPU = ", or UCCL_EP_DEVICE=cpu for ranks without a GPU"


def gpus() -> Iterator[Finding]:
    """One finding per GPU, then one for each thing without which the first dispatch of its tensors would fail.

    With ``UCCL_EP_DEVICE=cpu`` what GPUs need is worth a note only.
    """
    if importlib.util.find_spec("torch") is None:
        return
    if for_cpus_only():
        yield _no_device("torch is a CPU build", for_gpus=False)
        return
    import torch

    if not torch.cuda.is_available():
        built = (("ROCm", torch.version.hip), ("CUDA", torch.version.cuda))
        kind = next((f"{name} {version}" for name, version in built if version), "")
        why = f"torch is built for {kind} but finds no device" if kind else "torch is a CPU build"
        yield _no_device(why, for_gpus=bool(kind))
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        # torch says "cuda" of AMD's devices too; they have no compute capability
        kind = f"sm_{found.major}{found.minor}" if torch.version.hip is None else found.gcnArchName
        value = f"{found.name}, {found.total_memory / 2**30:.4g} GiB, {kind}"
        yield Finding(f"cuda:{index}", value)
    yield _check_on_record()
    needed = settings_or_defaults().device != "cpu"
    yield package("triton", required=needed, also=_TRITON, instead=_ON_CPU)
    if torch.version.hip is None:  # ROCm's library of the same purpose comes with torch
        # a later one needs a later driver than torch does
        pick = f"=={(torch.version.cuda or '').partition('.')[0]}.*"
        yield package("cuda-bindings", required=needed, pick=pick, instead=_ON_CPU)
    lacking = Status.PROBLEM if needed else Status.NOTE
    yield _compiler(lacking)
    yield _triton_cache(lacking)


def _check_on_record() -> Finding:
    """Whether engines start on these GPUs, and what the record of their check is of."""
    try:
        record = look(present())
    except RuntimeError as error:
        return Finding("GPU check", str(error), Status.NOTE, f"{COMMAND}; engines are refused until it passes")
    if record.state is State.PASSED:
        return Finding("GPU check", record.why)
    if record.state is State.UNKNOWN and directory() is None:
        step = "UCCL_EP_CACHE_DIR with a directory that this user can write and nobody else"
        value = f"{record.why}, and none could be kept anywhere: engines are refused"
        return Finding("GPU check", value, Status.PROBLEM, step)
    first = "the first launch of an engine runs it, in two minutes at most"
    if not settings_or_defaults().gpu_check:
        first = "UCCL_EP_GPU_CHECK=0: engines are refused until it has passed"
    status = Status.PROBLEM if record.state is State.FAILED else Status.NOTE
    return Finding("GPU check", record.why, status, f"{COMMAND}; {first}")


def for_cpus_only() -> bool:
    """True when torch is not imported, and its own version file names no GPU that it is built for: importing it to be
    told takes long."""
    spec = importlib.util.find_spec("torch")
    if spec is None or "torch" in sys.modules:
        return False
    try:
        built = runpy.run_path(str(Path(spec.origin or "").with_name("version.py")))
        return built["cuda"] is None and built["hip"] is None
    except (OSError, KeyError, ValueError):
        return False  # not known without torch


def _no_device(why: str, *, for_gpus: bool) -> Finding:
    """``for_gpus``: torch is built for some, so those that are here are meant to be used."""
    if has_gpu_devices(that_compute=not for_gpus) and settings_or_defaults().device != "cpu":
        step = f"a build of torch for this driver, or a driver for this torch{_ON_CPU}"
        return Finding("cuda", f"none, though a driver has made devices of GPUs: {why}", Status.PROBLEM, step)
    step = "install the driver and the GPU build of torch, if there is a GPU"
    return Finding("cuda", f"none: {why}", Status.NOTE, step)


def _compiler(lacking: Status) -> Finding:
    """What Triton builds its launchers with, when a kernel is first launched: where it looks, in its order."""
    named = os.environ.get("CC")
    compiler = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        missing = f"CC={named} is not there" if named else "neither gcc nor clang is there"
        step = f"apt-get install gcc, or name a compiler in CC{_ON_CPU}"
        return Finding("C compiler", f"none: {missing}, Triton needs one", lacking, step)
    # the paths of an installation from source, as Triton asks for them on Debian too
    header = Path(sysconfig.get_paths(scheme="posix_prefix")["include"], "Python.h")
    if not header.is_file():
        step = f"apt-get install python3-dev (of this Python){_ON_CPU}"
        return Finding("C compiler", f"{compiler}, but {header} is missing, Triton needs it", lacking, step)
    return Finding("C compiler", f"{compiler}, with {header}")


def _triton_cache(lacking: Status) -> Finding:
    """Where Triton keeps what it compiles, which it does not ask about before it writes there."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    wanted = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    # os.path, because a Path raises where this user may not look
    place = next(one for one in (wanted, *wanted.absolute().parents) if os.path.exists(one))
    try:
        # permissions say less than trying: a file system may be read-only, or full
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        step = f"TRITON_CACHE_DIR with a directory that this user can write (an emptyDir or a volume), or HOME{_ON_CPU}"
        value = f"{wanted} cannot be written ({error.strerror}): the first kernel would fail"
        return Finding("Triton's cache", value, lacking, step)
    return Finding("Triton's cache", f"{wanted} can be written")
