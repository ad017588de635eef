"""Train one run to its last step: `python workflow/scripts/pretrain.py results/<experiment>/runs/<run>`.

The workflow calls it in the same way; by hand it serves to debug one run inside an interactive allocation.
"""

import argparse
import sys
from pathlib import Path

from megaboa.results import RunFolder
from megaboa.run.inputs import UnusableInputError
from megaboa.run.supervisor import Interrupted, TrainingFailed, train

FIRST = "snakemake data import preflight --profile profiles/local"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, or its run.json")
    run = parser.parse_args().run
    try:
        train(RunFolder(run.parent if run.name == "run.json" else run))
    except (TrainingFailed, UnusableInputError) as failure:
        print(failure, file=sys.stderr)
        return 1
    except FileNotFoundError as missing:
        print(f"{missing.filename} isn't there. First make what the run reads: {FIRST}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt) as signal:
        print(f"interrupted by {signal}; the next call goes on from the newest complete checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
