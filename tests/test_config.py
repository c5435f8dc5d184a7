"""Settings are read once, checked, and never silently ignored."""

from __future__ import annotations

import dataclasses

import pytest

from uccl_ep_serving.config import SETTINGS, Settings, deciding, unknown_variables
from uccl_ep_serving.errors import ConfigError


def test_every_variable_is_a_field_and_every_field_a_variable() -> None:
    fields = {field.name for field in dataclasses.fields(Settings)} - {
        "master_address",
        "gloo_socket_ifname",
        "nccl_socket_ifname",
        "nccl_ib_hca",
    }
    assert fields == {variable.field for variable in SETTINGS}
    assert all(variable.meaning for variable in SETTINGS)


def test_sizes_take_suffixes_and_overrides_win() -> None:
    settings = Settings.from_environment({"UCCL_EP_HEAP_BYTES": "3M", "UCCL_EP_TIMEOUT": "2.5"}, timeout=1.0)
    assert settings.heap_bytes == 3 << 20
    assert settings.timeout == 1.0


def test_a_range_of_ports() -> None:
    assert Settings.from_environment({"UCCL_EP_PORT_RANGE": "20000-20100"}).port_range == (20000, 20100)
    assert Settings.from_environment({}).port_range is None


def test_proxies_raise_channels() -> None:
    assert Settings.from_environment({"UCCL_EP_PROXIES": "3"}).least_channels == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UCCL_EP_TRANSPORT", "rdma"),
        ("UCCL_EP_PROXIES", "17"),
        ("UCCL_EP_PROXIES", "two"),
        ("UCCL_EP_RING_SLOTS", "1000"),
        ("UCCL_EP_TIMEOUT", "0"),
        ("UCCL_EP_DIRECT", "maybe"),
        ("UCCL_EP_QUANTUM", "1T"),
        ("UCCL_EP_PROXY_CPUS", "7-4"),
        ("UCCL_EP_PORT_RANGE", "20000"),
        ("UCCL_EP_PORT_RANGE", "20100-20000"),
        ("UCCL_EP_PORT_RANGE", "0-10"),
        ("UCCL_EP_PORT_RANGE", "20000-65536"),
        ("UCCL_EP_PROXY_CPUS", "0-99999999999"),
    ],
)
def test_bad_values_are_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Settings.from_environment({name: value})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("UCCL_EP_HEAP_BYTES", "512MB", "as 512M"),
        ("UCCL_EP_HEAP_BYTES", "1.5G", "as 512M"),
        ("UCCL_EP_HEAP_BYTES", "M", "as 512M"),
        ("UCCL_EP_HEAP_BYTES", "-1M", r"must be in 0\.\.\d+ bytes"),
        ("UCCL_EP_PROXIES", "08", "without leading zeros, as 8"),
        ("UCCL_EP_PROXIES", "two", "whole number"),
        ("UCCL_EP_RING_SLOTS", "4k", "whole number"),
        ("UCCL_EP_PROXY_CPUS", "-3", "as 4,5 or 4-7"),
        ("UCCL_EP_PROXY_CPUS", "4,x", "'x' is no core"),
        ("UCCL_EP_PROXY_CPUS", "4-", "as 4,5 or 4-7"),
        ("UCCL_EP_TIMEOUT", "1min", "a number of seconds"),
        ("UCCL_EP_TIMEOUT", "nan", r"must be in 0\.05\.\.86400 seconds"),
        ("UCCL_EP_NIC_BANDWIDTH", "fast", "a number of GB/s"),
    ],
)
def test_what_would_be_accepted_is_said(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}='{value}': .*{words}") as caught:
        Settings.from_environment({name: value})
    assert "int()" not in str(caught.value)
    assert "convert" not in str(caught.value)


def test_ours_goes_before_nccls() -> None:
    (variable,) = [variable for variable in SETTINGS if variable.field == "nic_gid_index"]
    assert variable.source({}) == variable.source({"UCCL_EP_NIC_GID_INDEX": ""}) == ""
    theirs = {"NCCL_IB_GID_INDEX": "3"}
    assert variable.source(theirs) == "NCCL_IB_GID_INDEX"
    assert Settings.from_environment(theirs).nic_gid_index == 3
    both = {**theirs, "UCCL_EP_NIC_GID_INDEX": "5"}
    assert variable.source(both) == "UCCL_EP_NIC_GID_INDEX"
    assert Settings.from_environment(both).nic_gid_index == 5


def test_cores_are_listed_and_ranged() -> None:
    assert Settings.from_environment({"UCCL_EP_PROXY_CPUS": "4-6, 9,"}).proxy_cpus == (4, 5, 6, 9)


@pytest.mark.parametrize(
    ("both", "peer"), [("8M", 4 << 20), ("31M", 31 << 19), ("64M", 16 << 20), ("1G", 16 << 20), ("4K", 4096)]
)
def test_a_peer_has_at_most_half_where_only_the_whole_is_set(both: str, peer: int) -> None:
    assert Settings.from_environment({"UCCL_EP_BYTES_IN_FLIGHT": both}).peer_bytes_in_flight == peer
    explicit = {"UCCL_EP_BYTES_IN_FLIGHT": both, "UCCL_EP_PEER_BYTES_IN_FLIGHT": "4K"}
    assert Settings.from_environment(explicit).peer_bytes_in_flight == 4096
    assert Settings.from_environment({"UCCL_EP_BYTES_IN_FLIGHT": "8M"}, peer_bytes_in_flight=8 << 20)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="PEER_BYTES_IN_FLIGHT"):
        Settings.from_environment({"UCCL_EP_BYTES_IN_FLIGHT": "1M", "UCCL_EP_PEER_BYTES_IN_FLIGHT": "2M"})
    with pytest.raises(ConfigError, match="PEER_BYTES_IN_FLIGHT"):
        Settings.from_environment({}, bytes_in_flight=1 << 20, peer_bytes_in_flight=2 << 20)


def test_every_transport_is_named_where_the_setting_is_explained() -> None:
    (variable,) = [variable for variable in SETTINGS if variable.field == "transport"]
    for name in ("auto", "shm", "tcp", "efa", "roce"):
        assert variable.parse(name) == name
        assert name in variable.meaning
    # fake exists in tests only
    with pytest.raises(ValueError, match="auto, shm, tcp, efa, roce"):
        variable.parse("fake")


def test_unknown_variables_come_with_the_closest_name() -> None:
    assert unknown_variables({"UCCL_EP_PROXYS": "2", "UCCL_EP_PROXIES": "2", "HOME": "/"}) == {
        "UCCL_EP_PROXYS": "UCCL_EP_PROXIES"
    }


def test_what_decides_is_ours_and_what_we_read_of_nccl() -> None:
    ours = {"UCCL_EP_TIMEOUT": "7", "UCCL_EP_CACHE_DIR": "/scratch", "UCCL_EP_MISSPELT": "1"}
    nccl = {"NCCL_IB_HCA": "mlx5_0", "NCCL_IB_TC": "96"}
    others = {"MASTER_ADDR": "10.0.0.1", "NCCL_DEBUG": "INFO", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "3"}
    assert deciding({**ours, **nccl, **others}) == {**ours, **nccl}
