"""What the host is told of an opening: its memory when the device has failed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from uccl_ep_serving.errors import TransportError
from uccl_ep_serving.modes.open_reply import OpenReply


def test_it_closes_after_the_device_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    memory: Any = Mock()
    memory.map_host.return_value = 4096
    memory.unmap_host.side_effect = TransportError("cuda:0 has failed: an illegal memory access")
    OpenReply(memory, 256, 8, 8).close()
    assert "cuda:0 has failed: an illegal memory access. What was mapped stays" in caplog.text
