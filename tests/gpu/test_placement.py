"""Where the windows of a GPU Buffer lie, by setting and by what stands in the way; and who forwards rows then."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.gpu_direct import GpuReach, NicWrites
from uccl_ep_serving.errors import ConfigError, TransportError
from uccl_ep_serving.gpu import context as gpu_context
from uccl_ep_serving.gpu.context import GpuContext
from uccl_ep_serving.gpu.streams import HostOrder

NEAR = GpuReach(pairs=True)
FAR = GpuReach(far="rank 1: mlx5_0: GPUDirect works in no way", pairs=True)


class Window:
    """A device window that notes what becomes of it."""

    def __init__(self, events: list[str], fails: str, proxied: frozenset[int], near_only: bool) -> None:
        self.own, self.nbytes, self.near_only = 1 << 40, 4096, near_only
        self._events = events
        kind = "near" if near_only else "whole"
        if fails == kind:
            raise TransportError("sharing device windows: rank 1: no peer access")
        events.append(f"{kind} window, not of {sorted(proxied)}")

    def give_back(self, exchange: Any) -> None:
        self._events.append("given back")

    def close(self) -> None:
        self._events.append("closed")


class Stand:
    """A GpuContext over a runtime and windows that are not there; two ranks of this host, two elsewhere."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        window: str,
        reach: GpuReach,
        *,
        fails: str = "",
        first: bool = True,
        writes: NicWrites | None = None,
        **more: Any,
    ) -> None:
        self.events: list[str] = []
        self.flushes: list[Any] = []
        found = writes or NicWrites()
        memory: Any = SimpleNamespace(
            synchronize=None,
            export_dmabuf=None,
            nic_writes=lambda: found,
            driver_flush=lambda scope: f"flush of scope {scope}",
        )
        monkeypatch.setattr(gpu_context, "memory_of", lambda device, interpreted: memory)
        monkeypatch.setattr(
            gpu_context,
            "DeviceWindow",
            lambda memory, layout, rank, exchange, proxied, near: Window(self.events, fails, proxied, near),
        )

        def space(host: Any, memory: Any, window: Any) -> Any:
            return SimpleNamespace(close=None, on_device=window is not None and not window.near_only)

        monkeypatch.setattr(gpu_context, "DeviceSpace", space)

        def register(start: int, nbytes: int, export: Any, flush: Any) -> str:
            self.flushes.append(flush())
            if fails == "register":
                raise TransportError("registering device windows with the NICs: rank 0: efa1: ENOMEM")
            self.events.append("registered")
            return "dma-buf"

        self.runtime: Any = SimpleNamespace(
            rank=0,
            ranks=4,
            epoch=0,
            settings=Settings(window=window, **more.pop("settings", {})),
            space=None,
            layout=None,
            mask=np.zeros(4, np.int32),
            node_ranks=2,
            nic_peers=frozenset({2, 3}),
            near_peers=frozenset({1}),
            far_apart=True,
            first_here=first,
            gpu_reach=reach,
            device_unreachable=frozenset(),
            exchange=None,
            before_draining=lambda finish: None,
            before_unmapping=lambda release: None,
            register_device_window=register,
            setting_up=lambda: contextlib.nullcontext(lambda make: make()),
            meet=lambda: None,
        )
        for name, value in more.items():
            setattr(self.runtime, name, value)
        self.gpu = GpuContext(self.runtime, torch.device("cpu"), HostOrder())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_auto_takes_gpu_memory_where_nothing_stands_in_the_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "uccl_ep_serving")
    stand = Stand(monkeypatch, "auto", GpuReach())
    assert stand.gpu.space().on_device
    assert stand.events == ["whole window, not of [2, 3]", "registered"]
    assert stand.flushes == [None]
    assert not warnings(caplog)
    assert "windows in GPU memory for all messages: NICs reach them by dma-buf; no flush" in caplog.text


@pytest.mark.parametrize(
    ("reach", "fails", "events", "words"),
    [
        (FAR, "", ["near window, not of [0, 2, 3]"], FAR.far),
        (FAR, "near", [], FAR.far),
        (GpuReach(near="rank 3: UCCL_EP_DIRECT=0"), "", [], "rank 3: UCCL_EP_DIRECT=0"),
        (GpuReach(far=FAR.far), "", [], FAR.far),
        (
            NEAR,
            "register",
            ["whole window, not of [2, 3]", "given back", "near window, not of [0, 2, 3]"],
            "rank 0: efa1: ENOMEM",
        ),
        (NEAR, "whole", ["near window, not of [0, 2, 3]"], "rank 1: no peer access"),
    ],
)
def test_auto_falls_back_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reach: GpuReach,
    fails: str,
    events: list[str],
    words: str,
) -> None:
    stand = Stand(monkeypatch, "auto", reach, fails=fails)
    for epoch in range(2):
        stand.runtime.epoch = epoch
        assert not stand.gpu.space().on_device
    assert stand.events == events * 2
    said = warnings(caplog)
    assert len(said) == 1
    assert words in said[0]
    assert "UCCL_EP_WINDOW=auto: windows lie in host memory" in said[0]
    assert "Next step: uccl-ep doctor" in said[0]


def test_one_rank_of_a_host_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Stand(monkeypatch, "auto", FAR, first=False).gpu.space()
    assert not warnings(caplog)


def test_host_is_taken_without_a_word(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand(monkeypatch, "host", GpuReach())
    assert not stand.gpu.space().on_device
    assert not stand.events
    assert not warnings(caplog)


def test_what_is_demanded_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"UCCL_EP_WINDOW=device: NICs reach no GPU memory: rank 1: mlx5_0.*doctor"):
        Stand(monkeypatch, "device", FAR).gpu.space()
    with pytest.raises(ConfigError, match="UCCL_EP_WINDOW=device: nothing here reaches GPU memory of ranks 2, 3"):
        Stand(monkeypatch, "device", GpuReach(), device_unreachable=frozenset({2, 3})).gpu.space()
    stand = Stand(monkeypatch, "device", GpuReach(), fails="register")
    with pytest.raises(TransportError, match="rank 0: efa1: ENOMEM"):
        stand.gpu.space()
    assert stand.events == ["whole window, not of [2, 3]", "given back"]


def test_a_flush_is_given_to_the_proxies_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, "auto", GpuReach(), writes=NicWrites(flush=100))
    stand.gpu.space()
    assert stand.flushes == ["flush of scope 100"]


@pytest.mark.parametrize(
    ("window", "reach", "settings", "crossed"),
    [
        ("auto", GpuReach(), {}, 2),
        ("auto", GpuReach(across=False), {}, 0),
        ("device", GpuReach(across=False), {}, 0),
        ("auto", GpuReach(), {"hierarchy": "off"}, 0),
        # what NICs write to host memory all GPUs of the node may read
        ("host", GpuReach(across=False), {}, 2),
        ("auto", GpuReach(far=FAR.far, across=False), {}, 2),
    ],
)
def test_rows_are_forwarded_only_where_all_gpus_of_a_node_see_them(
    monkeypatch: pytest.MonkeyPatch, window: str, reach: GpuReach, settings: dict[str, Any], crossed: int
) -> None:
    stand = Stand(monkeypatch, window, reach, settings=settings)
    assert stand.gpu.crossed == crossed
    stand.gpu.space()
    assert stand.gpu.crossed == crossed


def test_windows_that_fell_back_forward_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, "auto", GpuReach(across=False), fails="register")
    assert stand.gpu.crossed == 0
    stand.gpu.space()
    assert stand.gpu.crossed == 2
