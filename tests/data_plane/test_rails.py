"""Which NICs a rank uses on each of the machines, how a list of devices changes it, and the words that explain it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sysfs_tree import machine, topology
from uccl_ep_serving.data_plane.rails import HcaFilter, Rails, choose_rails
from uccl_ep_serving.data_plane.topology import Gpu, Nic, Topology
from uccl_ep_serving.errors import ConfigError


def rails_of_all(found: Topology, transport: str, wanted: str = "") -> list[list[str]]:
    """Names of the NICs of each GPU."""
    return [
        [nic.name for nic in choose_rails(found, transport, gpu=gpu.address, wanted=HcaFilter(wanted)).nics]
        for gpu in found.gpus
    ]


def reasons(rails: Rails) -> dict[str, str]:
    return {verdict.nic.name: verdict.reason for verdict in rails.verdicts}


def test_p5_has_four_rails_a_gpu(tmp_path: Path) -> None:
    dealt = rails_of_all(machine("p5", tmp_path), "efa")
    assert dealt[0] == ["rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0"]
    assert dealt[7] == ["rdmap198s0", "rdmap199s0", "rdmap200s0", "rdmap201s0"]
    assert len({name for names in dealt for name in names}) == 32


def test_p5en_has_two_rails_a_gpu(tmp_path: Path) -> None:
    dealt = rails_of_all(machine("p5en", tmp_path), "efa")
    assert dealt[1] == ["rdmap97s0", "rdmap98s0"]
    assert [len(names) for names in dealt] == [2] * 8
    assert len({name for names in dealt for name in names}) == 16


def test_p6_b200_without_bridges_deals_the_nics_of_a_node_one_to_a_gpu(tmp_path: Path) -> None:
    dealt = rails_of_all(machine("p6-b200", tmp_path), "efa")
    assert dealt == [[f"rdmap{root}s{slot}"] for root in (16, 32) for slot in (28, 29, 30, 31)]


def test_p6_b200_takes_the_ports_of_its_nvlink_switches_for_no_network(tmp_path: Path) -> None:
    """Also where EFA cannot be used: they lead to no other host."""
    found = machine("p6-b200", tmp_path)
    assert rails_of_all(found, "roce") == [[]] * 8
    words = reasons(choose_rails(found, "roce", gpu=found.gpus[0].address))
    assert (
        words["ibp115s0f0"] == "the network of this machine is EFA: used only when UCCL_EP_NICS or NCCL_IB_HCA names it"
    )
    assert rails_of_all(found, "roce", "ibp115s0f0") == [["ibp115s0f0"]] * 8


def test_l4_share_the_one_nic(tmp_path: Path) -> None:
    assert rails_of_all(machine("l4-pcie", tmp_path), "roce") == [["mlx5_0"]] * 8


def test_nvlink_pairs_share_the_nic_of_their_switch(tmp_path: Path) -> None:
    found = machine("nvlink-pairs", tmp_path)
    assert rails_of_all(found, "roce") == [[f"mlx5_{nic}"] for nic in (0, 0, 1, 1, 3, 3, 4, 4)]
    words = reasons(choose_rails(found, "roce", gpu=found.gpus[0].address))
    assert words["mlx5_0"] == "rail 0 (1 for 2 GPUs)"


def test_p4d_gpus_share_a_nic_two_by_two(tmp_path: Path) -> None:
    found = machine("p4d", tmp_path)
    assert rails_of_all(found, "efa") == [[f"rdmap{root}s27"] for root in (16, 16, 32, 32, 144, 144, 160, 160)]
    rails = choose_rails(found, "efa", gpu=found.gpus[0].address)
    assert reasons(rails)["rdmap16s27"] == "rail 0 (1 for 2 GPUs)"
    assert reasons(rails)["rdmap144s27"] == "farther from the GPU (system) than rdmap16s27 (root)"


def test_mi300x_uses_the_nic_of_its_switch(tmp_path: Path) -> None:
    found = machine("mi300x-thor2", tmp_path)
    assert rails_of_all(found, "roce") == [[f"bnxt_re{index}"] for index in range(8)]
    assert rails_of_all(found, "efa") == [[]] * 8


def test_dgx_h100_leaves_the_storage_ports_alone(tmp_path: Path) -> None:
    found = machine("dgx-h100", tmp_path)
    compute = [0, 3, 4, 5, 6, 9, 10, 11]
    assert rails_of_all(found, "roce") == [[f"mlx5_{index}"] for index in compute]
    words = reasons(choose_rails(found, "roce", gpu="0000:1B:00.0"))
    assert words["mlx5_0"] == "rail 0"
    assert words["mlx5_1"] == "farther from the GPU (numa) than mlx5_0 (switch)"
    assert words["mlx5_6"] == "farther from the GPU (system) than mlx5_0 (switch)"
    assert words["mlx5_8"] == "no active port"


def test_a_laptop_uses_soft_roce_only_when_it_is_named(tmp_path: Path) -> None:
    found = machine("laptop", tmp_path)
    assert rails_of_all(found, "roce") == [[]]
    assert "used only when" in reasons(choose_rails(found, "roce", gpu=found.gpus[0].address))["rxe0"]
    assert rails_of_all(found, "roce", "rxe0") == [["rxe0"]]
    assert rails_of_all(found, "roce", "^mlx5") == [[]], "not to exclude it is not to name it"


def test_a_slow_port_as_near_as_a_fast_one_is_no_rail(tmp_path: Path) -> None:
    found = topology(
        """
        pci0000:00/00:01.0/01:00.0 gpu nvidia numa=0
        pci0000:40/40:01.0/41:00.0 nic fast driver=mlx5_core numa=0 rate=400 link=Ethernet
        pci0000:41/41:01.0/42:00.0 nic half driver=mlx5_core numa=0 rate=200 link=Ethernet
        pci0000:42/42:01.0/43:00.0 nic slow driver=mlx5_core numa=0 rate=25 link=Ethernet
        """,
        tmp_path,
    )
    rails = choose_rails(found, "roce", gpu="0000:01:00.0")
    assert [nic.name for nic in rails.nics] == ["fast", "half"]
    assert reasons(rails)["slow"] == "25 Gb/s: less than half of fast"


def test_rails_are_of_one_network(tmp_path: Path) -> None:
    """A virtual machine that shows no distances, with an Ethernet port beside the InfiniBand ones."""
    buses = [f"pci0000:{bus:02x}/{bus:02x}:01.0/{bus + 1:02x}:00.0" for bus in range(16, 16 + 10 * 2, 2)]
    nics = [(f"mlx5_{index}", 200, "InfiniBand") for index in range(8)]
    nics.insert(0, ("mlx5_an", 400, "Ethernet"))
    lines = [f"{buses[0]} gpu nvidia numa=0"]
    lines += [
        f"{bus} nic {name} driver=mlx5_core numa=0 rate={rate} link={link}"
        for bus, (name, rate, link) in zip(buses[1:], nics, strict=True)
    ]
    found = topology("\n".join(lines), tmp_path)
    rails = choose_rails(found, "roce", gpu=found.gpus[0].address)
    assert [nic.name for nic in rails.nics] == [f"mlx5_{index}" for index in range(8)]
    assert reasons(rails)["mlx5_an"] == "Ethernet: the network of the rails is InfiniBand, with 1600 Gb/s in all"
    assert rails_of_all(found, "roce", "=mlx5_an") == [["mlx5_an"]]


@pytest.mark.parametrize(("ranks", "each"), [(1, 16), (2, 8), (8, 2), (5, 3), (32, 1)])
def test_ranks_without_a_gpu_share_all_nics_evenly(ranks: int, each: int, tmp_path: Path) -> None:
    found = machine("p5en", tmp_path)
    dealt = [choose_rails(found, "efa", local_rank=rank, local_ranks=ranks).nics for rank in range(ranks)]
    assert each <= min(map(len, dealt)) <= max(map(len, dealt)) <= each + 1
    assert {nic.name for nics in dealt for nic in nics} == {nic.name for nic in found.nics}


class TestHcaFilter:
    @pytest.mark.parametrize(
        ("text", "left"),
        [
            ("", ["mlx5_0", "mlx5_1", "mlx5_10", "bond"]),
            ("mlx5_1", ["mlx5_1", "mlx5_10"]),
            ("=mlx5_1", ["mlx5_1"]),
            ("^mlx5_1", ["mlx5_0", "bond"]),
            ("^=mlx5_1", ["mlx5_0", "mlx5_10", "bond"]),
            ("bond,mlx5_0", ["mlx5_0", "bond"]),
            ("mlx5_0:1,mlx5_1:2", ["mlx5_0"]),
            (" mlx5_0 , bond", ["mlx5_0", "bond"]),
        ],
    )
    def test_the_syntax_of_nccl(self, text: str, left: list[str]) -> None:
        nics = [
            Nic(name, "mlx5_core", "Ethernet", True, 400.0, 0, "0000:01:00.0", (), (1,))
            for name in ("mlx5_0", "mlx5_1", "mlx5_10", "bond")
        ]
        assert [nic.name for nic in nics if HcaFilter(text).accepts(nic)] == left

    def test_a_port(self) -> None:
        nic = Nic("mlx5_0", "mlx5_core", "Ethernet", True, 400.0, 0, "0000:01:00.0", (), (1, 2))
        assert HcaFilter("mlx5_0:2").port(nic) == 2
        assert HcaFilter("mlx5_0").port(nic) == 1
        excluded = HcaFilter("^mlx5_0:1")
        assert excluded.accepts(nic)
        assert excluded.port(nic) == 2
        assert not HcaFilter("^mlx5_0").accepts(nic)

    @pytest.mark.parametrize(
        ("text", "left"), [("^", False), ("=", True), (",", True), ("mlx5_0:x", False), ("mlx5_0:x,mlx5_0:1", True)]
    )
    def test_nonsense_is_refused_in_our_variable_and_read_as_nccl_does_in_its_own(self, text: str, left: bool) -> None:
        with pytest.raises(ConfigError, match="UCCL_EP_NICS"):
            HcaFilter(text)
        nic = Nic("mlx5_0", "mlx5_core", "Ethernet", True, 400.0, 0, "0000:01:00.0", (), (1,))
        theirs = HcaFilter(text, "NCCL_IB_HCA")
        assert theirs.accepts(nic) == left
        assert theirs.meant(nic)
        assert not theirs.demands(nic)

    @pytest.mark.parametrize(
        ("text", "ours", "theirs"),
        [
            ("mlx5_0,mlx5_1", "", ""),
            ("mlx5_9,mlx5_1", "", "mlx5_9"),
            ("=mlx5_9,mlx5_1", "mlx5_9", "mlx5_9"),
            ("mlx5_9", "mlx5_9", "mlx5_9"),
            ("mlx5_0,mlx5_2", "mlx5_2", "mlx5_2"),
            ("mlx5_0,mlx5_2:1", "mlx5_2:1", "mlx5_2:1"),
            ("mlx5_0:1,mlx5_1:2", "mlx5_1:2", "mlx5_1:2"),
            ("=mlx5_1:2", "mlx5_1:2", "mlx5_1:2"),
            ("mlx5", "", ""),
            ("mlx5:2", "", ""),
            ("mlx5_1:2,mlx6", "mlx5_1:2,mlx6", "mlx5_1:2,mlx6"),
            ("bnxt:2", "bnxt:2", "bnxt:2"),
            ("^mlx5_9", "", ""),
            ("efa_0", "", "efa_0"),
        ],
    )
    def test_what_is_named_and_is_not_there(self, text: str, ours: str, theirs: str) -> None:
        """mlx5_2 has no link; NCCL's list says nothing of EFA devices."""
        nics = [
            Nic(
                name, "mlx5_core", "Ethernet", name != "mlx5_2", 400.0, 0, "0000:01:00.0", (), (1,) * (name != "mlx5_2")
            )
            for name in ("mlx5_0", "mlx5_1", "mlx5_2")
        ]
        nics.append(Nic("efa_0", "efa", "Unknown", True, 100.0, 0, "0000:02:00.0", (), (1,)))
        for variable, missing in (("UCCL_EP_NICS", ours), ("NCCL_IB_HCA", theirs)):
            words = HcaFilter(text, variable).missing(nics)
            assert ",".join(one.partition(" (")[0] for one in words) == missing

    def test_the_list_of_nccl_rules_no_efa_device_out(self, tmp_path: Path) -> None:
        found = machine("p5en", tmp_path)
        for text in ("mlx5_0", "^rdmap", "=mlx5_0:1", "^"):
            rails = choose_rails(found, "efa", gpu=found.gpus[0].address, wanted=HcaFilter(text, "NCCL_IB_HCA"))
            assert [nic.name for nic in rails.nics] == ["rdmap80s0", "rdmap81s0"]
        ours = choose_rails(found, "efa", gpu=found.gpus[0].address, wanted=HcaFilter("mlx5_0"))
        assert ours.nics == ()

    def test_the_variable_is_named_in_the_reason(self, tmp_path: Path) -> None:
        found = machine("mi300x-thor2", tmp_path)
        rails = choose_rails(
            found, "roce", gpu=found.gpus[0].address, wanted=HcaFilter("=bnxt_re3,bnxt_re5", "NCCL_IB_HCA")
        )
        assert [nic.name for nic in rails.nics] == ["bnxt_re3"]
        assert reasons(rails)["bnxt_re0"] == "NCCL_IB_HCA==bnxt_re3,bnxt_re5 leaves it out"


class TestProxies:
    def test_rails_are_dealt_to_proxies(self, tmp_path: Path) -> None:
        found = machine("p5", tmp_path)
        rails = choose_rails(found, "efa", gpu=found.gpus[0].address)
        one, two, three, four = rails.nics
        assert rails.of_proxy(0, 1) == (one, two, three, four)
        assert [rails.of_proxy(proxy, 2) for proxy in range(2)] == [(one, three), (two, four)]
        assert [rails.of_proxy(proxy, 6) for proxy in range(6)] == [(n,) for n in (one, two, three, four, one, two)]
        assert Rails("efa", (), ()).of_proxy(0, 1) == ()


@given(
    gpus=st.integers(1, 8),
    nics=st.integers(0, 20),
    data=st.data(),
)
def test_however_devices_lie_every_gpu_has_its_rails(gpus: int, nics: int, data: st.DataObject) -> None:
    """Any forest: each GPU gets at least one NIC if there is any, only nearest ones, and nearest ones are all used."""
    roots = st.integers(0, 2)
    bridges = st.integers(0, 2)

    def place(index: int) -> tuple[tuple[str, ...], int]:
        root = data.draw(roots)
        path = (f"pci0000:0{root}", *(f"0000:0{root}:{data.draw(bridges):02x}.0" for _ in range(data.draw(bridges))))
        return (*path, f"0000:{index:02x}:00.0"), root // 2

    all_gpus, all_nics = [], []
    for index in range(gpus):
        path, numa = place(index + 16)
        all_gpus.append(Gpu(path[-1], "NVIDIA", numa, path))
    for index in range(nics):
        path, numa = place(index + 64)
        all_nics.append(Nic(f"mlx5_{index}", "mlx5_core", "Ethernet", True, 400.0, numa, path[-1], path, (1,)))
    found = Topology(tuple(all_gpus), tuple(all_nics))
    used: set[str] = set()
    for gpu in all_gpus:
        rails = choose_rails(found, "roce", gpu=gpu.address)
        assert bool(rails.nics) == bool(all_nics)
        assert len(rails.verdicts) == nics
        assert all(verdict.reason for verdict in rails.verdicts)
        nearest = min((found.distance(gpu, nic) for nic in all_nics), default=None)
        assert all(found.distance(gpu, nic) == nearest for nic in rails.nics)
        used.update(nic.name for nic in rails.nics)
    wanted_by = {
        gpu: frozenset(nic for nic in all_nics if found.distance(gpu, nic) == _least(found, gpu)) for gpu in all_gpus
    }
    for near in wanted_by.values():
        sharing = [gpu for gpu, other in wanted_by.items() if other == near]
        if len(sharing) <= len(near):
            assert {nic.name for nic in near} <= used


def _least(found: Topology, gpu: Gpu) -> int:
    return min((found.distance(gpu, nic) for nic in found.nics), default=0)
