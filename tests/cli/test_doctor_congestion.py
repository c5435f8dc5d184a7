"""Flow control of RoCE NICs as the doctor finds it: the kernel's messages, trees of sysfs and configfs, the verdict."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.sysfs_tree import topology
from uccl_ep_serving.cli.doctor import dcb
from uccl_ep_serving.cli.doctor.congestion import examine_flow_control
from uccl_ep_serving.cli.doctor.dcb import Dcb, DcbError
from uccl_ep_serving.cli.doctor.findings import Finding, Status
from uccl_ep_serving.config import Settings

THOR = "pci0000:00/00:01.0/01:00.0 nic bnxt_re0 driver=bnxt_en numa=0 rate=400 link=Ethernet net=eth2"
CONNECTX = "pci0000:00/00:01.0/01:00.0 nic mlx5_0 driver=mlx5_core numa=0 rate=400 link=Ethernet net=eth2"


def silent(interface: str) -> Dcb:
    raise DcbError("the driver does not tell (Operation not supported)")


def telling(*pfc: int, **dscp: int) -> Callable[[str], Dcb]:
    def ask(interface: str) -> Dcb:
        assert interface == "eth2"
        return Dcb(frozenset(pfc), {int(name[1:]): priority for name, priority in dscp.items()})

    return ask


def examine(
    line: str, root: Path, ask: Callable[[str], Dcb], files: dict[str, str] | None = None, **settings: int
) -> Finding:
    """The one finding, on a machine with the NIC of ``line`` and further ``files`` below ``root``."""
    found = topology(line, root)
    for name, text in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    (finding,) = examine_flow_control(found, Settings(**settings), root, ask)  # type: ignore[arg-type]
    return finding


def configfs(enabled: str) -> dict[str, str]:
    return {"kernel/config/bnxt_re/bnxt_re0/ports/1/cc/ecn_enable": enabled}


def sysfs(priority: int, np: str, rp: str) -> dict[str, str]:
    return {f"class/net/eth2/ecn/roce_{end}/enable/{priority}": text for end, text in (("np", np), ("rp", rp))}


class TestVerdict:
    def test_thor_with_pfc_on_the_priority_of_its_packets(self, tmp_path: Path) -> None:
        found = examine(THOR, tmp_path, telling(3, d26=3), configfs("0x1"))
        assert found.status is Status.OK
        assert found.name == "bnxt_re0 flow control"
        assert found.value == "eth2: PFC on 3; ECN on; our packets have DSCP 26, priority 3"

    def test_thor_without_any_is_warned_of(self, tmp_path: Path) -> None:
        found = examine(THOR, tmp_path, telling(), configfs("0x0"))
        assert found.status is Status.NOTE
        assert "PFC on no priority; ECN off" in found.value
        assert "throughput of these NICs collapses" in found.value
        assert "set PFC or ECN for priority 3 with niccli" in found.next_step

    def test_what_is_not_shown_is_said_to_be_unknown(self, tmp_path: Path) -> None:
        found = examine(THOR, tmp_path, silent)
        assert found.status is Status.NOTE
        assert "PFC unknown (the driver does not tell (Operation not supported))" in found.value
        assert "ECN unknown (root has to make the directory first: mkdir /sys/kernel/config/bnxt_re/bnxt_re0)" in (
            found.value
        )
        assert found.next_step == "look at it with niccli or bnxt_setupcc.sh"

    @pytest.mark.parametrize(
        ("np", "rp", "status", "words"),
        [("1", "1", Status.OK, "ECN on"), ("1", "0", Status.NOTE, "ECN off"), ("", "", Status.NOTE, "ECN unknown")],
    )
    def test_both_ends_of_a_mellanox_nic_take_part_in_ecn(
        self, np: str, rp: str, status: Status, words: str, tmp_path: Path
    ) -> None:
        found = examine(CONNECTX, tmp_path, telling(), sysfs(0, np, rp) if np else {})
        assert (found.status, words in found.value) == (status, True)
        assert "collapses" not in found.value

    def test_packets_of_another_class_than_the_lossless_one(self, tmp_path: Path) -> None:
        found = examine(CONNECTX, tmp_path, telling(3, d26=3), sysfs(3, "1", "1"))
        assert found.status is Status.NOTE
        assert "our packets have DSCP 0, priority 0: they are dropped where others are paused" in found.value
        assert found.next_step.startswith("UCCL_EP_NIC_TRAFFIC_CLASS=104 (DSCP 26)")

    def test_the_traffic_class_that_was_set_counts(self, tmp_path: Path) -> None:
        found = examine(CONNECTX, tmp_path, telling(3), nic_traffic_class=106)
        assert found.status is Status.OK
        assert "our packets have DSCP 26, priority 3" in found.value

    def test_without_a_table_the_upper_bits_are_the_priority(self, tmp_path: Path) -> None:
        assert "=96 (DSCP 24)" in examine(CONNECTX, tmp_path, telling(3)).next_step

    def test_counters_tell_what_has_happened(self, tmp_path: Path) -> None:
        place = "class/infiniband/mlx5_0/ports/1/hw_counters"
        counters = {"np_cnp_sent": "7", "rp_cnp_handled": "5", "local_ack_timeout_err": "2", "odd": "x"}
        found = examine(CONNECTX, tmp_path, silent, {f"{place}/{name}": text for name, text in counters.items()})
        assert found.value.endswith("; 12 congestion notifications, 2 acknowledgements that came too late")

    def test_an_interface_elsewhere(self, tmp_path: Path) -> None:
        found = examine(THOR.replace(" net=eth2", ""), tmp_path, telling(3))
        assert "bnxt_re0: PFC unknown (its interface is not in this network namespace)" in found.value

    @pytest.mark.parametrize(
        "line",
        [
            "pci0000:00/00:01.0/01:00.0 nic efa0 driver=efa numa=0 rate=100 link=Unknown",
            "pci0000:00/00:01.0/01:00.0 nic mlx5_0 driver=mlx5_core numa=0 rate=400 link=InfiniBand",
            THOR + " state=DOWN",
            "- nic rxe0 rate=10 link=Ethernet",
        ],
    )
    def test_others_have_none(self, line: str, tmp_path: Path) -> None:
        assert list(examine_flow_control(topology(line, tmp_path), Settings(), tmp_path, silent)) == []


def attribute(kind: int, body: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(body), kind) + body + bytes(-len(body) % 4)


def reply(*nested: bytes, kind: int = 79) -> bytes:
    body = struct.pack("=BBH", 0, 21, 0) + attribute(1, b"eth2\0") + attribute(13 | 0x8000, b"".join(nested))
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 7) + body


def pfc(enabled: int) -> bytes:
    """``struct ieee_pfc``: capability, enabled, macsec bypass, delay, two times eight counts."""
    return attribute(2, struct.pack("=BBBxH2x16Q", 8, enabled, 0, 0, *range(16)))


class TestMessages:
    def test_a_request_names_the_interface(self) -> None:
        text = dcb.request("eth2")
        assert struct.unpack_from("=IHH", text) == (len(text), 78, 1)
        assert text[16:] == bytes([0, 21, 0, 0]) + struct.pack("=HH", 9, 1) + b"eth2\0\0\0\0"

    def test_a_reply(self) -> None:
        table = attribute(3, attribute(1, struct.pack("=BBH", 5, 3, 26)) + attribute(1, struct.pack("=BBH", 1, 4, 2)))
        found = dcb.read_reply(reply(attribute(1, bytes(60)), pfc(0b1001), table))
        assert found == Dcb(frozenset({0, 3}), {26: 3})

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (struct.pack("=IHHIIi", 36, 2, 0, 1, 7, -95) + bytes(16), "Operation not supported"),
            (reply(), "tells nothing of PFC"),
            (reply(attribute(2, b"\1")), "tells nothing of PFC"),
            (b"\0" * 10, "cut short"),
        ],
    )
    def test_a_refusal_is_said(self, text: bytes, words: str) -> None:
        with pytest.raises(DcbError, match=words):
            dcb.read_reply(text)

    def test_a_damaged_reply_ends(self) -> None:
        whole = reply(pfc(8))
        for place in range(20, len(whole)):
            with contextlib.suppress(DcbError):
                assert dcb.read_reply(whole[:place] + bytes(len(whole) - place)).pfc <= {3}
            with contextlib.suppress(DcbError):
                dcb.read_reply(whole[:place] + b"\xff" * (len(whole) - place))

    def test_this_kernel_is_asked(self) -> None:
        """Loopback has no flow control: the kernel, or the sandbox around it, says so."""
        with pytest.raises(DcbError):
            dcb.ask("lo")
