"""What vLLM's DeepEP classes, which serve CUDA, do with a Buffer: ours takes every call of them."""

from __future__ import annotations

import pytest

from tests.engines.deepep_calls import Use, engine_file, fits, made_from, uses

pytestmark = pytest.mark.engine

MANAGERS = ("DeepEPAll2All", "DeepEPHT", "DeepEPLL")
MODULAR = "model_executor/layers/fused_moe/prepare_finalize/deepep_{}.py"
#: Without these the reader of calls would have overlooked something.
EXPECTED = {
    "__init__",
    "capture",
    "combine",
    "destroy",
    "dispatch",
    "get_combine_config",
    "get_dispatch_config",
    "get_dispatch_layout",
    "get_low_latency_rdma_size_hint",
    "low_latency_combine",
    "low_latency_dispatch",
    "set_num_sms",
}


def test_every_use_fits() -> None:
    managers = engine_file("vllm", "distributed/device_communicators/all2all.py").read_text()
    found: list[Use] = uses(managers, MANAGERS) + made_from(managers, MANAGERS, "_make_all2all_kwargs")
    for mode in ("ht", "ll"):
        found += uses(engine_file("vllm", MODULAR.format(mode)).read_text())
    assert [fits(use) for use in found if fits(use)] == []
    assert {use.name for use in found} >= EXPECTED
    constructed = [use.keywords for use in found if use.name == "__init__"]
    assert len(constructed) == 2
    assert all({"group", "num_qps_per_rank", "explicitly_destroy"} <= keywords for keywords in constructed)
