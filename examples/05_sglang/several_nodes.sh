#!/usr/bin/env bash
# The same model over several machines: run it on each, with NODE_RANK=0..NNODES-1. Only node 0 answers requests.
#   HEAD=10.0.0.1 NNODES=2 NODE_RANK=0 ./several_nodes.sh [more SGLang options]
set -euo pipefail
MODEL=${MODEL:-deepseek-ai/DeepSeek-V3}
HEAD=${HEAD:?address of node 0, reachable from all nodes}
NNODES=${NNODES:?number of machines}
NODE_RANK=${NODE_RANK:?0 on the first machine, 1 on the next, ...}
RANKS=${RANKS:-$((NNODES * 8))} # GPUs of all machines together
PORT=${PORT:-30000}

exec sglang serve --model-path "$MODEL" --trust-remote-code \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --dist-init-addr "$HEAD:${DIST_PORT:-20000}" \
    --tp "$RANKS" --attn-dp-size "${ATTN_DP:-$RANKS}" \
    --moe-a2a-backend uccl_ep --deepep-mode auto \
    --host 0.0.0.0 --port "$PORT" "$@"
