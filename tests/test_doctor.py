"""``uccl-ep doctor``: its report, its exit status, and what it reads from the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT, run_python


class TestDoctor:
    def test_reports_every_section_as_json(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "uccl_ep_serving.cli.main", "doctor", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        report: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if report["usable"] else 1)
        sections = report["sections"]
        assert list(sections) == [
            "environment",
            "engines",
            "gpus",
            "nics",
            "transports",
            "limits",
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

    def test_a_misspelt_setting_is_named_with_the_nearest_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from uccl_ep_serving.cli import doctor

        monkeypatch.setenv("UCCL_EP_PROXYS", "2")
        (found,) = [found for found in doctor.settings() if found.name == "UCCL_EP_PROXYS"]
        assert found.next_step == "did you mean UCCL_EP_PROXIES?"

    def test_nics_are_read_from_sysfs(self, tmp_path: Path) -> None:
        from uccl_ep_serving.cli.rdma_devices import Nic, find_nics

        device = tmp_path / "rdmap0s6"
        port = device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text("Unspecified\n")
        (port / "state").write_text("4: ACTIVE\n")
        (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
        (device / "device").mkdir()
        (device / "device" / "numa_node").write_text("1\n")
        (tmp_path / "drivers" / "efa").mkdir(parents=True)
        (device / "device" / "driver").symlink_to(tmp_path / "drivers" / "efa")
        (found,) = [nic for nic in find_nics(tmp_path) if nic.name == "rdmap0s6"]
        assert found == Nic("rdmap0s6", "efa", "Unspecified", True, "100 Gb/sec (4X EDR)", 1)
        assert found.is_efa
        assert find_nics(tmp_path / "nowhere") == []
