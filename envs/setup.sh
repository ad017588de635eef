#!/usr/bin/env bash
# Make the virtual environment that `make run` and `make test` use. Safe to interrupt and to call again.
#   envs/setup.sh [FOLDER]      default: .venv in the repository
# DEVICE says what ranks train on, cpu or cuda; without it, what the environment is for already, and cpu for a new one.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3.12}
device=${DEVICE:-$(cat "$venv/.device" 2>/dev/null || echo cpu)}

fail() { echo "megaboa: $*" >&2; exit 1; }

case "$device" in
  cpu) needed_gb=8 ;;
  cuda) needed_gb=12 ;;
  *) fail "DEVICE is '$device', and can be cpu or cuda: make setup DEVICE=cuda" ;;
esac
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
  fail "needs Python 3.12, and '$python' is not one. Install it (for example 'pyenv install 3.12' or your system's python3.12 and python3.12-venv), or say where it is: make run PYTHON=/path/to/python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "'$python' can't make virtual environments. Install its venv module (on Debian and Ubuntu: python3.12-venv)."
[ "$device" = cpu ] || envs/build_transformer_engine.sh --check "$python"

if [ "$device" != "$(cat "$venv/.device" 2>/dev/null)" ]; then   # a complete environment is only ever updated
  free_gb=$(( $(df -Pk . | awk 'NR==2 {print $4}') / 1048576 ))
  [ "$free_gb" -ge "$needed_gb" ] ||
    fail "the environment needs $needed_gb GB of disk (torch and its CUDA libraries), and $PWD has $free_gb GB free. Free some, or clone to a larger disk."
fi

rm -f "$venv/.ready"   # from here on it is neither the old one nor the new one
echo "megaboa: setting up $venv for device: $device (about $((needed_gb - 2)) GB; once)" >&2
[ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --requirement envs/bootstrap.txt ||
  fail "the installer (uv) could not be installed; the lines above say why. Mend it and give the same command again."
locks=(envs/bootstrap.txt envs/pipeline.txt "envs/runtime-$device.txt" envs/megatron.txt envs/peft.txt envs/dev.txt)
if [ "$device" = cuda ]; then
  glibc=$("$python" -c 'import os; print(os.confstr("CS_GNU_LIBC_VERSION").split()[1])')
  if [ "$(printf '%s\n' 2.39 "$glibc" | sort -V | head -1)" = 2.39 ]; then
    locks+=(envs/resiliency.txt)
  else
    echo "megaboa: without nvidia-resiliency-ext, whose wheels want glibc 2.39 (here: $glibc): ranks wait while a checkpoint is written" >&2
  fi
fi
"$venv/bin/uv" pip sync --quiet --compile-bytecode --python "$venv/bin/python" --require-hashes "${locks[@]}" ||
  fail "the environment could not be installed; the lines above say why. Mend it and give the same command again."
if [ "$device" = cuda ]; then
  locks+=(envs/transformer-engine.txt)
  envs/build_transformer_engine.sh "$venv"
fi
# The command line of the clone that it is called in, else of the one in which this folder lies or is linked.
cat > "$venv/bin/megaboa" <<EOF
#!/bin/sh
clone=\$(CDPATH= cd "\$(dirname "\$0")" && cd ../.. && pwd)
[ -d "\$clone/workflow/scripts/megaboa" ] || clone='$PWD'
[ ! -d workflow/scripts/megaboa ] || clone=.   # as Snakemake takes the Snakefile of the folder that it is called in
exec "\$(dirname "\$0")/python" "\$clone/workflow/scripts/megaboa" "\$@"
EOF
chmod +x "$venv/bin/megaboa"
if [ "$device" = cpu ] && command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  echo "megaboa: this machine has GPUs: \`make setup DEVICE=cuda\` makes an environment that trains on them" >&2
fi
if [ "$device" = cuda ]; then   # a wheel that can't be loaded shows here, and what is missing
  "$venv/bin/python" workflow/scripts/train_rank.py --self-test --device cuda --out "$venv/self-test.json" ||
    fail "the environment doesn't pass its self-test; the lines above say why ($venv/self-test.json has all of it)"
fi
echo "$device" > "$venv/.device"
cat "${locks[@]}" | sha256sum | cut -c1-64 > "$venv/.ready"
