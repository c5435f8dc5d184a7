"""The ten lines of README.md as a program that checks what they computed, on two CPU ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.source_tree import ROOT

_MARKER = "<!-- snippet: run by tests/project/test_readme.py"
_RANKS = 2
# every expert doubles its rows, so that a token comes back as twice the sum of its weights times itself
_CHECK = (
    "expected = x.float() * 2 * weights.sum(1, keepdim=True)\n"
    "torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)\n"
    # one write a line: two ranks share the pipe
    "__import__('sys').stdout.write(f'checked {dist.get_rank()}\\n')\n"
)


def snippet() -> str:
    """The first Python block after the marker."""
    _, found, rest = (ROOT / "README.md").read_text().partition(_MARKER)
    assert found, "README.md has lost the marker of its snippet"
    return rest.partition("```python\n")[2].partition("```")[0]


def command(python: str | Path, place: Path) -> list[str | Path]:
    """Write the program into ``place``; what starts its ranks with ``python``."""
    script = place / "ten_lines.py"
    script.write_text(snippet() + _CHECK)
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS), script]


def is_checked(output: str) -> bool:
    """Whether every rank has printed that its tokens came back as they should."""
    said = sorted(line for line in output.splitlines() if line.startswith("checked"))
    return said == [f"checked {rank}" for rank in range(_RANKS)]
