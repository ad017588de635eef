"""Train one run to its last step: `python workflow/scripts/pretrain.py results/<experiment>/runs/<run>`.

The workflow calls it in the same way; by hand it serves to debug one run inside an interactive allocation.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path

from megaboa.launch.slurm import SlurmUnreachableError
from megaboa.records import RecordError
from megaboa.run.call import RESUMES, Interrupted, Requeued, TrainingFailed
from megaboa.run.inputs import UnusableInputError
from megaboa.run.lives import kept
from megaboa.run.patience import may_pass
from megaboa.run.submitted import folder_of
from megaboa.run.supervisor import train

REQUEUE_SECONDS = 120
FIRST = "snakemake image data import preflight, with your profile"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, or its run.json")
    parser.add_argument("--restart", action="store_true", help="begin again, whatever lies in the store unfinished")
    arguments = parser.parse_args()
    run = arguments.run.parent if arguments.run.name == "run.json" else arguments.run
    return kept(lambda life: supervise(run, arguments.restart, life))


def supervise(run: Path, restart: bool, life: int) -> int:
    try:
        train(folder_of(run, restart), life)
    except (TrainingFailed, UnusableInputError, SlurmUnreachableError, RecordError) as failure:
        print(failure, file=sys.stderr)
        return 1
    except Requeued:
        with contextlib.suppress(KeyboardInterrupt):  # SLURM's signal, which the keeper passes on
            time.sleep(REQUEUE_SECONDS)  # SLURM ends this job; ending it ourselves would race with that
        return 1
    except FileNotFoundError as missing:
        print(f"{missing.filename} isn't there. First make what the run reads: {FIRST}", file=sys.stderr)
        return 1
    except OSError as problem:
        if not may_pass(problem):
            raise
        print(f"{problem}: the file system still failed after 10 minutes. {RESUMES}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt) as signal:
        print(f"interrupted: {signal}; the next call resumes from the newest complete checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
