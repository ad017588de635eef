"""One call of the workflow, from its words to its last line: the Snakefile's logic outside of its rules.

Nothing here imports Snakemake.
"""

from __future__ import annotations

import sys


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
