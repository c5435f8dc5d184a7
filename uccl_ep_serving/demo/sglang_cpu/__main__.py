"""``eval "$(python -m uccl_ep_serving.demo.sglang_cpu DIRECTORY [RANKS])"``: a shell that can start CPU servers.

Writes the startup directory below DIRECTORY and prints the variables of :func:`.environment` as shell exports.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from uccl_ep_serving.demo.sglang_cpu import environment


def main() -> None:
    """Print the exports; exits with a line of usage when no directory is given."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m uccl_ep_serving.demo.sglang_cpu DIRECTORY [RANKS]")
    ranks = int(sys.argv[2]) if len(sys.argv) == 3 else 2
    for name, value in environment(Path(sys.argv[1]).absolute(), ranks=ranks).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
