"""What stands in for a Runtime in tests speaks its names; no type checker reads the tests."""

from __future__ import annotations

from tests.support.direct_ranks import DirectGroup, DirectRuntime
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.runtime import Runtime

#: Attributes of a Runtime that its construction sets.
_SET = {"settings", "rank", "ranks", "record", "check"}
#: What only the stand-in has, for tests.
_OWN = {"group", "records"}


def test_the_stand_in_has_no_name_that_a_runtime_lacks() -> None:
    stand_in = DirectRuntime(DirectGroup(1), 0, Settings())
    names = {name for name in (*vars(stand_in), *vars(DirectRuntime)) if not name.startswith("_")}
    assert names - _OWN - _SET <= set(dir(Runtime))
    assert names >= _SET
