#!/usr/bin/env bash
# All tests: the fast ones first, then those that start ranks or run the workflow. Two workers each: the tests that
# belong together (they share a clone of the repository) stay on one worker.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
pytest=(.venv/bin/python -m pytest -q --numprocesses 2 --dist loadgroup -ra)
"${pytest[@]}" -m "not slow" "$@"
"${pytest[@]}" -m slow --durations 10 "$@"
