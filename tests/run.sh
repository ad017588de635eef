#!/usr/bin/env bash
# All tests: the fast ones first, then those that start ranks or run the workflow. Two workers each; the tests of one file
# stay on one worker, as they share a clone of the repository.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
pytest=(.venv/bin/python -m pytest -q --numprocesses 2 --dist loadfile -ra)
"${pytest[@]}" -m "not slow" "$@"
"${pytest[@]}" -m slow --durations 10 "$@"
