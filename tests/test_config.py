"""Settings are read once, checked, and never silently ignored."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from uccl_ep_serving.config import Settings, cache_base, deciding, unknown_variables
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.variables import SETTINGS, Variable


def test_every_variable_is_a_field_and_every_field_a_variable() -> None:
    fields = {field.name for field in dataclasses.fields(Settings)} - {
        "master_address",
        "gloo_socket_ifname",
        "nccl_socket_ifname",
        "nccl_ib_hca",
    }
    assert fields == {variable.field for variable in SETTINGS}
    assert all(variable.meaning for variable in SETTINGS)


#: Of every variable what a user may write, none of it the default, and what is made of it.
VALID: dict[str, dict[str, object]] = {
    "transport": {"tcp": "tcp", "roce": "roce"},
    "direct": {"0": False, "OFF": False},
    "hierarchy": {"off": "off"},
    "node_ranks": {"1": 1, "4096": 4096},
    "device": {"cuda": "cuda", "interpreter": "interpreter"},
    "gpu_check": {"false": False},
    "window": {"host": "host", "device": "device"},
    "proxies": {"2": 2, "0x10": 16},
    "channels": {"1": 1, "16": 16},
    "deterministic": {"1": True, "ON": True},
    "timeout": {"0.05": 0.05, "86400": 86400.0},
    "connect_timeout": {"0.05": 0.05, "1e3": 1000.0},
    "ring_slots": {"2": 2, "8": 8, "1048576": 1 << 20},
    "quantum": {"4096": 4096, "256M": 256 << 20},
    "bytes_in_flight": {"32m": 32 << 20, "1024G": 1 << 40},
    "peer_bytes_in_flight": {"4K": 4096, "5000": 8192},
    "writes_in_flight": {"1": 1, "65536": 65536},
    "heap_bytes": {"0": 0, "1024G": 1 << 40},
    "round_bytes": {"4K": 4096, "1G": 1 << 30},
    "chunk_bytes": {"4097": 8192, "256M": 256 << 20},
    "chunk_depth": {"1": 1, "64": 64},
    "programs": {"1": 1, "16": 16},
    "copy": {"triton": "triton", "tma": "tma"},
    "tcp_connections": {"1": 1, "16": 16},
    "tcp_auth": {"1": True},
    "socket_ifname": {"^docker0": "^docker0"},
    "secret_file": {"/run/secret": "/run/secret"},
    "port_range": {"1-65535": (1, 65535), " 7000 - 7000 ": (7000, 7000)},
    "nics": {"mlx5_0,mlx5_3": "mlx5_0,mlx5_3"},
    "nic_gid_index": {"0": 0, "1023": 1023},
    "nic_pkey_index": {"1": 1, "65535": 65535},
    "nic_traffic_class": {"0": 0, "255": 255},
    "nic_service_level": {"0": 0, "15": 15},
    "nic_timeout": {"1": 1, "31": 31},
    "nic_retries": {"0": 0, "7": 7},
    "nic_qps": {"2": 2, "8": 8},
    "nic_bytes_in_flight": {"1": 4096, "1024G": 1 << 40},
    "nic_flush": {"read": "read"},
    "verbs": {"pyverbs": "pyverbs", "ctypes": "ctypes"},
    "proxy_cpus": {"4,5": (4, 5), "8191": (8191,), "0-2": (0, 1, 2)},
    "proxy_spin": {"off": "off", "0": "off", "2.50": "2.5", "1000000": "1e+06"},
    "flight_recorder": {"/tmp/flight": "/tmp/flight"},
    "trace": {"/tmp/trace": "/tmp/trace"},
    "trace_every": {"2": 2, "1073741824": 1 << 30},
    "trace_what": {"whole": "whole"},
    "advice": {"1": True, "on": True, "true": True},
    "fault_proxy_after": {"1": 1},
}


@pytest.mark.parametrize("variable", SETTINGS, ids=lambda variable: variable.field)
def test_every_variable_takes_what_is_right(variable: Variable) -> None:
    """Its bounds included; a new variable has no line of VALID, and fails."""
    for text, value in VALID[variable.field].items():
        settings = Settings.from_environment({variable.name: text})
        assert getattr(settings, variable.field) == value
        assert type(getattr(settings, variable.field)) is type(value)
        assert value != getattr(Settings(), variable.field)
        if variable.fallback:
            assert getattr(Settings.from_environment({variable.fallback: text}), variable.field) == value


def test_defaults_fit_together() -> None:
    """What is divided leaves no rest, and nobody waits longer to connect than for a message."""
    settings = Settings()
    for whole, part in (
        (settings.bytes_in_flight, settings.peer_bytes_in_flight),
        (settings.peer_bytes_in_flight, settings.quantum),
        (settings.round_bytes, settings.chunk_bytes * settings.chunk_depth),
        (settings.heap_bytes, settings.round_bytes),
    ):
        assert whole >= part
        assert whole % part == 0
    assert settings.writes_in_flight <= settings.ring_slots
    assert settings.connect_timeout <= settings.timeout


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


def test_compiled_code_is_kept_in_absolute_directories_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user of a container may have neither HOME nor an entry in passwd: "~" is then no home but a name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_base({"XDG_CACHE_HOME": "cache"}) == []
    assert cache_base({"UCCL_EP_CACHE_DIR": "here", "XDG_CACHE_HOME": "/x"}) == [str(tmp_path / "here"), "/x"]


def test_what_a_variable_takes_a_field_takes() -> None:
    for variable in SETTINGS:
        for value in VALID[variable.field].values():
            Settings(**{variable.field: value}).check()
    Settings(timeout=2).check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transport", "shmm"),
        ("hierarchy", "of"),
        ("device", "gpu"),
        ("timeout", float("inf")),
        ("timeout", float("nan")),
        ("proxies", 0),
        ("proxies", "2"),
        ("proxies", True),
        ("direct", 0),
        ("ring_slots", 1000),
        ("port_range", (5, 4)),
        ("secret_file", None),
    ],
)
def test_a_field_takes_nothing_else(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"settings: {field}="):
        Settings(**{field: value}).check()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"settings: {field}="):
        Settings.from_environment({}, **{field: value})
