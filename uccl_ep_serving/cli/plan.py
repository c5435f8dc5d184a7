"""``uccl-ep plan``: the window that a rank would need, what an operation may send, and its programs on a GPU."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.window_sizes import normal_plan
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.gpu.program_budget import DEFAULT_SMS, row_traffic
from uccl_ep_serving.modes.row_format import RowFormat, largest_row
from uccl_ep_serving.protocol.layout import LowLatencyPlan, WindowLayout
from uccl_ep_serving.protocol.message import NormalNotify
from uccl_ep_serving.protocol.pipe import channel_count

__all__ = ["ELEMENTS", "app", "plan"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: Bytes of a value in the tensors that low latency is given; FP8 is made of any of them and takes no more.
ELEMENTS = {"bf16": 2, "fp16": 2, "f32": 4}


def plan(
    ranks: int,
    tokens: int,
    hidden: int,
    experts: int,
    topk: int,
    dtype: str,
    batch: int = 4096,
    node_ranks: int = 0,
) -> dict[str, Any]:
    """Regions of a window, bytes of the whole, the most that low latency sends, and the programs of a normal-mode
    operation on a GPU, as plain values.

    Args:
        tokens: most tokens of a rank in a low-latency dispatch; 0: no low-latency mode.
        dtype: one of :data:`ELEMENTS`.
        batch: tokens of a rank in a normal-mode dispatch.
        node_ranks: ranks of a host, 0: all.

    Raises:
        ConfigError: the shapes contradict each other, the formats cannot hold such a window, or a setting has no
            sensible value.
    """
    settings = Settings.from_environment()
    if dtype not in ELEMENTS:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(ELEMENTS)}")
    try:
        # without low latency as well: the shapes are those of the model, whatever the mode
        shapes = LowLatencyPlan(ranks, tokens or 1, hidden, experts, topk, ELEMENTS[dtype])
        low_latency = shapes if tokens else None
        layout = WindowLayout(ranks, low_latency, normal_plan(ranks, settings, 0))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    result: dict[str, Any] = {
        "window_bytes": layout.nbytes,
        "regions": [{"name": one.name, "bytes": one.nbytes, "meaning": one.meaning} for one in layout if one.nbytes],
    }
    form = RowFormat(NormalNotify.OPERATION_DISPATCH, 0, hidden, hidden * ELEMENTS[dtype], topk)
    result["normal"] = _programs(settings, layout, form, batch, node_ranks or ranks)
    if low_latency is not None:
        result["low_latency"] = {
            "messages_to_each_rank_at_most": settings.least_channels,
            "dispatch_bytes_at_most": low_latency.room.dispatch_send,
            "combine_bytes_at_most": low_latency.room.combine_send,
        }
    return result


def _programs(settings: Settings, layout: WindowLayout, form: RowFormat, batch: int, node_ranks: int) -> dict[str, Any]:
    """What kernels, links and NICs move of ``batch`` tokens, and how many programs that takes."""
    ranks = layout.ranks
    if ranks % node_ranks:
        raise ConfigError(f"{ranks} ranks do not fill hosts of {node_ranks}")
    # between hosts auto takes it where NICs do
    on_device = settings.window != "host"
    crossed = node_ranks if 1 < node_ranks < ranks and settings.hierarchy != "off" else 0
    form = form._replace(node_ranks=crossed)
    traffic = row_traffic(batch, form.row_bytes, min(form.topk, ranks), ranks, node_ranks, crossed, on_device)
    most = min(settings.programs or DEFAULT_SMS, DEFAULT_SMS)
    return {
        "tokens": batch,
        "bytes_by_kernels": round(traffic.copied),
        "bytes_over_links": round(traffic.link),
        "bytes_by_proxies": round(traffic.far),
        "windows_in": "GPU memory" if on_device else "host memory",
        "programs": channel_count(layout, largest_row(form), crossed, most),
    }


@app.command()
def command(
    ranks: Annotated[int, typer.Option(help="EP ranks.")],
    experts: Annotated[int, typer.Option(help="Experts, a multiple of the ranks.")],
    hidden: Annotated[int, typer.Option(help="Values per token.")] = 7168,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    tokens: Annotated[int, typer.Option(help="Most tokens of a low-latency dispatch; 0: normal mode only.")] = 128,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or f32: of the tensors given.")] = "bf16",
    batch: Annotated[int, typer.Option(min=1, help="Tokens of a rank in a normal-mode dispatch.")] = 4096,
    node_ranks: Annotated[int, typer.Option(min=0, help="Ranks of a host; 0: all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say what window each rank would need for given shapes, the most that a low-latency operation sends, and how many
    programs (SMs) a normal-mode operation takes on a GPU.

    The settings are those of the environment (UCCL_EP_*). Nothing is allocated.
    """
    try:
        found = plan(ranks, tokens, hidden, experts, topk, dtype, batch, node_ranks)
    except ConfigError as error:
        typer.echo(f"plan: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(found, indent=1))
        return
    shapes = f"{tokens} x {hidden} {dtype}, top-{topk} of {experts} experts" if tokens else "normal mode only"
    _print(found, f"window of each of {ranks} ranks: {shapes}")


def _print(found: dict[str, Any], title: str) -> None:
    shown = Table("region", "MiB", "holds", title=title, title_justify="left")
    shown.columns[1].justify = "right"
    for one in found["regions"]:
        shown.add_row(one["name"], f"{one['bytes'] / 2**20:,.2f}", Text(one["meaning"]))
    shown.add_section()
    shown.add_row("all", f"{found['window_bytes'] / 2**20:,.2f}", "pages are committed when they are first touched")
    console = Console()
    console.print(shown)
    moved = found["normal"]
    kernels, links, proxies = (moved[f"bytes_{way}"] / 2**20 for way in ("by_kernels", "over_links", "by_proxies"))
    console.print(
        f"A normal-mode dispatch of {moved['tokens']} tokens on a GPU, windows in {moved['windows_in']}: "
        f"{kernels:,.0f} MiB copied by kernels, {links:,.0f} over links, {proxies:,.0f} by proxies. "
        f"Programs (SMs): {moved['programs']}.",
        soft_wrap=True,
    )
    if sent := found.get("low_latency"):
        console.print(
            f"A low-latency dispatch sends at most {sent['dispatch_bytes_at_most'] / 2**20:,.2f} MiB, a combine "
            f"{sent['combine_bytes_at_most'] / 2**20:,.2f} MiB (one row per token and expert, where weights come only "
            f"then). Messages to each rank, at most: {sent['messages_to_each_rank_at_most']}.",
            soft_wrap=True,
        )
