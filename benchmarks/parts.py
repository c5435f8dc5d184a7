"""Parts of a measurement on the model machine that takes hours: each is kept once it is there, and a later run of the
same sources goes on behind it, in any checkout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.resume import UNFINISHED, sources

__all__ = ["Parts"]


class Parts:
    """Of one measurement.

    Args:
        name: of it, with what it is given.
        place: directory of what is not finished.
    """

    def __init__(self, name: str, place: Path = UNFINISHED) -> None:
        # what the machine loads is what its tests load
        which = sources("test-model")
        #: None where the sources differ from their commit: nothing is kept.
        self._file = place / f"{name}-{which}.json" if which else None
        self._found: dict[str, Any] = {}
        if self._file is not None and self._file.exists():
            self._found = json.loads(self._file.read_text())

    def measured(self, part: str, measure: Callable[[], Any]) -> Any:
        """What ``measure`` returns, or returned in an earlier run."""
        if part not in self._found:
            self._found[part] = measure()
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                whole = self._file.with_suffix(".new")
                whole.write_text(json.dumps(self._found) + "\n")
                whole.replace(self._file)
        return self._found[part]

    def end(self) -> None:
        """All parts are there, and stand in a result."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
