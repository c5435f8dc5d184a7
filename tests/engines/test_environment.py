"""The launcher's settings in workers that do not inherit its environment."""

from __future__ import annotations

import logging
import os

import pytest

from uccl_ep_serving import Settings
from uccl_ep_serving.engines import environment


def test_a_worker_takes_what_its_own_environment_does_not_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCCL_EP_TIMEOUT", "7")
    monkeypatch.setenv("UCCL_EP_PROXIES", "3")
    record = environment.launch()
    assert record.items() >= {"UCCL_EP_TIMEOUT": "7", "UCCL_EP_PROXIES": "3"}.items()
    monkeypatch.delenv("UCCL_EP_TIMEOUT")
    monkeypatch.setenv("UCCL_EP_PROXIES", "2")  # of the worker's own node
    with caplog.at_level(logging.INFO, logger="uccl_ep_serving"):
        environment.adopt(record)
    settings = Settings.from_environment()
    assert (settings.timeout, settings.proxies) == (7.0, 2)
    assert [line.getMessage() for line in caplog.records] == [
        "uccl_ep: this worker has from the launcher's environment: UCCL_EP_TIMEOUT=7",
        "uccl_ep: UCCL_EP_PROXIES=2 in this worker and 3 where the engine was launched: the worker's own holds",
    ]


def test_nothing_is_said_where_nothing_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    before = dict(os.environ)
    with caplog.at_level(logging.INFO, logger="uccl_ep_serving"):
        environment.adopt(environment.launch())
    assert dict(os.environ) == before
    assert not caplog.records
