"""Which tests one worker of pytest-xdist runs, one after another: those of a file, and those of files that share what
takes long to make."""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

#: How the files of a group begin. SGLang is imported for each process, in ten to twenty seconds; a kernel that two
#: workers want at a time is compiled by both.
_GROUPS = ("tests/engines/test_sglang", "tests/ptx/product/", "tests/ptx/faults/")


class ByWhatIsShared(LoadFileScheduling):
    """``--dist loadfile``, with some files together."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((group for group in _GROUPS if file.startswith(group)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByWhatIsShared | None:
    """In place of ``loadfile``."""
    return ByWhatIsShared(config, log) if config.getvalue("dist") == "loadfile" else None
