"""``install_as_deep_ep()``: frameworks that import DeepEP by name get ours."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.alone import Alone
from tests.support.source_tree import ROOT
from uccl_ep_serving import Buffer, EventHandle, EventOverlap


def run(code: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a process that has imported nothing."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


def test_every_name_is_ours_and_resolved_when_it_is_asked_for() -> None:
    done = run(
        "import sys, importlib.util, uccl_ep_serving as ours\n"
        "ours.install_as_deep_ep(); ours.install_as_deep_ep()\n"
        "assert 'torch' not in sys.modules\n"
        "assert all(importlib.util.find_spec(name) for name in ('deep_ep', 'deep_ep.utils', 'deep_ep_cpp'))\n"
        "import deep_ep, deep_ep.utils\n"
        "from deep_ep import Buffer, Config, EventHandle, EventOverlap, topk_idx_t\n"
        "from deep_ep.buffer import Buffer as same\n"
        "from deep_ep.utils import EventHandle, EventOverlap\n"
        "from deep_ep_cpp import Config\n"
        "import torch\n"
        "assert Buffer is same is deep_ep.Buffer is ours.Buffer and topk_idx_t is torch.int64\n"
        "assert deep_ep.utils.EventOverlap is ours.EventOverlap and Config is ours.Config\n"
        "assert EventHandle is ours.EventHandle\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("statement", ["from deep_ep import ElasticBuffer", "import deep_ep.other"])
def test_what_it_has_not_fails_as_an_import_does(statement: str) -> None:
    code = (
        "import uccl_ep_serving; uccl_ep_serving.install_as_deep_ep()\n"
        f"try:\n    {statement}\nexcept ImportError: print('no')"
    )
    assert run(code).stdout == "no\n"


@pytest.mark.parametrize("name", ["deep_ep", "deep_ep_cpp"])
def test_deepep_itself_is_not_taken_away(name: str) -> None:
    done = run(
        f"import sys, types; sys.modules[{name!r}] = types.ModuleType({name!r})\n"
        "import uccl_ep_serving\n"
        "try: uccl_ep_serving.install_as_deep_ep()\n"
        "except uccl_ep_serving.ConfigError as error: print(error)\n"
        "print(*(name for name in sys.modules if name.startswith('deep_ep')))"
    )
    assert done.stdout.startswith(f"{name} of DeepEP has been imported already. Next step: call install_as_deep_ep()")
    assert done.stdout.endswith(f"\n{name}\n")


def test_an_event_handle_is_an_event_that_an_operation_waits_for() -> None:
    buffer = Buffer(Alone())  # type: ignore[arg-type]
    x, ids = torch.ones(4, 128, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int64)
    event = EventOverlap(EventHandle())
    counts = buffer.get_dispatch_layout(ids, 2, previous_event=event, async_finish=True, allocate_on_comm_stream=True)
    per_rank, _, per_expert, in_rank, event = counts
    rows, _, _, received, handle, event = buffer.dispatch(
        x,
        topk_idx=ids,
        topk_weights=torch.ones(4, 1),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    event.current_stream_wait()
    assert received == [4, 0]
    back, _, event = buffer.combine(rows, handle, previous_event=EventOverlap(EventHandle()), async_finish=True)
    event.current_stream_wait()
    assert torch.equal(back, x)
    EventHandle().current_stream_wait()
    buffer.destroy()
