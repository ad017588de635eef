"""Read this node's share of a checkpoint's files, and say their checksums.

`python read_checkpoint.py --checkpoint=FOLDER --out=FOLDER`; the scheduler says which node this is.
"""

import argparse
import os
from pathlib import Path

from megaboa.records import CheckpointShare, write
from megaboa.run.checkpoints import digests_of_share
from megaboa.scheduler.registry import cluster


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the nodes' answers")
    args = parser.parse_args(words)
    here = cluster().task(os.environ)
    node, nodes = (here.node, here.nodes) if here else (0, 1)
    write(args.out / f"{node}.json", CheckpointShare(digests=digests_of_share(args.checkpoint, node, nodes)))


if __name__ == "__main__":
    main()
