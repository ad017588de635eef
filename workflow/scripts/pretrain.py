"""Train one run to its last step: `python workflow/scripts/pretrain.py results/<experiment>/runs/<run>`.

The workflow calls it in the same way; by hand it serves to debug one run inside an interactive allocation.
"""

import argparse
import sys
from pathlib import Path

from megaboa.results import RunFolder
from megaboa.run.supervisor import Interrupted, TrainingFailed, train


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, which holds run.json and launch.json")
    try:
        train(RunFolder(parser.parse_args().run))
    except TrainingFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except Interrupted as signal:
        print(f"interrupted by {signal}; the next call goes on from the newest complete checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
