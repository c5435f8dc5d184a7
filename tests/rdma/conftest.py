"""EFA devices in memory, with and without writes that need no receives."""

from __future__ import annotations

import pytest

from tests.support.provider.provider_srd_library import OFFERED
from uccl_ep_serving.proxy.transport.verbs import codes


@pytest.fixture(params=["unsolicited", pytest.param("posted", marks=pytest.mark.combinations)])
def receiving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How EFA devices take writes: without receives (rdma-core 52 and newer), or with those that are posted."""
    if request.param == "posted":
        lacking = OFFERED["capabilities"] & ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
        monkeypatch.setitem(OFFERED, "capabilities", lacking)
    return str(request.param)


#: For tests that make test runs both ways, and for those that only one of the ways can have.
BOTH_WAYS = pytest.mark.parametrize("receiving", ["unsolicited", "posted"], indirect=True)
UNSOLICITED = pytest.mark.parametrize("receiving", ["unsolicited"], indirect=True)
