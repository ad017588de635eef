#!/usr/bin/env bash
# All tests: the fast ones first, then those that start ranks or run the workflow. The tests of one file stay on one worker,
# as they share a clone of the repository. The slow ones have three workers on two cores: those of the cluster mostly wait.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
pytest=(.venv/bin/python -m pytest -q --dist loadfile -ra)
"${pytest[@]}" --numprocesses 2 -m "not slow" "$@"
"${pytest[@]}" --numprocesses 3 -m slow --durations 25 "$@"
