"""Whether kernels in CUDA C can be compiled here."""

from __future__ import annotations

import pytest

from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.kernels.cuda import nvrtc

__all__ = ["needs_nvrtc"]


def _missing() -> str:
    try:
        nvrtc.version()
    except ConfigError as reason:
        return f"NVRTC: {reason}"
    return ""


#: Of tests that compile some.
needs_nvrtc = pytest.mark.skipif(bool(_missing()), reason=_missing())
