"""What an installed package lacks for an adapter that was written against its public source."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["lacks", "not_importable"]


def not_importable(module: str) -> str:
    """Why ``module`` cannot be imported, "" when it could be and now is."""
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        return f"{root} is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a package does while it is imported
        text = " ".join(str(error).split())
        return f"{module} cannot be imported: {type(error).__name__}: {text[:200]}"
    return ""


def lacks(module: str, signatures: Mapping[str, Sequence[str]]) -> str:
    """What the imported ``module`` lacks, "" when it has everything.

    Args:
        signatures: by the name of a function below it ("Buffer.dispatch"), the parameters that we pass by name.
    """
    for path, names in signatures.items():
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is None:
            return f"{module} has no {path}: a version that is not known here"
        try:
            parameters = inspect.signature(found).parameters
        except (TypeError, ValueError):  # compiled: it does not say
            continue
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            continue
        missing = [name for name in names if name not in parameters]
        if missing:
            return f"{module}.{path} takes no {', '.join(missing)}: a version that is not known here"
    return ""
