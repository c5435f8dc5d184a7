#!/usr/bin/env bash
# Prefill and decode on machines of their own. Prefill moves whole prompts (normal mode), decode a few tokens at a time
# (low-latency mode). SGLang moves the KV cache between them with a transfer engine of its own, not through uccl_ep.
#   ./prefill_decode.sh prefill [more SGLang options]
#   ./prefill_decode.sh decode  [more SGLang options]
#   PREFILL=http://10.0.0.1:30000 DECODE=http://10.0.0.2:30001 ./prefill_decode.sh router
set -euo pipefail
MODEL=${MODEL:-deepseek-ai/DeepSeek-V3}
GPUS=${GPUS:-8}
ROLE=${1:?prefill, decode or router}
shift

serve() {
    exec sglang serve --model-path "$MODEL" --trust-remote-code \
        --tp "$GPUS" --attn-dp-size "$GPUS" --moe-a2a-backend uccl_ep \
        --disaggregation-mode "$ROLE" --disaggregation-transfer-backend "${TRANSFER:-mooncake}" \
        ${KV_DEVICES:+--disaggregation-ib-device "$KV_DEVICES"} --host 0.0.0.0 "$@"
}

case $ROLE in
prefill) serve --deepep-mode normal --port "${PORT:-30000}" "$@" ;;
decode)
    # the window, tokens a rank may dispatch in one step, is that of SGLang's largest captured batch; WINDOW sets another
    if [[ -n ${WINDOW:-} ]]; then export SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=$WINDOW; fi
    serve --deepep-mode low_latency --port "${PORT:-30001}" "$@"
    ;;
router)
    exec python -m sglang_router.launch_router --pd-disaggregation \
        --prefill "${PREFILL:?}" --decode "${DECODE:?}" --host 0.0.0.0 --port "${PORT:-8000}" "$@"
    ;;
*)
    echo "unknown role: $ROLE (prefill, decode or router)" >&2
    exit 2
    ;;
esac
