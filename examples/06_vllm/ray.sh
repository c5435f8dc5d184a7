#!/usr/bin/env bash
# The same over a Ray cluster: run it once, on the head node, after `ray start` on every machine.
#   HEAD=10.0.0.1 NNODES=2 ./ray.sh [more vLLM options]
# The package must be installed on every machine. The configuration carries the plugin, and the UCCL_EP_ variables of
# this machine, to Ray's workers. The built-in DeepEP backends refuse VLLM_RAY_DP_PACK_STRATEGY=fill; uccl_ep does not
# care which ranks share a machine.
set -euo pipefail
MODEL=${MODEL:-deepseek-ai/DeepSeek-V3}
HEAD=${HEAD:?address of the head node, reachable from all nodes}
NNODES=${NNODES:?number of machines}
GPUS=${GPUS:-8} # of each machine
MODE=${MODE:-}
PORT=${PORT:-8000}

exec vllm serve "$MODEL" --trust-remote-code \
    --data-parallel-backend ray --data-parallel-address "$HEAD" \
    --data-parallel-size $((NNODES * GPUS)) --data-parallel-size-local "$GPUS" \
    --enable-expert-parallel --all2all-backend "uccl_ep${MODE:+_$MODE}" \
    --host 0.0.0.0 --port "$PORT" "$@"
