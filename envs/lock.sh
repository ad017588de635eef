#!/usr/bin/env bash
# Renew the lock files (*.txt) from their sources (*.in): every version pinned, every file hashed, no index named.
#   envs/lock.sh            keep the versions that still fit
#   envs/lock.sh --upgrade  take the newest that fit
set -euo pipefail
cd "$(dirname "$0")"
export UV_CUSTOM_COMPILE_COMMAND="envs/lock.sh"
uv=${UV:-../.venv/bin/uv}
compile() { "$uv" pip compile --quiet --python-version 3.12 --generate-hashes --no-emit-index-url "$@"; }

together=$(mktemp)   # one resolution for all, so that the locks never contradict each other
trap 'rm -f "$together"' EXIT
cat pipeline.txt runtime-cpu.txt dev.txt 2>/dev/null | grep -E '^[a-z0-9.-]+==' | sed 's/ .*//' | sort -u > "$together" || true
compile "$@" pipeline.in runtime-cpu.in dev.in --output-file "$together"
for name in pipeline runtime-cpu dev; do
  compile "$@" "$name.in" --constraint "$together" --no-annotate --output-file "$name.txt"
done
# For the image: none of what NVIDIA's PyTorch image has in builds of its own.
theirs=(torch triton numpy setuptools $(grep -oE '^(nvidia|cuda)-[a-z0-9.-]+' runtime-cpu.txt | grep -v resiliency))
compile "$@" runtime-cuda.in --constraint "$together" --no-annotate --output-file runtime-cuda.txt \
  $(printf -- '--no-emit-package %s ' "${theirs[@]}")
compile --no-deps megatron.in --output-file megatron.txt
compile --no-deps bootstrap.in --output-file bootstrap.txt

# The same pins for people who use conda (`snakemake --sdm conda`); megatron.in follows in runtime-cpu.post-deploy.sh.
for name in pipeline runtime-cpu; do
  { echo "# Made by envs/lock.sh from $name.txt."
    printf 'channels: [conda-forge, nodefaults]\ndependencies:\n  - python=3.12\n  - pip\n  - pip:\n'
    grep -E '^[a-z0-9.-]+==' "$name.txt" | sed -E 's/ .*//; s/^/      - /'
  } > "$name.yaml"
done
{ echo "# Made by envs/lock.sh from megatron.txt. See megatron.in for why without dependencies."
  echo "python -m pip install --no-deps $(grep -E '^[a-z0-9.-]+==' megatron.txt | sed -E 's/ .*//' | tr '\n' ' ')"
} > runtime-cpu.post-deploy.sh
