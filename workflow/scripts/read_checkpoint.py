"""Read this node's share of a checkpoint's files, and say their checksums.

`python read_checkpoint.py --checkpoint=FOLDER --out=FOLDER`; the scheduler says which node this is. With `--again` it
forgets what it has cached of files that were read wrongly, and reads those that are named for it.
"""

import argparse
import os
from pathlib import Path

from megaboa.records import CheckpointShare, write
from megaboa.run.checkpoints import digests_of_share, forget, read_here
from megaboa.scheduler.registry import cluster


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the nodes' answers")
    parser.add_argument("--again", action="store_true", help="OUT/NODE.names: the files that a node reads")
    args = parser.parse_args(words)
    here = cluster().task(os.environ)
    node, nodes = (here.node, here.nodes) if here else (0, 1)
    if args.again:
        named = {int(path.stem): path.read_text().splitlines() for path in args.out.glob("*.names")}
        for names in named.values():
            forget(args.checkpoint, names)
        digests = read_here(args.checkpoint, named.get(node, []))
    else:
        digests = digests_of_share(args.checkpoint, node, nodes)
    write(args.out / f"{node}.json", CheckpointShare(digests=digests))


if __name__ == "__main__":
    main()
