"""CCL-Bench's workload card (version 1 of its ``workload_card_template.yaml``), filled for one backend of a comparison.

https://github.com/cclbench/CCL-Bench. Fields that describe a whole model are None: what runs here is one MoE layer's
exchange. JSON is YAML, so that a card can be handed on as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CARD_VERSION", "workload_card"]

#: Of the template.
CARD_VERSION = 1


def workload_card(
    card: Mapping[str, Any],
    start: Mapping[str, Any],
    backend: str,
    path: str,
    files: list[str],
    us: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The card of ``backend``.

    Args:
        card: the plan's. start: what one start kept. path: how ranks reached each other, "" when that is not known.
        files: names of the files that hold the samples.
        us: by phase, median, p10, p90 and p99 of the slowest rank's microseconds.
    """
    machines = start["machines"]
    first = machines[0]
    on_gpu = start["devices"] == ["cuda"]
    library = backend.partition(":")[0].partition("#")[0]
    return {
        "version": CARD_VERSION,
        "description": (
            f"Dispatch and combine of one MoE layer ({card['mode']}), {card['ranks']} ranks, {card['tokens']} tokens a "
            f"rank, through {backend}; measured by uccl-ep compare"
        ),
        "hf_url": None,
        "trace_url": None,
        "contributor": None,
        "contact": None,
        "workload": {
            "model": {
                "phase": "inference",
                "moe": True,
                "granularity": "layer",
                "model_family": None,
                "precision": card["dtype"],
                "epochs": 1,
                "iteration": card["iterations"] * card["repeat"],
                "model_arch": {
                    "num_params": None,
                    "num_params_embedding": None,
                    "num_layers": 1,
                    "num_heads": None,
                    "head_dim": None,
                    "hidden_size": card["hidden"],
                    "num_experts": card["experts"],
                    "num_experts_per_tok": card["topk"],
                },
            },
            "data": {
                "batch_size": card["tokens"] * card["ranks"],
                "batch_size_scope": "global",
                "seq_len": 1,
                "dataset": f"routing: {card.get('route', 'uniform')}, seed {card['seed']}",
            },
            "hardware": {
                "network_topo": {"topology": None, "bandwidth_gbps": None},
                "xpu_spec": {
                    "type": "GPU" if on_gpu else "CPU",
                    "model": first["gpu"] if on_gpu and first.get("gpu") else first["cpu"],
                    "total_count": card["ranks"],
                    "count_per_node": max(len(one["ranks"]) for one in machines),
                },
                "driver_version": first.get("driver") or f"linux_{first['kernel']}",
            },
        },
        "Model-executor": {
            "framework": {
                "name": "uccl-ep compare",
                "version": first["versions"].get("uccl_ep_serving"),
                "compiler_tool_selection": "plain_pytorch",
            },
            "model_plan_parallelization": {
                "dp_replicate": 1,
                "dp_shard": 1,
                "tp": 1,
                "pp": 1,
                "cp": 1,
                "ep": card["ranks"],
                "pp_mb": 1,
            },
            "communication_library": {
                "name": library,
                "version": _version(library, first["versions"]),
                "env": dict(start["environment"]),
            },
            "protocol_selection": [path] if path else [],
        },
        "metric_source": {"traces": ["json"], "metrics_specific_trace": files},
        # the template has no place for what was measured; its readers pass over fields that they do not know
        "metrics": {"unit": "us", "of": "the slowest rank", "phases": {name: dict(one) for name, one in us.items()}},
    }


#: What has a backend's version, by its name without "-gather", in bench.machine's list.
_PACKAGES = {
    "uccl_ep": "uccl_ep_serving",
    "mpi": "mpi4py",
    "deepep": "deep_ep",
    "deepep_v2": "deep_ep",
    "nixl_ep": "nixl",
    "uccl": "uccl",
    "mori": "mori",
    "nccl": "nccl",
    "gloo": "torch",
}


def _version(library: str, versions: Mapping[str, str]) -> str | None:
    """None where its package does not say it."""
    return versions.get(_PACKAGES[library.removesuffix("-gather")])
