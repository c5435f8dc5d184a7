"""Settings: every ``UCCL_EP_*`` variable, read once, checked, frozen.

The key itself (``UCCL_EP_SECRET``) is read elsewhere. A :class:`Settings` is built when a Buffer is created; ranks
exchange the ones marked "agreed" at bootstrap and refuse to start when they differ. Unknown ``UCCL_EP_*`` variables are
reported, because a misspelt setting that silently does nothing costs hours.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError
from .variables import LEAST_IN_FLIGHT, PREFIX, SETTINGS

__all__ = [
    "KEY_VARIABLE",
    "Settings",
    "cache_base",
    "cache_wanted",
    "deciding",
    "unknown_variables",
]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, with their defaults. Units: bytes and seconds."""

    transport: str = "auto"
    direct: bool = True
    hierarchy: str = "auto"
    node_ranks: int = 0
    device: str = "auto"
    gpu_check: bool = True
    window: str = "auto"
    proxies: int = 1
    channels: int = 0
    deterministic: bool = False
    timeout: float = 100.0
    connect_timeout: float = 60.0
    ring_slots: int = 4096
    quantum: int = 1 * _MIB
    bytes_in_flight: int = 64 * _MIB
    peer_bytes_in_flight: int = 16 * _MIB
    writes_in_flight: int = 4096
    heap_bytes: int = 512 * _MIB
    round_bytes: int = 64 * _MIB
    chunk_bytes: int = 1 * _MIB
    chunk_depth: int = 4
    programs: int = 0
    copy: str = "auto"
    tcp_connections: int = 2
    tcp_auth: bool = False
    socket_ifname: str = ""
    port_range: tuple[int, int] | None = None
    secret_file: str = ""
    nics: str = ""
    nic_gid_index: int = -1
    nic_pkey_index: int = 0
    nic_traffic_class: int = -1
    nic_service_level: int = -1
    nic_timeout: int = 20
    nic_retries: int = -1
    nic_qps: int = 1
    nic_bytes_in_flight: int = 0
    nic_flush: str = "auto"
    verbs: str = "auto"
    proxy_cpus: tuple[int, ...] = ()
    proxy_spin: str = "auto"
    flight_recorder: str = ""
    trace: str = ""
    trace_every: int = 1
    trace_what: str = "histogram"
    advice: bool = False
    fault_proxy_after: int = 0
    #: Not variables of ours: the launcher's MASTER_ADDR and the interfaces of gloo and NCCL, hints for choosing one.
    master_address: str = ""
    gloo_socket_ifname: str = ""
    nccl_socket_ifname: str = ""
    #: Not a variable of ours: NCCL_IB_HCA, in force where ``nics`` is empty.
    nccl_ib_hca: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Defaults, then the environment, then ``overrides``.

        Raises:
            ConfigError: a value does not parse, is out of range, or contradicts another one.
        """
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for variable in SETTINGS:
            name = variable.source(environment)
            if not name:
                continue
            try:
                values[variable.field] = variable.parse(environment[name])
            except ValueError as error:
                raise ConfigError(f"{name}={environment[name]!r}: {error}. Meaning: {variable.meaning}") from None
        values["master_address"] = environment.get("MASTER_ADDR", "")
        values["gloo_socket_ifname"] = environment.get("GLOO_SOCKET_IFNAME", "")
        values["nccl_socket_ifname"] = environment.get("NCCL_SOCKET_IFNAME", "")
        values["nccl_ib_hca"] = environment.get("NCCL_IB_HCA", "")
        given = {**values, **overrides}
        settings = cls(**given)
        if "peer_bytes_in_flight" not in given:
            room = max(settings.bytes_in_flight // 2, LEAST_IN_FLIGHT)
            settings = dataclasses.replace(settings, peer_bytes_in_flight=min(settings.peer_bytes_in_flight, room))
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ConfigError where a value is none that its variable may have, or contradicts another one.

        A Settings may be made of any.
        """
        for variable in SETTINGS:
            value, default = getattr(self, variable.field), getattr(_DEFAULTS, variable.field)
            if value == default and type(value) is type(default):
                continue
            try:
                parsed = variable.parse(_written(variable.field, value))
                if type(value) not in ({int, float} if isinstance(parsed, float) else {type(parsed)}):
                    raise ValueError(f"must be of type {type(parsed).__name__}")
            except ValueError as error:
                raise ConfigError(
                    f"settings: {variable.field}={value!r}: {error}. Meaning: {variable.meaning}"
                ) from None
        if self.peer_bytes_in_flight > self.bytes_in_flight:
            raise ConfigError(
                f"UCCL_EP_PEER_BYTES_IN_FLIGHT = {self.peer_bytes_in_flight} exceeds UCCL_EP_BYTES_IN_FLIGHT = "
                f"{self.bytes_in_flight}: one slow peer could then stop all others"
            )

    @property
    def least_channels(self) -> int:
        """Channels where no NIC asks for more: streams are dealt to proxies by channel, so none of them idles."""
        return max(self.channels, self.proxies)

    def agreed(self) -> dict[str, Any]:
        """The values on which all ranks must agree, by variable name."""
        return {variable.name: getattr(self, variable.field) for variable in SETTINGS if variable.agreed}


_DEFAULTS = Settings()


def _written(field: str, value: object) -> str:
    """``value`` as the variable of ``field`` has it."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ("-" if field == "port_range" else ",").join(map(str, value))
    return str(value)


#: Holds the key itself. It is no setting: those are shown, compared and handed on.
KEY_VARIABLE = PREFIX + "SECRET"

#: Read before any Settings exists, by the compiled-code cache.
_EARLY = {
    PREFIX + "CACHE_DIR": "directory for compiled code; default: the user's cache directory",
}


def cache_wanted(environment: Mapping[str, str] | None = None) -> str:
    """The directory for compiled code that the user has asked for, absolute; "" for none."""
    wanted = (os.environ if environment is None else environment).get(PREFIX + "CACHE_DIR", "")
    return os.path.abspath(os.path.expanduser(wanted)) if wanted else ""


def cache_base(environment: Mapping[str, str] | None = None) -> list[str]:
    """Candidate directories for compiled code, best first."""
    environment = os.environ if environment is None else environment
    found = (
        cache_wanted(environment),
        environment.get("XDG_CACHE_HOME"),
        os.path.expanduser("~/.cache"),
    )
    # a user without a home, as containers have them, keeps the "~"; and a relative XDG_CACHE_HOME counts for nothing
    return [base for base in found if base and os.path.isabs(base)]


def unknown_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """``UCCL_EP_*`` variables that mean nothing, each with the closest real name (or "")."""
    environment = os.environ if environment is None else environment
    known = [variable.name for variable in SETTINGS] + [*_EARLY, KEY_VARIABLE]
    unknown = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, 1)), "") for name in unknown}


def deciding(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of ``environment`` that decide something here: all of ours but the key, and NCCL's that are read.

    MASTER_ADDR is not among them: launchers give each process its own.
    """
    environment = os.environ if environment is None else environment
    theirs = {"NCCL_IB_HCA", *(variable.fallback for variable in SETTINGS if variable.fallback.startswith("NCCL_"))}
    ours = {name for name in environment if name.startswith(PREFIX)} - {KEY_VARIABLE}
    return {name: value for name, value in environment.items() if name in ours | theirs}
