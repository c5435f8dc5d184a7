"""How many requests SGLang runs under the plugin: no more than the low-latency window holds. No server."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.test_sglang_plugin import resolved

pytestmark = pytest.mark.engine

InEngine = Callable[..., Any]

VARIABLE = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"


def engine_requests(model: str, fields: dict[str, Any], variables: dict[str, str]) -> int:
    """Requests of a data-parallel rank whose KV cache has room for any number, as the engine's own code says it."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    os.environ.update(variables)
    server_args = resolved(model, **fields)
    ranks = SpawnRanks(world_rank=spawn_world_rank(server_args, tp_rank=0, pp_rank=0), dp_rank=0, gpu_id=0)
    publish(server_args, role="scheduler", ranks=ranks)
    configurator: Any = SimpleNamespace(
        model_config=SimpleNamespace(context_len=4096), attn_dp_size=1, mambaish_config=None
    )
    return KVCacheConfigurator.resolve_max_num_reqs(configurator, 1 << 30)


OURS = {"moe_a2a_backend": "uccl_ep"}


@pytest.mark.parametrize(
    ("fields", "variables", "requests"),
    [
        pytest.param({"moe_a2a_backend": "none"}, {}, 4096, id="another backend"),
        # the steps that it would capture, in whole tiles of experts
        pytest.param(OURS, {}, 128, id="the engine's own choice"),
        pytest.param(OURS, {VARIABLE: "256"}, 256, id="the variable"),
        pytest.param(OURS, {VARIABLE: "8192"}, 4096, id="room for more than the engine runs"),
        pytest.param({**OURS, "max_running_requests": 12}, {}, 12, id="the user's"),
        pytest.param({**OURS, "deepep_mode": "normal"}, {}, 4096, id="no window"),
    ],
)
def test_no_more_requests_run_than_the_window_holds(
    in_engine: InEngine, model: str, fields: dict[str, Any], variables: dict[str, str], requests: int
) -> None:
    """Request pool, captured graphs and the scheduler take the number from there."""
    assert in_engine(engine_requests, model, fields, variables) == requests
