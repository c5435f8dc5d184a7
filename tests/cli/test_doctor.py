"""``uccl-ep doctor``: its report, its exit status, and what it reads from the machine."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import llvmlite.binding as llvm
import pytest
from rich.console import Console

from tests.support.source_tree import ROOT, run_python
from uccl_ep_serving.cli.doctor import gpus, limits, report, software, transports
from uccl_ep_serving.cli.doctor.findings import Finding, Status
from uccl_ep_serving.config import Settings
from uccl_ep_serving.engines.versions import Engine
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.native import machine
from uccl_ep_serving.protocol.listener import listen


class TestDoctor:
    def test_reports_every_section_as_json(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "uccl_ep_serving.cli.main", "doctor", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        given: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if given["usable"] else 1)
        sections = given["sections"]
        assert list(sections) == [
            "environment",
            "engines",
            "gpus",
            "nics",
            "transports",
            "limits",
            "container",
            "settings",
        ]
        assert {"shm", "tcp", "efa", "roce"} <= {found["name"] for found in sections["transports"]}
        for findings in sections.values():
            for found in findings:
                assert found["value"]
                # a problem without a next step helps nobody
                assert found["status"] != "problem" or found["next_step"]

    def test_a_wrong_setting_is_a_problem_with_exit_status_1(self) -> None:
        done = run_python(
            "from uccl_ep_serving.cli.main import app; app(['doctor', '--json'])",
            cwd=ROOT.parent,
            UCCL_EP_CHANNELS="99",
        )
        assert done.returncode == 1
        (found,) = json.loads(done.stdout)["sections"]["settings"]
        assert found["status"] == "problem"
        assert "UCCL_EP_CHANNELS" in found["value"]

    def test_where_compiled_code_is_kept(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from uccl_ep_serving.native.cache import cache_directory

        def shown(wanted: str, cached: bool = False) -> tuple[str, str]:
            monkeypatch.setenv("UCCL_EP_CACHE_DIR", wanted)
            monkeypatch.setattr(software, "cache_directory", cache_directory.__wrapped__)
            monkeypatch.setattr(software, "read_directories", lambda: (cache_directory.__wrapped__(),))
            monkeypatch.setattr(software, "all_groups", lambda: [SimpleNamespace(name="proxy loop", cached=cached)])
            (found,) = [one for one in software.environment() if one.name == "compiled code"]
            return found.status, found.value

        status, value = shown(str(tmp_path), cached=True)
        assert (status, Path(value.partition(":")[0]).parents[1]) == ("ok", tmp_path)
        status, value = shown(str(tmp_path))
        assert status == "note"
        assert "1 of 1 groups missing: proxy loop" in value
        # as root has warmed it into an image: this user need not write there
        status, value = shown("/dev/null/nowhere", cached=True)
        assert (status, "warm, all of 1 groups" in value) == ("ok", True)
        status, value = shown("/dev/null/nowhere")
        assert status == "note"
        assert "UCCL_EP_CACHE_DIR=/dev/null/nowhere cannot be written" in value
        # as Kubernetes makes the root of a volume
        (volume := tmp_path / "volume").mkdir()
        volume.chmod(0o777)
        status, value = shown(str(volume / "cache"))
        assert status == "note"
        assert f"cache is not used: others own {volume} or can write there" in value
        monkeypatch.setenv("HOME", "/dev/null")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(tempfile, "gettempdir", lambda: "/dev/null")
        status, value = shown("")
        assert status == "note"
        assert "each process compiles for itself" in value

    def test_a_check_that_fails_is_a_finding_and_the_others_are_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where /proc is not all there, say."""

        def limits() -> Iterator[Finding]:
            yield Finding("open files", "1024")
            raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

        monkeypatch.setattr(report, "SECTIONS", {"limits": limits, "settings": report.settings})
        found = report.examine()
        assert [one.status for one in found["limits"]] == ["ok", "problem"]
        assert "could not be looked at: FileNotFoundError" in found["limits"][1].value
        assert len(found["settings"]) > 10

    def test_words_of_the_machine_are_no_markup(self) -> None:
        text = io.StringIO()
        finding = Finding("NIC [red]", "[/sys/class/net] [fe80::1]", Status.PROBLEM, "look at [localhost]")
        report._print({"nics": [finding]}, Console(file=text, width=160))
        for words in ("NIC [red]", "[/sys/class/net] [fe80::1]", "next: look at [localhost]"):
            assert words in text.getvalue()

    def test_memory_that_may_not_be_executable_is_a_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first call of compiled code would end the process without a word."""
        monkeypatch.setattr(llvm, "check_jit_execution", Mock(side_effect=OSError("cannot allocate executable memory")))
        with pytest.raises(ConfigError, match=r"MemoryDenyWriteExecute.*Next step"):
            machine._engine.__wrapped__()
        (found,) = [one for one in software.environment() if one.name == "compiled code"]
        assert found.status == "problem"

    def test_a_misspelt_setting_is_named_with_the_nearest_one(self, monkeypatch: pytest.MonkeyPatch) -> None:

        monkeypatch.setenv("UCCL_EP_PROXYS", "2")
        (found,) = [found for found in report.settings() if found.name == "UCCL_EP_PROXYS"]
        assert found.next_step == "did you mean UCCL_EP_PROXIES?"

    def test_a_misspelt_setting_is_named_beside_a_wrong_one(self, monkeypatch: pytest.MonkeyPatch) -> None:

        monkeypatch.setenv("UCCL_EP_CHANNELS", "99")
        monkeypatch.setenv("UCCL_EP_PROXYS", "2")
        assert [(found.name, found.status) for found in report.settings()] == [
            ("environment", "problem"),
            ("UCCL_EP_PROXYS", "note"),
        ]

    def test_a_value_from_nccls_variable_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:

        def shown() -> str:
            return next(found.value for found in report.settings() if found.name == "UCCL_EP_NIC_GID_INDEX")

        assert shown() == "-1 (default)"
        monkeypatch.setenv("NCCL_IB_GID_INDEX", "3")
        assert shown() == "3 (NCCL_IB_GID_INDEX)"
        monkeypatch.setenv("UCCL_EP_NIC_GID_INDEX", "5")
        assert shown() == "5 (environment)"

    def test_a_malformed_list_of_nics_is_named_where_a_buffer_would_refuse_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:

        monkeypatch.setenv("UCCL_EP_NICS", "^")
        (found,) = [one for one in transports.transports() if "UCCL_EP_NICS" in one.value]
        assert found.status == "problem"
        monkeypatch.setenv("UCCL_EP_TRANSPORT", "tcp")
        findings = list(transports.transports())
        assert [one.status for one in findings if "UCCL_EP_NICS" in one.value] == ["note"]
        assert [one.value for one in findings if one.name == "peer"]

    def test_whether_engines_start_on_a_gpu_is_said(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        import torch

        from uccl_ep_serving.check import stamp
        from uccl_ep_serving.check.machine import Machine

        class Device:
            name, total_memory, major, minor, gcnArchName = "H100", 80 << 30, 9, 0, "gfx942"

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Device)
        machine = Machine(("H100 (sm_90)",), "560", "3.6.0", "1.0", "abc")
        monkeypatch.setattr(gpus, "present", lambda: machine)
        monkeypatch.setattr(stamp, "places", lambda name: [tmp_path / name])
        device, said, *_ = gpus.gpus()
        assert (device.name, device.status) == ("cuda:0", "ok")
        assert device.value.startswith("H100, 80 GiB, ")
        assert (said.name, said.status) == ("GPU check", "note")
        assert "no check of this machine's GPUs is on record" in said.value
        assert "uccl-ep check --gpu; the first launch of an engine runs it" in said.next_step
        monkeypatch.setattr(gpus, "directory", lambda: None)
        nowhere = list(gpus.gpus())[1]
        assert nowhere.status == "problem"
        assert "could be kept anywhere: engines are refused" in nowhere.value
        assert "UCCL_EP_CACHE_DIR" in nowhere.next_step
        monkeypatch.setattr(gpus, "directory", stamp.directory)
        monkeypatch.setenv("UCCL_EP_GPU_CHECK", "0")
        assert "engines are refused" in list(gpus.gpus())[1].next_step
        failed = {"parts": [{"name": "normal over ipc", "passed": False, "fault": "kernel advance: no"}]}
        stamp.write(machine, False, failed)
        said = list(gpus.gpus())[1]
        assert said.status == "problem"
        assert "normal over ipc: kernel advance: no" in said.value
        stamp.write(machine, True, {"parts": []})
        said = list(gpus.gpus())[1]
        assert said.status == "ok"
        assert "H100 (sm_90) passed" in said.value


def test_an_engine_that_is_missing_is_not_put_beside_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"sglang": "0.5.23"}
    monkeypatch.setattr(Engine, "installed", lambda self: versions.get(self.distributions[0]))
    monkeypatch.setattr(software, "installed", versions.get)
    said = {found.name: found for found in software.engines()}
    assert said["sglang"].value.startswith("0.5.23: supported")
    assert said["vllm"].next_step.endswith(", in an environment without SGLang")
    versions.clear()
    said = {found.name: found for found in software.engines()}
    assert "environment" not in said["vllm"].next_step + said["sglang"].next_step


class TestGpus:
    """What the first dispatch of GPU tensors needs is looked at where torch finds a GPU."""

    @pytest.fixture
    def shown(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Finding]]:
        """shown(packages, tools, **environment) -> findings by name, on a machine that has just those."""
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(gpus, "_check_on_record", lambda: Finding("GPU check", ""))

        def show(packages: dict[str, str], tools: tuple[str, ...], **environment: str) -> dict[str, Finding]:
            monkeypatch.delenv("CC", raising=False)
            monkeypatch.delenv("UCCL_EP_DEVICE", raising=False)
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr(software, "installed", packages.get)
            monkeypatch.setattr(gpus.shutil, "which", lambda name: f"/usr/bin/{name}" if name in tools else None)
            return {found.name: found for found in gpus.gpus() if found.name != "GPU check"}

        return show

    @pytest.fixture
    def headers(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:

        monkeypatch.setattr(gpus.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
        header = tmp_path / "Python.h"
        header.touch()
        return header

    @pytest.mark.parametrize("hip", [None, "7.0"])
    def test_what_is_there_is_ok(self, shown, headers: Path, monkeypatch: pytest.MonkeyPatch, hip: str | None) -> None:
        import torch

        monkeypatch.setattr(torch.version, "hip", hip)
        packages = {"triton": "3.6.0", "cuda-bindings": "13.0"} if hip is None else {"pytorch-triton-rocm": "3.6.0"}
        found = shown(packages, ("gcc",))
        assert list(found) == ["triton", *(["cuda-bindings"] if hip is None else []), "C compiler", "Triton's cache"]
        assert {one.status for one in found.values()} == {"ok"}

    @pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
    def test_what_is_missing_is_a_problem_for_whoever_uses_the_gpu(
        self, shown, headers: Path, monkeypatch: pytest.MonkeyPatch, device: str
    ) -> None:
        import torch

        monkeypatch.setattr(torch.version, "cuda", "12.9")
        found = shown({"triton": "3.1.0"}, (), UCCL_EP_DEVICE=device, TRITON_CACHE_DIR="/proc/1/nowhere")
        assert "outside the supported range" in found["triton"].value
        assert "not installed" in found["cuda-bindings"].value
        assert 'pip install "cuda-bindings==12.*"' in found["cuda-bindings"].next_step
        assert "neither gcc nor clang" in found["C compiler"].value
        assert {one.status for one in found.values()} == {"note" if device == "cpu" else "problem"}
        assert all("UCCL_EP_DEVICE=cpu" in one.next_step for one in found.values())

    def test_the_compiler_is_the_one_that_triton_takes(self, shown, headers: Path) -> None:
        assert shown({}, ("gcc", "clang"))["C compiler"].value.startswith("/usr/bin/gcc,")
        assert shown({}, ("clang",))["C compiler"].value.startswith("/usr/bin/clang,")
        assert shown({}, ("gcc", "mine"), CC="mine")["C compiler"].value.startswith("/usr/bin/mine,")
        named = shown({}, ("gcc",), CC="gone")["C compiler"]
        assert (named.status, named.value) == ("problem", "none: CC=gone is not there, Triton needs one")

    def test_without_the_headers_of_python_nothing_is_built(self, shown, headers: Path) -> None:
        headers.unlink()
        found = shown({}, ("gcc",))["C compiler"]
        assert found.status == "problem"
        assert f"{headers} is missing" in found.value

    @pytest.mark.parametrize(
        ("variable", "below"), [("TRITON_CACHE_DIR", ""), ("TRITON_HOME", ".triton/cache"), ("HOME", ".triton/cache")]
    )
    def test_where_triton_writes(
        self, shown, headers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, below: str
    ) -> None:
        for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
            monkeypatch.delenv(name, raising=False)
        found = shown({}, (), **{variable: str(tmp_path / "later")})["Triton's cache"]
        assert (found.status, found.value) == ("ok", f"{tmp_path / 'later' / below} can be written")
        # where nobody can write, root included
        found = shown({}, (), **{variable: "/proc/1"})["Triton's cache"]
        assert found.status == "problem"
        assert "the first kernel would fail" in found.value
        assert found.next_step.startswith("TRITON_CACHE_DIR")

    def test_a_home_that_this_user_may_not_look_into(
        self, shown, headers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A pod's user with the home of root: all below it answers EACCES, which a Path raises."""
        monkeypatch.delenv("TRITON_HOME", raising=False)
        (home := tmp_path / "root").mkdir()
        looked = os.stat

        def stat(path: Any, **how: Any) -> os.stat_result:
            if isinstance(path, (str, Path)) and home in Path(path).parents:
                raise PermissionError(13, "Permission denied", str(path))
            return looked(path, **how)

        monkeypatch.setattr(os, "stat", stat)
        found = shown({}, (), TRITON_CACHE_DIR=str(home / "cache"))["Triton's cache"]
        assert found.value.startswith(f"{home / 'cache'} can")

    @pytest.mark.parametrize(
        ("hip", "cuda", "words"),
        [("7.0", None, "built for ROCm 7.0 but"), (None, "12.9", "built for CUDA 12.9 but"), (None, None, "CPU build")],
    )
    def test_a_build_of_torch_without_its_device_is_named(
        self, monkeypatch: pytest.MonkeyPatch, hip: str | None, cuda: str | None, words: str
    ) -> None:
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        for devices, setting, status in ((False, "auto", "note"), (True, "auto", "problem"), (True, "cpu", "note")):
            monkeypatch.setattr(gpus, "has_gpu_devices", lambda there=devices, **_kind: there)
            monkeypatch.setenv("UCCL_EP_DEVICE", setting)
            (found,) = gpus.gpus()
            assert words in found.value
            assert found.status == status

    @pytest.mark.parametrize(
        ("version", "words"),
        [
            ("cuda = hip = None\n", "torch is a CPU build"),
            ("cuda = '12.9'\nhip = None\n", "torch was imported"),
            ("cuda = None\nhip = '7.0'\n", "torch was imported"),
            ("", "torch was imported"),
            (None, "torch was imported"),
        ],
    )
    def test_torch_is_imported_unless_its_version_file_names_no_gpu(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None, words: str
    ) -> None:
        package = tmp_path / "torch"
        package.mkdir()
        (package / "__init__.py").write_text("raise ZeroDivisionError('torch was imported')")
        if version is not None:
            (package / "version.py").write_text(version)
        monkeypatch.delitem(sys.modules, "torch")
        monkeypatch.syspath_prepend(tmp_path)
        try:
            said = next(gpus.gpus()).value
        except ZeroDivisionError as error:
            said = str(error)
        assert words in said


class TestOpenFiles:
    def test_a_rank_needs_what_its_group_takes(self) -> None:
        from uccl_ep_serving.config import Settings

        settings = Settings(proxies=2, channels=2, tcp_connections=4)
        assert limits.files_of_a_rank(2, settings) == 1 + 8 + 8 + 9
        # each further rank: its control connection and its data connections
        assert limits.files_of_a_rank(32, settings) - limits.files_of_a_rank(31, settings) == 9

    def test_a_low_limit_is_told_in_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:

        for limit, status in ((1 << 20, "ok"), (300, "note"), (200, "problem")):
            monkeypatch.setattr(limits.resource, "getrlimit", lambda which, limit=limit: (limit, 1 << 20))
            (finding,) = [one for one in limits.limits() if one.name == "nofile"]
            assert finding.status == status
            assert f"{limit}: enough for groups of" in finding.value
            assert ("ulimit -n" in finding.next_step) == (status != "ok")


class TestTcp:
    @pytest.mark.parametrize(
        ("addresses", "words"),
        [
            ({"lo": ["::1"], "eth0": ["fe80::1%eth0", "2001:db8::7"]}, "usable over eth0 2001:db8::7, lo ::1"),
            ({"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"]}, "usable over eth0 10.0.0.7, lo 127.0.0.1"),
            ({"lo": ["127.0.0.1", "::1"], "eth0": ["fe80::1%eth0"]}, "usable on this host only (lo 127.0.0.1, lo ::1)"),
            ({"eth0": ["fe80::1%eth0"]}, "unusable: no interface is up with an IP address"),
            ({"down": ["2001:db8::7"]}, "unusable: no interface is up with an IP address"),
        ],
    )
    def test_addresses_of_both_families_count(
        self, monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]], words: str
    ) -> None:

        def entry(text: str) -> SimpleNamespace:
            return SimpleNamespace(family=socket.AF_INET6 if ":" in text else socket.AF_INET, address=text)

        given = {name: [entry(text) for text in texts] for name, texts in addresses.items()}
        monkeypatch.setattr(transports.psutil, "net_if_addrs", lambda: given)
        up = {name: SimpleNamespace(isup=name != "down") for name in given}
        monkeypatch.setattr(transports.psutil, "net_if_stats", lambda: up)
        (found,) = [one for one in transports.transports() if one.name == "tcp"]
        assert found.value == words


class TestControlAddress:
    def test_it_says_what_decided(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (found,) = transports.control_address(Settings(socket_ifname="lo"))
        assert (found.value, found.status) == ("127.0.0.1 (lo, UCCL_EP_SOCKET_IFNAME=lo)", "ok")
        (found,) = transports.control_address(Settings())
        assert found.value.endswith("; with a process group, the route to the host of its TCPStore")
        (found,) = transports.control_address(Settings(nccl_socket_ifname="ib0"))
        assert found.status == "note"
        assert "NCCL_SOCKET_IFNAME=ib0 names no interface" in found.value

    def test_an_interface_that_does_not_exist_is_a_problem(self) -> None:
        (found,) = transports.control_address(Settings(socket_ifname="ib0"))
        assert found.status == "problem"
        assert "no such interface" in found.value

    def test_free_ports_of_the_range_are_counted(self) -> None:
        with listen("127.0.0.1", None) as busy:
            port = busy.getsockname()[1]
            _, found = transports.control_address(Settings(socket_ifname="lo", port_range=(port, port)))
        assert found.status == "problem"
        assert found.value.startswith("0 of 1 ports of UCCL_EP_PORT_RANGE are free")
        _, found = transports.control_address(Settings(socket_ifname="lo", port_range=(1024, 65535), proxies=2))
        assert found.status == "ok"
        assert found.value == (
            "128 or more of 64512 ports of UCCL_EP_PORT_RANGE are free: enough for 42 ranks of this host that connect "
            "over tcp at a time, 128 over others"
        )


class TestLockedMemory:
    def test_a_low_limit_is_raised_in_the_units_of_the_shell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``ulimit -l`` counts KiB: 1 GiB is 1048576 of them."""

        monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
        monkeypatch.setattr(limits, "pins_freely", lambda: False)
        (finding,) = [one for one in limits.limits() if one.name == "memlock"]
        assert finding.value == "8 MiB: below 1 GiB"
        assert finding.next_step.startswith("ulimit -l 1048576,")

    @pytest.mark.parametrize(("freely", "status"), [(True, "ok"), (False, "problem")])
    def test_a_low_limit_stands_in_nobodys_way_who_may_pin_more(
        self, monkeypatch: pytest.MonkeyPatch, freely: bool, status: str
    ) -> None:
        monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
        monkeypatch.setattr(limits.Topology, "read", lambda: SimpleNamespace(nics=["mlx5_0"], gpus=[]))
        monkeypatch.setattr(limits, "pins_freely", lambda: freely)
        (finding,) = [one for one in limits.limits() if one.name == "memlock"]
        assert finding.status == status
        assert ("IPC_LOCK lifts" in finding.value) is freely


def test_it_is_said_whether_proxies_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    from uccl_ep_serving.proxy.spin import Cores

    for cores, words in (
        (2, "off: 2 cores for the 1 proxy on them"),
        (64, "10 ms: 64 cores for the 1 proxy on them"),
    ):
        monkeypatch.setattr(limits, "own_cores", lambda cores=cores: Cores(frozenset(range(cores))))
        (finding,) = [one for one in limits.limits() if one.name == "proxy spin"]
        assert finding.value.startswith(words)
