#!/usr/bin/env bash
# One real vLLM engine on the CPU: serve.sh PORT EVENT_PORT REPLAY_PORT CORE [more vLLM flags]
# needs VENV (install.sh) and MODEL (make_model.py); takes DTYPE, BLOCKS, BLOCK_SIZE, MAX_LENGTH
set -euo pipefail
port=$1 events=$2 replay=$3 core=$4
shift 4
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export VLLM_CPU_OMP_THREADS_BIND=$core VLLM_CPU_NUM_OF_RESERVED_CPU=0 VLLM_CPU_CI_ENV=1
export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 UCX_NET_DEVICES=lo
export VLLM_SERVER_DEV_MODE=1 # /reset_prefix_cache
# The publisher binds only where its endpoint holds '*' or '::'; this one does, and stays on loopback.
kv_events=$(printf '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv-events", "endpoint": "tcp://[::ffff:127.0.0.1]:%s", "replay_endpoint": "tcp://127.0.0.1:%s"}' \
  "$events" "$replay")
# The module, not the command `vllm`, which looks for a distribution of that name.
exec "$VENV/bin/python" -m vllm.entrypoints.openai.api_server \
  --model "$MODEL" --served-model-name tiny --host 127.0.0.1 --port "$port" \
  --enforce-eager --dtype "${DTYPE:-bfloat16}" --max-model-len "${MAX_LENGTH:-2048}" \
  --max-num-seqs 16 --block-size "${BLOCK_SIZE:-32}" --num-gpu-blocks-override "${BLOCKS:-800}" \
  --kv-cache-memory-bytes 268435456 --enable-prefix-caching --enable-prompt-tokens-details \
  --kv-events-config "$kv_events" "$@"
