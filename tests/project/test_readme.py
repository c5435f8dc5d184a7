"""The ten lines in README.md do what the README says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.source_tree import ROOT

MARKER = "<!-- snippet: run by tests/project/test_readme.py"


def snippet() -> str:
    """The first Python block after the marker."""
    _, found, rest = (ROOT / "README.md").read_text().partition(MARKER)
    assert found, "README.md has lost the marker of its snippet"
    return rest.partition("```python\n")[2].partition("```")[0]


def test_ten_lines_double_every_token_on_two_ranks(tmp_path: Path) -> None:
    # every expert doubles its rows, so that a token comes back as twice the sum of its weights times itself
    check = (
        "expected = x.float() * 2 * weights.sum(1, keepdim=True)\n"
        "torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)\n"
        # one write a line: two ranks share the pipe
        "__import__('sys').stdout.write(f'checked {dist.get_rank()}\\n')\n"
    )
    script = tmp_path / "ten_lines.py"
    script.write_text(snippet() + check)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # a session of its own, so that the ranks go with the launcher when the time is up
    launched = subprocess.Popen(
        [*command, str(script)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = launched.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launched.pid, signal.SIGKILL)
    assert launched.returncode == 0, errors[-4000:]
    assert sorted(line for line in output.splitlines() if line.startswith("checked")) == [
        "checked 0",
        "checked 1",
    ]
