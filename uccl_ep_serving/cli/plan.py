"""``uccl-ep plan``: the window that a rank would need, and what an operation may send, for given shapes."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.plane_builder import normal_plan
from uccl_ep_serving.protocol.layout import LowLatencyPlan, WindowLayout

__all__ = ["ELEMENTS", "plan", "run"]

#: Bytes of a value in the tensors that low latency is given; FP8 is made of any of them and takes no more.
ELEMENTS = {"bf16": 2, "fp16": 2, "f32": 4}


def plan(ranks: int, tokens: int, hidden: int, experts: int, topk: int, dtype: str) -> dict[str, Any]:
    """Regions of a window, bytes of the whole, and the most that low latency sends, as plain values.

    Args:
        tokens: most tokens of a rank in a low-latency dispatch; 0: no low-latency mode.
        dtype: one of :data:`ELEMENTS`.

    Raises:
        ConfigError: the formats cannot hold such a window, or a setting has no sensible value.
    """
    settings = Settings.from_environment()
    if dtype not in ELEMENTS:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(ELEMENTS)}")
    try:
        low_latency = LowLatencyPlan(ranks, tokens, hidden, experts, topk, ELEMENTS[dtype]) if tokens else None
        layout = WindowLayout(ranks, low_latency, normal_plan(ranks, settings, 0))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    result: dict[str, Any] = {
        "window_bytes": layout.nbytes,
        "regions": [{"name": one.name, "bytes": one.nbytes, "meaning": one.meaning} for one in layout if one.nbytes],
    }
    if low_latency is not None:
        result["low_latency"] = {
            "messages_to_each_rank_at_most": settings.channels,
            "dispatch_bytes_at_most": low_latency.dispatch_send,
            "combine_bytes_at_most": low_latency.combine_send,
        }
    return result


def run(ranks: int, tokens: int, hidden: int, experts: int, topk: int, dtype: str, as_json: bool) -> None:
    """Print :func:`plan`. Raises ConfigError."""
    found = plan(ranks, tokens, hidden, experts, topk, dtype)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    shapes = f"{tokens} x {hidden} {dtype}, top-{topk} of {experts} experts" if tokens else "normal mode only"
    shown = Table("region", "MiB", "holds", title=f"window of each of {ranks} ranks: {shapes}", title_justify="left")
    shown.columns[1].justify = "right"
    for one in found["regions"]:
        shown.add_row(one["name"], f"{one['bytes'] / 2**20:,.2f}", Text(one["meaning"]))
    shown.add_section()
    shown.add_row("all", f"{found['window_bytes'] / 2**20:,.2f}", "pages are committed when they are first touched")
    console = Console()
    console.print(shown)
    if sent := found.get("low_latency"):
        console.print(
            f"A low-latency dispatch sends at most {sent['dispatch_bytes_at_most'] / 2**20:,.2f} MiB, a combine "
            f"{sent['combine_bytes_at_most'] / 2**20:,.2f} MiB (one row per token and expert, where weights come only "
            f"then). Messages to each rank, at most: {sent['messages_to_each_rank_at_most']}.",
            soft_wrap=True,
        )
