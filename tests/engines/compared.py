"""One comparison of an engine's real servers on CPU ranks, from the command to its report."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from tests.engines.served import nothing_left
from uccl_ep_serving.cli import compare_serving
from uccl_ep_serving.demo.remains import PREFIX

REQUESTS, TOKENS = 8, 8


def check_comparison(engine: str, baseline: str, directory: Path) -> None:
    """Compare ``uccl_ep`` with ``baseline``: everybody answers alike, is measured, profiled and reported."""
    output = directory / "out"
    words = ["--demo", engine, "--rounds", "1", "--requests", str(REQUESTS), "--output-tokens", str(TOKENS)]
    before = set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    with nothing_left(directory):
        done = CliRunner().invoke(compare_serving.app, [*words, "--input-tokens", "16", "--output", str(output)])
    assert set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")) <= before
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
    assert (output / "serving.html").stat().st_size > 10_000
