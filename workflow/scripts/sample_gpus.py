"""Write down what this node's GPUs do, for as long as the rank that has started this runs.

By hand, until Ctrl-C ends it: `python workflow/scripts/sample_gpus.py --out gpus.jsonl --seconds 1`.
"""

import argparse
import os
from pathlib import Path

from megaboa.run.gpu_sampler import ignore_signals, sample
from megaboa.scheduler.local import die_with_parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--seconds", type=float, default=5.0, help="between samples (%(default)s)")
    parser.add_argument("--ranks", type=int, default=0, help="how many GPUs of this node are ours at least")
    parser.add_argument("--parent", type=int, help="the process with which this one ends")
    asked = parser.parse_args()
    if asked.parent:
        ignore_signals()
        die_with_parent(asked.parent)
    os.nice(10)
    sample(asked.out, asked.seconds, asked.ranks, os.environ.get("CUDA_VISIBLE_DEVICES"))


if __name__ == "__main__":
    main()
