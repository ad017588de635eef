"""Read this node's share of a checkpoint's files, and compare them with their checksums.

`python check_checkpoint.py --checkpoints=FOLDER --iteration=500 --out=FOLDER`; the scheduler says which node this is.
"""

import argparse
import os
from pathlib import Path

from megaboa.records import CheckpointShare, write
from megaboa.run.checkpoints import damage
from megaboa.scheduler.registry import cluster


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, required=True, help="the run's folder of checkpoints")
    parser.add_argument("--iteration", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the nodes' answers")
    args = parser.parse_args(words)
    here = cluster().task(os.environ)
    node, nodes = (here.node, here.nodes) if here else (0, 1)
    problem = damage(args.checkpoints, args.iteration, share=(node, nodes))
    write(args.out / f"{node}.json", CheckpointShare(problem=problem))


if __name__ == "__main__":
    main()
