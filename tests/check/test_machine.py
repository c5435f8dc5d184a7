"""Which GPUs and driver there are, asked of a driver that is a stub, and of a kernel's files."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from uccl_ep_serving.check import machine

LIBCUDA = """
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) { if (SLOW) sleep(60); return STATUS; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
int cuDriverGetVersion(int *version) { *version = 12060; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
    strncpy(name, device == 2 ? "NVIDIA L4" : "NVIDIA H200", length);
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute == 75) *value = device == 2 ? 8 : 9;
    else if (attribute == 76) *value = device == 2 ? 9 : 0;
    else return 1;
    return 0;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a libcuda.so.1, made by ``built``."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return tmp_path


def built(directory: Path, slow: int = 0, status: int = 0) -> None:
    source = directory / "libcuda.c"
    source.write_text(LIBCUDA)
    names = (f"-DSLOW={slow}", f"-DSTATUS={status}", "-shared", "-fPIC", "-o", str(directory / "libcuda.so.1"))
    subprocess.run(["gcc", *names, str(source)], check=True)


def test_each_kind_of_gpu_is_named_once(driver: Path) -> None:
    built(driver)
    found = machine.present()
    assert found.gpus == ("NVIDIA H200 (sm_90)", "NVIDIA L4 (sm_89)")
    assert found.driver.endswith("(CUDA 12.6)")
    assert found == machine.present()
    assert len(found.kernels) == 16


def test_a_driver_that_finds_nothing_has_no_gpus(driver: Path) -> None:
    built(driver, status=100)
    assert machine.present().gpus == ()


def test_a_driver_that_does_not_answer_is_named(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(driver, slow=1)
    monkeypatch.setattr(machine, "_DRIVER_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match="the driver has not said within 0 s which GPUs there are"):
        machine.present()


def test_amd_is_found_in_the_files_of_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_KFD", tmp_path / "nodes")
    monkeypatch.setattr(machine, "_MODULE", tmp_path / "module")
    assert machine._amd() is None
    for number, version in enumerate((0, 90402, 90402, 90500)):
        node = tmp_path / "nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\ndrm_render_minor 999\n")
    # of a GPU that is not ours
    (tmp_path / "nodes" / "9").mkdir()
    (tmp_path / "nodes" / "9" / "properties").write_text("")
    assert machine._amd() == (["AMD GPU (gfx942)", "AMD GPU (gfx950)"], f"of Linux {os.uname().release}")
    (tmp_path / "module" / "amdgpu").mkdir(parents=True)
    (tmp_path / "module" / "amdgpu" / "version").write_text("6.10.5\n")
    found = machine._amd()
    assert found is not None
    assert found[1] == "6.10.5"


def test_the_version_of_the_driver_is_read_where_the_module_does_not_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_PROC", tmp_path / "version")
    assert machine._proc_version() == "of unknown version"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build  (dvs-builder@U16)\n"
    (tmp_path / "version").write_text(line + "GCC version:  gcc version 12.3.0\n")
    assert machine._proc_version() == "560.35.03"


def test_a_check_does_not_take_the_settings_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCCL_EP_WINDOW", "UCCL_EP_CACHE_DIR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
    given = machine.environment_of_a_check()
    assert "UCCL_EP_WINDOW" not in given
    assert (given["UCCL_EP_CACHE_DIR"], given["CUDA_VISIBLE_DEVICES"], given["PYTHONSAFEPATH"]) == ("0", "0", "1")
