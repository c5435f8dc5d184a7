#!/usr/bin/env bash
# DeepSeek-V3 on the GPUs of one machine: attention data-parallel, experts over all ranks through uccl_ep.
#   MODEL=... GPUS=8 MODE=low_latency ./one_node.sh [more vLLM options]
set -euo pipefail
MODEL=${MODEL:-deepseek-ai/DeepSeek-V3}
GPUS=${GPUS:-8}
MODE=${MODE:-} # or high_throughput (no CUDA graphs), low_latency (decode)
PORT=${PORT:-8000}

exec vllm serve "$MODEL" --trust-remote-code \
    --data-parallel-size "$GPUS" --enable-expert-parallel \
    --all2all-backend "uccl_ep${MODE:+_$MODE}" \
    --host 0.0.0.0 --port "$PORT" "$@"
