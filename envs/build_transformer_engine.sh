#!/usr/bin/env bash
# Transformer Engine's part for torch, of which the package index has the source only: compiled once against the torch of
# runtime-cuda.txt, kept as a wheel, installed. The headers of CUDA are in runtime-cuda.txt; no toolkit is needed.
#   envs/build_transformer_engine.sh --check PYTHON   is what it needs there?
#   envs/build_transformer_engine.sh FOLDER           of a virtual environment that has runtime-cuda.txt
# MEGABOA_WHEELS is the folder of wheels (default: ~/.cache/megaboa/wheels), for example one that several machines share.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=envs/transformer-engine.txt
compiler=${CXX:-c++}
wheels=${MEGABOA_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/megaboa/wheels}

fail() { echo "megaboa: $*" >&2; exit 1; }
pinned() { sed -n "s/^$1==\([^ ]*\).*/\1/p" "$2"; }

# What a wheel is compiled of and for; of the C library a newer one would do as well.
torch=$(pinned torch envs/runtime-cuda.txt)
source=$(sed -n 's/.*--hash=sha256:\(.\{12\}\).*/\1/p' "$lock")
libc=$(getconf GNU_LIBC_VERSION | tr ' ' -)
folder="$wheels/transformer_engine_torch-$(pinned transformer-engine-torch "$lock")-$source/torch-$torch-cp312-$(uname -m)-$libc"
wheel() { find "$folder" -maxdepth 1 -name '*.whl' 2>/dev/null | head -1; }   # not what a killed build has left

if [ "$1" = --check ]; then
  [ -z "$(wheel)" ] || exit 0
  remedy="Install it, or say with MEGABOA_WHEELS where a machine like this one keeps the compiled wheel."
  echo 'static_assert(__cplusplus >= 201703L);' | "$compiler" -std=c++17 -x c++ -fsyntax-only - 2>/dev/null ||
    fail "DEVICE=cuda compiles Transformer Engine, for which '$compiler' is no compiler of C++17 (on Debian and Ubuntu: g++; CXX names another). $remedy"
  headers=$("$2" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [ -e "$headers/Python.h" ] ||
    fail "DEVICE=cuda compiles Transformer Engine, for which $headers/Python.h is missing (on Debian and Ubuntu: python3.12-dev). $remedy"
  exit 0
fi

venv=$(cd "$1" && pwd)
if [ -z "$(wheel)" ]; then   # one that is there may be in another user's folder
  mkdir -p "$folder"
  exec 9> "$folder/.lock"
  flock 9   # two clones that are set up at once compile it once
fi
if [ -z "$(wheel)" ]; then
  rm -rf "$folder"/.fresh-*
  cores=$(nproc)
  room=$(( $(awk '/MemAvailable/ {print $2}' /proc/meminfo) / 3145728 ))   # 3 GB for each process of the compiler
  jobs=$(( room < 1 ? 1 : room < cores ? room : cores ))
  echo "megaboa: compiling Transformer Engine for torch $torch with $jobs processes (8 minutes on two idle cores; once); log: $folder/build.log" >&2
  fresh=$(mktemp -d "$folder/.fresh-XXXXXX")
  trap 'rm -rf "$fresh"' EXIT
  # FORCE_BUILD: else setup.py asks the network for a wheel that no hash vouches for.
  # USE_NVIDIA_WHEELS: the headers of the lock, whatever toolkit the machine has.
  PATH="$venv/bin:$PATH" CXX="$compiler" MAX_JOBS=$jobs NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
    "$venv/bin/python" -m pip wheel --disable-pip-version-check --require-hashes --no-deps --no-build-isolation --no-cache-dir \
    --no-binary :all: --wheel-dir "$fresh" --requirement "$lock" > "$folder/build.log" 2>&1 ||
    fail "Transformer Engine could not be compiled: $(grep -m1 -E 'error:|Error:' "$folder/build.log" || tail -1 "$folder/build.log"). All of it: $folder/build.log"
  mv "$fresh"/*.whl "$folder/"
fi
"$venv/bin/uv" pip install --quiet --no-deps --offline --python "$venv/bin/python" "$(wheel)"
