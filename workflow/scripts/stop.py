"""Stop one run in order: its ranks save and end, and the others go on.

Snakemake reports it as failed; the next call resumes. `python workflow/scripts/stop.py results/<experiment>/runs/<run>`
"""

import argparse
import sys
from pathlib import Path

from megaboa.paths import RunFolder, RunStore
from megaboa.run.stop import stop


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    folder = RunFolder(parser.parse_args().run)
    if not folder.attempts_link.exists():
        print(f"{folder.path}: this run hasn't started, so there is nothing to stop", file=sys.stderr)
        return 1
    print(f"run {folder.name}: {stop(RunStore(folder.attempts_link.resolve().parent))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
