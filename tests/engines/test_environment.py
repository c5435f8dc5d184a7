"""The launcher's settings in workers that do not inherit its environment."""

from __future__ import annotations

import logging
import os

import pytest

from uccl_ep_serving import Settings
from uccl_ep_serving.control_plane import secret
from uccl_ep_serving.engines import environment
from uccl_ep_serving.errors import ConfigError


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


@pytest.mark.parametrize("own", [None, "another key, 16 bytes and more", "a key of 16 bytes and more"])
def test_a_key_in_the_environment_is_not_sent_and_not_forgotten(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it all ranks would agree on having none."""
    key = "a key of 16 bytes and more"
    monkeypatch.setattr(secret, "_taken", None)
    monkeypatch.setenv("UCCL_EP_SECRET", key)
    record = environment.launch()
    assert key not in str(record)
    assert os.environ["UCCL_EP_SECRET"] == key, "for workers that inherit it"
    if own is None:
        monkeypatch.delenv("UCCL_EP_SECRET")
    else:
        monkeypatch.setenv("UCCL_EP_SECRET", own)
    before = dict(os.environ)
    if own == key:
        environment.adopt(record)
    else:
        with pytest.raises(ConfigError, match=r"launched with UCCL_EP_SECRET.*UCCL_EP_SECRET_FILE"):
            environment.adopt(record)
    assert dict(os.environ) == before


def test_nothing_is_said_where_nothing_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    before = dict(os.environ)
    with caplog.at_level(logging.INFO, logger="uccl_ep_serving"):
        environment.adopt(environment.launch())
    assert dict(os.environ) == before
    assert not caplog.records
