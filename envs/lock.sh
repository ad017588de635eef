#!/usr/bin/env bash
# Renew the lock files (*.txt) from their sources (*.in): every version pinned, every file hashed, no index named.
#   envs/lock.sh            keep the versions that still fit
#   envs/lock.sh --upgrade  take the newest that fit
set -euo pipefail
cd "$(dirname "$0")"
export UV_CUSTOM_COMPILE_COMMAND="envs/lock.sh"
uv=${UV:-../.venv/bin/uv}
compile() { "$uv" pip compile --quiet --python-version 3.12 --generate-hashes --no-emit-index-url "$@"; }
pins() { cat "$@" 2>/dev/null | grep -E '^[a-z0-9.-]+==' | sed 's/ .*//' | sort -u; }

together=$(mktemp)   # one resolution for all, so that the locks never contradict each other
shared=$(mktemp)     # of it, what GPUs have too: all but torch and what torch brings
trap 'rm -f "$together" "$shared"' EXIT
pins pipeline.txt runtime-cpu.txt dev.txt > "$together" || true
compile "$@" pipeline.in runtime-cpu.in dev.in --output-file "$together"
for name in pipeline runtime-cpu dev; do
  compile "$@" "$name.in" --constraint "$together" --no-annotate --output-file "$name.txt"
done
compile --no-deps megatron.in --output-file megatron.txt
compile --no-deps peft.in --output-file peft.txt
compile --no-deps bootstrap.in --output-file bootstrap.txt

# GPUs. What setup.sh installs on its own is resolved with the rest, and left out of its list.
pins "$together" | grep -vE '^(torch|triton|setuptools|(nvidia|cuda)-[a-z0-9-]+)==' > "$shared"
alone=(transformer-engine-torch nvidia-resiliency-ext)
gpus() {
  compile "$@" runtime-cuda.in transformer-engine.in resiliency.in --constraint "$shared" \
    --override overrides.in --python-platform x86_64-manylinux_2_39 --no-annotate
}
gpus "$@" --output-file runtime-cuda.txt $(printf -- '--no-emit-package %s ' "${alone[@]}")
for name in transformer-engine resiliency; do
  compile --no-deps "$name.in" --python-platform x86_64-manylinux_2_39 --output-file "$name.txt"
done
# For the image: none of what NVIDIA's PyTorch image has in builds of its own.
theirs=(torch triton numpy setuptools $(pins runtime-cuda.txt | grep -oE '^(nvidia-(cublas|cuda|cudnn-cu|cufft|cufile|curand|cusolver|cusparse|nccl|nvjitlink|nvshmem|nvtx)|cuda-)[a-z0-9-]*'))
gpus --constraint runtime-cuda.txt --output-file image-cuda.txt $(printf -- '--no-emit-package %s ' "${alone[@]}" "${theirs[@]}")

# The same pins for people who use conda (`snakemake --sdm conda`); megatron.in and peft.in follow in runtime-cpu.post-deploy.sh.
for name in pipeline runtime-cpu; do
  { echo "# Made by envs/lock.sh from $name.txt."
    printf 'channels: [conda-forge, nodefaults]\ndependencies:\n  - python=3.12\n  - pip\n  - pip:\n'
    grep -E '^[a-z0-9.-]+==' "$name.txt" | sed -E 's/ .*//; s/^/      - /'
  } > "$name.yaml"
done
{ echo "# Made by envs/lock.sh from megatron.txt and peft.txt. See megatron.in for why without dependencies."
  echo "python -m pip install --no-deps $(grep -hE '^[a-z0-9.-]+==' megatron.txt peft.txt | sed -E 's/ .*//' | tr '\n' ' ')"
} > runtime-cpu.post-deploy.sh
