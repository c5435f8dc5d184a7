"""``uccl-ep plan``: what it says is what a Buffer would lay out."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from uccl_ep_serving.cli.main import app
from uccl_ep_serving.cli.plan import plan
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.window_sizes import normal_plan
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.gpu.program_budget import DEFAULT_SMS
from uccl_ep_serving.protocol.layout import LowLatencyPlan, NormalPlan, WindowLayout


def test_the_plan_is_the_layout_that_ranks_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCCL_EP_HEAP_BYTES", str(64 << 20))
    monkeypatch.setenv("UCCL_EP_CHANNELS", "4")
    low_latency = LowLatencyPlan(8, 128, 7168, 64, 8, 4)
    layout = WindowLayout(8, low_latency, normal_plan(8, Settings.from_environment(), 0))
    found = plan(8, 128, 7168, 64, 8, "f32")
    assert found["window_bytes"] == layout.nbytes
    assert {one["name"]: one["bytes"] for one in found["regions"]} == {one.name: one.nbytes for one in layout}
    assert layout["normal_heap"].nbytes == 64 << 20
    assert found["low_latency"] == {
        "messages_to_each_rank_at_most": 4,
        "dispatch_bytes_at_most": low_latency.room.dispatch_send,
        "combine_bytes_at_most": low_latency.room.combine_send,
    }


def test_programs_of_normal_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    over_links = plan(8, 0, 7168, 64, 8, "bf16")["normal"]
    assert over_links["bytes_over_links"] == 7 * 4096 * 7168 * 2
    assert over_links["programs"] == DEFAULT_SMS
    between = plan(16, 0, 7168, 64, 8, "bf16", node_ranks=8)["normal"]
    assert between["bytes_by_proxies"] == 4096 * 7168 * 2
    assert (between["windows_in"], between["programs"]) == ("GPU memory", DEFAULT_SMS)
    monkeypatch.setenv("UCCL_EP_WINDOW", "host")
    between = plan(16, 0, 7168, 64, 8, "bf16", node_ranks=8)["normal"]
    assert between["windows_in"] == "host memory"
    monkeypatch.setenv("UCCL_EP_HIERARCHY", "off")
    assert plan(16, 0, 7168, 64, 8, "bf16", node_ranks=8)["normal"]["bytes_by_proxies"] == 4 * 4096 * 7168 * 2
    monkeypatch.setenv("UCCL_EP_PROGRAMS", "6")
    assert plan(16, 0, 7168, 64, 8, "bf16")["normal"]["programs"] == 6
    monkeypatch.delenv("UCCL_EP_PROGRAMS")
    monkeypatch.delenv("UCCL_EP_WINDOW")
    # a ring of each of so many ranks holds four rows with fewer channels only
    assert plan(256, 0, 7168, 256, 8, "bf16", node_ranks=8)["normal"]["programs"] == 9
    monkeypatch.delenv("UCCL_EP_HIERARCHY")
    monkeypatch.setenv("UCCL_EP_HEAP_BYTES", "64M")
    assert plan(256, 0, 7168, 256, 8, "bf16", node_ranks=8)["normal"]["programs"] == 6
    with pytest.raises(ConfigError, match="do not fill hosts of 3"):
        plan(16, 0, 7168, 64, 8, "bf16", node_ranks=3)


def test_without_low_latency_its_regions_are_left_out() -> None:
    found = plan(8, 0, 7168, 64, 8, "bf16")
    assert "low_latency" not in found
    assert not [one for one in found["regions"] if one["name"].startswith("ll_")]


def test_the_command_prints_a_table_or_json() -> None:
    shapes = ["plan", "--ranks", "4", "--experts", "16", "--hidden", "256"]
    shown = CliRunner().invoke(app, shapes, env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "[source rank, stream]" in shown.output
    assert "Messages to each rank, at most: 1." in shown.output
    assert "A normal-mode dispatch of 4096 tokens on a GPU, windows in GPU memory: " in shown.output
    plain = CliRunner().invoke(app, [*shapes, "--json"])
    assert json.loads(plain.output)["window_bytes"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "3", "--experts", "16"], "multiple of 3 ranks"),
        (["--ranks", "4", "--experts", "16", "--dtype", "int3"], "none of bf16, fp16, f32"),
        (["--ranks", "4096", "--experts", "4096", "--tokens", "8192"], "exceeds"),
        (["--ranks", "0", "--experts", "16"], "ranks = 0 is outside 1..4096"),
        (["--ranks", "8", "--experts", "16", "--tokens", "-1"], "tokens per rank = -1"),
    ],
)
def test_shapes_that_no_window_holds_are_refused_by_name(options: list[str], words: str) -> None:
    shown = CliRunner().invoke(app, ["plan", *options])
    assert shown.exit_code == 2
    assert words in shown.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0", "--experts", "16"], "ranks = 0 is outside 1..4096"),
        (["--ranks", "5000", "--experts", "5000"], "ranks = 5000 is outside 1..4096"),
        (["--ranks", "8", "--experts", "5"], "a multiple of 8 ranks"),
        (["--ranks", "8", "--experts", "16", "--topk", "0"], "topk = 0"),
        (["--ranks", "8", "--experts", "16", "--hidden", "-5"], "hidden = -5"),
    ],
)
def test_normal_mode_alone_is_checked_as_well(options: list[str], words: str) -> None:
    shown = CliRunner().invoke(app, ["plan", "--tokens", "0", *options])
    assert shown.exit_code == 2, shown.exception
    assert words in shown.output


@pytest.mark.parametrize("ranks", [0, 4097])
def test_a_plan_of_normal_mode_has_as_many_ranks_as_the_formats_hold(ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"ranks = {ranks} is outside 1\.\.4096"):
        NormalPlan(ranks)
