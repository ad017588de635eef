"""Train one run to its last step, here.

The workflow's jobs do the same; by hand it serves to debug one run, on this machine or inside an interactive
allocation.
"""

import contextlib
import sys
import time
from pathlib import Path

from megaboa import commands
from megaboa.errors import InputError, forbidden
from megaboa.run.call import RESUMES, Interrupted, Requeued, TrainingFailed
from megaboa.run.lives import kept
from megaboa.run.patience import STILL_FAILED, may_pass
from megaboa.run.submitted import folder_of
from megaboa.run.supervisor import train
from megaboa.scheduler.answers import UnreachableError

REQUEUE_SECONDS = 120
FIRST = "snakemake image data import preflight, with your profile"


def main(words: list[str]) -> int:
    parser = commands.parser("pretrain", __doc__)
    parser.add_argument("run", type=commands.run, help="EXPERIMENT/RUN, the run's folder, or its run.json")
    parser.add_argument(
        "--restart", action="store_true", help="start from step 0 although unfinished work has other settings"
    )
    arguments = parser.parse_args(words)
    return kept(lambda life: supervise(arguments.run, arguments.restart, life))


def supervise(run: Path, restart: bool, life: int) -> int:
    try:
        train(folder_of(run, restart), life)
    except (TrainingFailed, InputError, UnreachableError) as failure:
        print(failure, file=sys.stderr)
        return 1
    except Requeued:
        with contextlib.suppress(KeyboardInterrupt):  # the scheduler's signal, which the keeper passes on
            time.sleep(REQUEUE_SECONDS)  # the scheduler ends this job; ending it ourselves would race with that
        return 1
    except FileNotFoundError as missing:
        print(
            f"{missing.filename} isn't there. If results were removed since the run was submitted, call again: it "
            f"resumes from its checkpoints in the store. Otherwise first make the run's inputs: {FIRST}",
            file=sys.stderr,
        )
        return 1
    except PermissionError as error:
        print(forbidden(error), file=sys.stderr)
        return 1
    except OSError as problem:
        if not may_pass(problem):
            raise
        print(f"{problem}: {STILL_FAILED}. {RESUMES}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt) as signal:
        print(f"interrupted: {signal}; the next call resumes from the newest complete checkpoint", file=sys.stderr)
        return 130
    return 0
