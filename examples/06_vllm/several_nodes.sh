#!/usr/bin/env bash
# The same model over several machines, vLLM's multi-node data parallelism: run it on each, with NODE_RANK=0..NNODES-1.
# Only node 0 answers requests; the others run without an API server.
#   HEAD=10.0.0.1 NNODES=2 NODE_RANK=0 ./several_nodes.sh [more vLLM options]
set -euo pipefail
MODEL=${MODEL:-deepseek-ai/DeepSeek-V3}
HEAD=${HEAD:?address of node 0, reachable from all nodes}
NNODES=${NNODES:?number of machines}
NODE_RANK=${NODE_RANK:?0 on the first machine, 1 on the next, ...}
GPUS=${GPUS:-8} # of each machine
MODE=${MODE:-}
PORT=${PORT:-8000}

serve() {
    exec vllm serve "$MODEL" --trust-remote-code \
        --data-parallel-size $((NNODES * GPUS)) --data-parallel-size-local "$GPUS" \
        --data-parallel-address "$HEAD" --data-parallel-rpc-port "${RPC_PORT:-13345}" \
        --enable-expert-parallel --all2all-backend "uccl_ep${MODE:+_$MODE}" "$@"
}

if [ "$NODE_RANK" = 0 ]; then
    serve --host 0.0.0.0 --port "$PORT" "$@"
else
    serve --headless --data-parallel-start-rank $((NODE_RANK * GPUS)) "$@"
fi
