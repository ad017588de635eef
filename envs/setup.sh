#!/usr/bin/env bash
# Make the virtual environment that `make run` and `make test` use. Safe to interrupt and to call again.
#   envs/setup.sh [FOLDER]      default: .venv in the repository
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3.12}
needed_gb=8

fail() { echo "megaboa: $*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
  fail "needs Python 3.12, and '$python' is not one. Install it (for example 'pyenv install 3.12' or your system's python3.12 and python3.12-venv), or say where it is: make run PYTHON=/path/to/python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "'$python' can't make virtual environments. Install its venv module (on Debian and Ubuntu: python3.12-venv)."

if [ ! -e "$venv/bin/uv" ]; then   # a complete environment is only ever updated
  free_gb=$(( $(df -Pk . | awk 'NR==2 {print $4}') / 1048576 ))
  [ "$free_gb" -ge "$needed_gb" ] ||
    fail "the environment needs $needed_gb GB of disk (torch and its CUDA libraries), and $PWD has $free_gb GB free. Free some, or clone to a larger disk."
fi

echo "megaboa: setting up $venv (about 6 GB; once)" >&2
[ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --requirement envs/bootstrap.txt ||
  fail "the installer (uv) could not be installed; the lines above say why. Mend it and give the same command again."
locks=(envs/bootstrap.txt envs/pipeline.txt envs/runtime-cpu.txt envs/megatron.txt envs/dev.txt)
"$venv/bin/uv" pip sync --quiet --compile-bytecode --python "$venv/bin/python" --require-hashes "${locks[@]}" ||
  fail "the environment could not be installed; the lines above say why. Mend it and give the same command again."
# The command line of the clone that it is called in, else of the one in which this folder lies or is linked.
cat > "$venv/bin/megaboa" <<EOF
#!/bin/sh
clone=\$(CDPATH= cd "\$(dirname "\$0")" && cd ../.. && pwd)
[ -d "\$clone/workflow/scripts/megaboa" ] || clone='$PWD'
[ ! -d workflow/scripts/megaboa ] || clone=.   # as Snakemake takes the Snakefile of the folder that it is called in
exec "\$(dirname "\$0")/python" "\$clone/workflow/scripts/megaboa" "\$@"
EOF
chmod +x "$venv/bin/megaboa"
cat "${locks[@]}" | sha256sum | cut -c1-64 > "$venv/.ready"
