"""Check the node this runs on and write what was found to `<out>/<node>.json`.

Start one task of it per node, with MASTER_ADDR and MASTER_PORT naming a free port of the first node:
`srun --nodes 2 --ntasks-per-node 1 python workflow/scripts/check_node.py --out health --gpus 8`. By hand, on one node,
it needs no environment. It ends with 0 whenever the result could be written: what is wrong stands in there.
"""

import argparse
from pathlib import Path

from megaboa.run.health import SECONDS, check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the results of all nodes, a fresh one")
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs this node must have; 0: test the processors")
    parser.add_argument("--memory-gib", type=float, help="how much memory each GPU must have")
    parser.add_argument("--folder", type=Path, help="a folder that must be writable, such as the checkpoints'")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long everything may take (%(default)s)")
    parser.add_argument("--wait", type=Path, help="an empty file: begin when something is written to it")
    asked = parser.parse_args()
    result = check(asked.out, asked.gpus, asked.memory_gib, asked.folder, asked.seconds, asked.wait)
    print(result.node + ": " + ("; ".join(result.problems) or result.collective.error or "ok"))


if __name__ == "__main__":
    main()
