#!/usr/bin/env bash
# Take report.png: the upper part of the default experiment's report, after `make run`. Needs Chromium.
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$(mktemp --directory)
trap 'rm --recursive --force "$home"' EXIT
chromium --headless --no-sandbox --hide-scrollbars --user-data-dir="$home" --window-size=1180,1865 \
  --screenshot="$PWD/docs/images/report.png" "file://$PWD/results/tiny/report/index.html"
