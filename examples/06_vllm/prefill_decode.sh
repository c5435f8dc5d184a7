#!/usr/bin/env bash
# Prefill and decode on machines of their own. Prefill moves whole prompts (high throughput), decode a few tokens at a
# time (low latency). vLLM moves the KV cache between them with a connector of its own, not through uccl_ep.
#   ADDRESS=10.0.0.1 ./prefill_decode.sh prefill [more vLLM options]
#   ADDRESS=10.0.0.2 ./prefill_decode.sh decode  [more vLLM options]
# A proxy in front sends each request to a prefill server first and on to a decode server; vLLM's repository has one:
# examples of "disaggregated_serving" with the NIXL connector.
set -euo pipefail
MODEL=${MODEL:-deepseek-ai/DeepSeek-V3}
GPUS=${GPUS:-8}
ROLE=${1:?prefill or decode}
shift

serve() {
    # where the other machine asks this one for the KV cache; vLLM's default is localhost, which the other takes for itself
    export VLLM_NIXL_SIDE_CHANNEL_HOST=${ADDRESS:?an address of this machine that the other one reaches}
    exec vllm serve "$MODEL" --trust-remote-code \
        --data-parallel-size "$GPUS" --enable-expert-parallel \
        --kv-transfer-config "{\"kv_connector\": \"${CONNECTOR:-NixlConnector}\", \"kv_role\": \"kv_both\"}" \
        --host 0.0.0.0 "$@"
}

case $ROLE in
prefill) serve --all2all-backend uccl_ep_high_throughput --port "${PORT:-8100}" "$@" ;;
decode)
    # tokens a rank may dispatch in one step: memory grows with it, and a step never has more
    serve --all2all-backend uccl_ep_low_latency --max-num-batched-tokens "${WINDOW:-256}" --port "${PORT:-8200}" "$@"
    ;;
*)
    echo "unknown role: $ROLE (prefill or decode)" >&2
    exit 2
    ;;
esac
