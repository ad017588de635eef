#!/usr/bin/env bash
# Draw dag.svg: the jobs of the default experiment, an arrow where one needs another. Needs graphviz.
set -euo pipefail
cd "$(dirname "$0")/../.."
.venv/bin/snakemake --profile profiles/local --rulegraph dot 2>/dev/null |
  sed -n '/^digraph/,$p' |
  sed -e 's/, color = "[^"]*"//' -e '/label = "all"/d' -e '/-> 0$/d' -e '/^ *\(graph\|node\|edge\)\[/d' -e '/fontsize=/d' |
  sed -e 's/style="rounded"/style="rounded,filled"/' |
  tred |
  dot -Tsvg -Grankdir=LR -Gbgcolor=white -Gnodesep=0.2 -Granksep=0.3 -Gmargin=0.05 \
    -Nshape=box -Nfontname=Helvetica,Arial,sans-serif -Nfontsize=12 -Nheight=0.35 -Ncolor=#4c72b0 -Npenwidth=1.3 \
    -Nfillcolor=#eef2f8 -Ecolor=#888888 -Earrowsize=0.6 > docs/images/dag.svg
