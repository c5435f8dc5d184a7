"""Launch lines as users type them: those that the scripts of an example run, and those that stand in a page."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import yaml

from tests.support.source_tree import ROOT


def typed(stand_in: Path, script: Path, *arguments: str, **environment: str) -> list[str]:
    """The arguments that ``script`` gives to the program of the name ``stand_in``, which prints them instead."""
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    output = subprocess.run(
        ["bash", str(script), *arguments],
        env={"PATH": f"{stand_in.parent}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return output.stdout.split("\n")[:-1]


def pod_line(stand_in: Path, manifest: str, index: int) -> list[str]:
    """The arguments that pod ``index`` of an example for Kubernetes gives to the program of the name ``stand_in``."""
    found = yaml.safe_load_all((ROOT / "examples/07_kubernetes" / manifest).read_text())
    (pod,) = [one["spec"]["template"]["spec"] for one in found if "template" in one["spec"]]
    (container,) = pod["containers"]
    script = stand_in.with_suffix(".sh")
    # Kubernetes puts variables that it knows in their places, and leaves the rest to the shell
    script.write_text(shlex.join(word.replace("$(POD_INDEX)", str(index)) for word in container["command"]))
    return typed(stand_in, script, POD_INDEX=str(index))


def page_lines(page: str, engine: str, **variables: str) -> list[list[str]]:
    """The words of each line in the block for ``engine`` of ``page``, as a shell with these variables reads them."""
    _, found, rest = (ROOT / page).read_text().partition(f"<!-- launch lines: given to {engine}")
    assert found, f"{page} has lost the marker of the launch lines of {engine}"
    block = rest.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    for name, value in variables.items():
        block = block.replace(f"${name}", value)
    return [shlex.split(line, comments=True) for line in block.splitlines() if line]


def table_lines(page: str, program: str) -> dict[str, list[str]]:
    """The words of each command of ``program`` in the tables of ``page``, by the first cell of its row; MODEL is a
    model."""
    found = {}
    for row in re.findall(r"^\| ([^|]+?) \|(.*)", (ROOT / page).read_text(), re.MULTILINE):
        for command in re.findall(rf"`({program} serve [^`]*)`", row[1]):
            found[row[0]] = shlex.split(command.replace("MODEL", "deepseek-ai/DeepSeek-V3"))
    return found
