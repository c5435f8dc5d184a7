"""One comparison of an engine's real servers on CPU ranks, from the command to its report in a browser."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from tests.compare.test_pages import BROWSER, check
from tests.engines.served import nothing_left
from uccl_ep_serving.cli import compare_serving
from uccl_ep_serving.demo.remains import sweep

REQUESTS, TOKENS = 8, 8


def check_comparison(engine: str, baseline: str, directory: Path) -> None:
    """Compare ``uccl_ep`` with ``baseline``: everybody answers alike, is measured, profiled and reported."""
    output = directory / "out"
    words = ["--demo", engine, "--rounds", "1", "--requests", str(REQUESTS), "--output-tokens", str(TOKENS)]
    sweep()
    with nothing_left(directory):
        done = CliRunner().invoke(compare_serving.app, [*words, "--input-tokens", "16", "--output", str(output)])
    assert not sweep(), "a run directory is left without an owner"
    assert done.exit_code == 0, done.output
    result = json.loads((output / "serving.json").read_text())
    assert result["measured"] == ["uccl_ep", baseline]
    assert result["answers"]["uccl_ep"]["equal"] == 8
    assert {(one["a"], one["b"]) for one in result["verdicts"]} == {("uccl_ep", baseline)}
    for start in result["starts"]:
        for name in ("uccl_ep", baseline):
            assert start["samples"][name]["tokens_per_second"][0] > 0
            assert f"start-{start['start']}-{name}.log" in {path.name for path in (output / "logs").iterdir()}
        assert 0 < start["samples"]["uccl_ep"]["share"][0] < 1
        assert "share" not in start["samples"][baseline]
    servers = result["starts"][0]["servers"]
    for name in ("uccl_ep", baseline):
        profile = servers[name]["profile"]
        assert profile["ranks"] == 2, profile
        assert 0 < profile["share"] < 1
    page = output / "serving.html"
    assert page.stat().st_size > 10_000
    if BROWSER:
        check(page, "What was found", "uccl_ep", baseline, "Commands")
