"""What ``uccl-ep doctor`` says about NICs: device by device why it is used or not, and the rails of each GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sysfs_tree import machine
from uccl_ep_serving.cli.doctor.findings import Finding, Status
from uccl_ep_serving.cli.doctor.nics import examine_nics
from uccl_ep_serving.cli.doctor.transports import examine_nic_transports
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.nics import HostNics
from uccl_ep_serving.data_plane.rails import HcaFilter
from uccl_ep_serving.errors import ConfigError


def findings(name: str, root: Path, wanted: str = "") -> dict[str, Finding]:
    return {found.name: found for found in examine_nics(machine(name, root), HcaFilter(wanted))}


def test_every_nic_and_every_gpu_has_a_line(tmp_path: Path) -> None:
    found = findings("p5", tmp_path)
    assert len(found) == 32 + 8
    assert found["rdmap79s0"].value == "efa, 0000:50:00.0, Unknown, 100 Gb/s, NUMA 0: rail 0 of GPU 0"
    assert found["rails of GPU 7"].value.startswith(
        "efa: rdmap198s0, rdmap199s0, rdmap200s0, rdmap201s0: 400 Gb/s, switch from 0000:c0:00.0"
    )
    assert {one.status for one in found.values()} == {Status.OK}


def test_why_a_nic_is_not_used_and_what_to_do(tmp_path: Path) -> None:
    found = findings("dgx-h100", tmp_path)
    assert "not used: farther from the GPU (numa)" in found["mlx5_1"].value
    assert found["mlx5_1"].next_step == "name it in UCCL_EP_NICS to use it all the same"
    assert "not used: no active port" in found["mlx5_8"].value
    assert found["mlx5_8"].next_step.startswith("bring the link up: cat /sys/class/infiniband/mlx5_8/")


def test_a_gpu_without_a_nic(tmp_path: Path) -> None:
    found = findings("laptop", tmp_path)
    assert found["rails of GPU 0"].status is Status.NOTE
    assert found["rails of GPU 0"].value.startswith("roce: none: a software device")


def test_a_list_of_devices(tmp_path: Path) -> None:
    found = findings("mi300x-thor2", tmp_path, "bnxt_re2")
    assert found["bnxt_re2"].value.endswith("rail 0 (1 for 8 GPUs) of GPU 0, 1, 2, 3, 4, 5, 6, 7")
    assert "UCCL_EP_NICS=bnxt_re2 leaves it out" in found["bnxt_re0"].value


def test_a_machine_without_nics(tmp_path: Path) -> None:
    (tmp_path / "bus").mkdir()
    from uccl_ep_serving.data_plane.topology import Topology

    (found,) = examine_nics(Topology.read(tmp_path), HcaFilter())
    assert (found.name, found.status) == ("rdma", Status.NOTE)


@pytest.mark.parametrize(
    ("environment", "text", "variable"),
    [
        ({}, "", "UCCL_EP_NICS"),
        ({"NCCL_IB_HCA": "mlx5_1"}, "mlx5_1", "NCCL_IB_HCA"),
        ({"NCCL_IB_HCA": "mlx5_1", "UCCL_EP_NICS": "^mlx5_2"}, "^mlx5_2", "UCCL_EP_NICS"),
    ],
)
def test_which_variable_is_in_force(environment: dict[str, str], text: str, variable: str) -> None:
    assert HcaFilter.of(Settings.from_environment(environment)) == HcaFilter(text, variable)
    with pytest.raises(ConfigError, match="UCCL_EP_NICS"):
        HcaFilter.of(Settings.from_environment({"UCCL_EP_NICS": "^"}))


def test_transports_over_nics(tmp_path: Path) -> None:
    """Demanded and absent is a problem; otherwise there is always tcp."""
    nics = HostNics(Settings(), topology=machine("laptop", tmp_path), libraries={})
    found = {one.name: one for one in examine_nic_transports(nics.offers, Settings())}
    assert {one.status for one in found.values()} == {Status.NOTE}
    assert found["efa"].value == "unusable: no device with the efa driver"
    assert found["roce"].value.startswith("unusable: rxe0: a software device")
    demanded = {one.name: one for one in examine_nic_transports(nics.offers, Settings(transport="efa"))}
    assert demanded["efa"].status is Status.PROBLEM
    assert demanded["efa"].next_step
