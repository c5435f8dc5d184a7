#!/usr/bin/env bash
# DeepSeek-V3 on the GPUs of one machine: attention data-parallel, experts over all ranks through uccl_ep.
#   MODEL=... GPUS=8 ./one_node.sh [more SGLang options]
set -euo pipefail
MODEL=${MODEL:-deepseek-ai/DeepSeek-V3}
GPUS=${GPUS:-8}
PORT=${PORT:-30000}

exec sglang serve --model-path "$MODEL" --trust-remote-code \
    --tp "$GPUS" --attn-dp-size "$GPUS" \
    --moe-a2a-backend uccl_ep --deepep-mode auto \
    --host 0.0.0.0 --port "$PORT" "$@"
