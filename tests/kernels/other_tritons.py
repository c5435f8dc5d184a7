"""Tritons beside the installed one: the directories in OTHER_TRITONS, as ``scripts/tritons`` prints them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

__all__ = ["other_tritons"]


def other_tritons() -> list[Any]:
    """Each directory as a parameter named after its version; one that could not be installed skips, and says so."""
    places = [Path(place) for place in os.environ.get("OTHER_TRITONS", "").split(os.pathsep) if place]
    return [
        pytest.param(
            str(place),
            id=place.name,
            marks=[
                pytest.mark.triton,
                pytest.mark.skipif(not (place / "triton").is_dir(), reason=f"Triton {place.name} is not in {place}"),
            ],
        )
        for place in places
    ]
