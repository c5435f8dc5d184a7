"""Import-time gaps, closed before SGLang's plugins are loaded: ``torchvision`` operator schemas and ``sgl_kernel``.

Runs from ``sitecustomize``, so in every Python process of the server: nothing heavy is imported here, a finder on
``sys.meta_path`` acts only when one of the two modules is really asked for.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["define_torchvision_operators", "install"]

_STUB = Path(__file__).with_name("sgl_kernel_stub.py")
_kept: list[Any] = []  # a torch Library forgets its schemas when it is collected


def define_torchvision_operators() -> None:
    """Define the two schemas that ``torchvision`` registers fake kernels for at import.

    The wheel from the package index is built against CUDA torch; beside a CPU torch its extension does not load and
    ``torchvision::nms`` stays undefined, which stops ``import torchvision`` and with it SGLang.
    """
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        try:
            library.define(schema)
        except RuntimeError:  # defined already: the extension did load
            continue
    _kept.append(library)


class _Finder(MetaPathFinder):
    """Answers for ``sgl_kernel`` when it is not installed; prepares ``torchvision`` before others find it."""

    def __init__(self) -> None:
        self._torchvision_done = False
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision" and not self._torchvision_done:
            self._torchvision_done = True
            define_torchvision_operators()
        elif name == "sgl_kernel" and not self._searching:
            self._searching = True
            try:
                installed = importlib.util.find_spec(name)
            finally:
                self._searching = False
            return installed or importlib.util.spec_from_file_location(name, _STUB)
        return None


def install() -> None:
    """Put the finder in front of ``sys.meta_path``, once, and only where :data:`.SWITCH` is set."""
    if os.environ.get("_UCCL_EP_SGLANG_CPU") != "1":
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
