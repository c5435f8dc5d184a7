"""The doctor's second opinion from pyverbs, on a pyverbs that stands in for the real one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from uccl_ep_serving.cli.doctor.findings import Status
from uccl_ep_serving.cli.doctor.verbs import examine_with_bindings
from uccl_ep_serving.proxy.transport.verbs import bindings


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """Whether pyverbs is there is asked once in a process."""
    bindings._bindings.cache_clear()
    yield
    bindings._bindings.cache_clear()


class Context:
    """A device that opens, unless it is called broken."""

    def __init__(self, name: str) -> None:
        if name == "broken0":
            raise RuntimeError("Permission denied")
        self.name = name

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *reason: object) -> None:
        pass

    def query_device(self) -> SimpleNamespace:
        return SimpleNamespace(fw_ver=b"229.2", max_qp_wr=4096, max_cqe=32768, max_mr_size=1 << 40)


class EfaContext(Context):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        if name != "rdmap79s0":
            raise RuntimeError("not an EFA device")

    def query_efa_device(self) -> SimpleNamespace:
        return SimpleNamespace(max_rdma_size=1 << 30, device_caps=0x1F)


class NoisyImport:
    """Finds the stand-ins, and sets up logging as the real package does when it is imported."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True) if name in self.modules else None

    def create_module(self, spec: Any) -> ModuleType:
        logging.basicConfig(level=logging.DEBUG, force=True)
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture
def pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("pyverbs", "pyverbs.device", "pyverbs.providers", "pyverbs.providers.efa", "pyverbs.providers.efa.efadv")
    modules = {name: ModuleType(name) for name in names}
    devices = [SimpleNamespace(name=name) for name in (b"rdmap79s0", b"bnxt_re0", b"broken0")]
    vars(modules["pyverbs.device"]).update(Context=Context, get_device_list=lambda: devices)
    vars(modules["pyverbs.providers.efa.efadv"]).update(EfaContext=EfaContext)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoisyImport(modules), *sys.meta_path])
    yield
    for name in names:
        sys.modules.pop(name, None)


def test_devices_are_enumerated_with_what_they_can_do(pyverbs: None) -> None:
    found = {finding.name: finding for finding in examine_with_bindings()}
    assert found["rdmap79s0 (pyverbs)"].value == (
        "firmware 229.2, 4096 work requests a queue pair, 32768 completions a queue, regions up to 1024 GiB, "
        "EFA: RDMA up to 1024 MiB, capabilities 0x1f"
    )
    assert "EFA" not in found["bnxt_re0 (pyverbs)"].value
    assert found["broken0 (pyverbs)"].status is Status.NOTE
    assert "Permission denied" in found["broken0 (pyverbs)"].value


def test_a_kernel_without_rdma_is_no_problem(pyverbs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an image for nodes with NICs and without."""

    def get_device_list() -> list[Any]:
        raise RuntimeError("Failed to get devices list")

    from pyverbs import device

    monkeypatch.setattr(device, "get_device_list", get_device_list)
    *_, found = examine_with_bindings()
    assert (found.name, found.status) == ("pyverbs", Status.NOTE)
    assert found.value == "finds no devices: Failed to get devices list"


def test_what_the_import_does_to_logging_is_undone(pyverbs: None) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    assert list(examine_with_bindings())
    assert (root.handlers, root.level) == (handlers, level)


def test_without_pyverbs_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs.device", None)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    (found,) = examine_with_bindings()
    assert found.value == "objects are made by ctypes: pyverbs is not installed"
