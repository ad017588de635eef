"""Messages to the user about a run: on the terminal, in the experiment's progress log, and by their command."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable

from megaboa import files
from megaboa.paths import RunFolder
from megaboa.run import progress
from megaboa.run.failures import Tails
from megaboa.scheduler.ranks import Ended
from megaboa.store_paths import AttemptFolder, RunStore

PROGRESS_SECONDS, JOB_PROGRESS_SECONDS = 2.0, 30.0
LOG_LINES_SHOWN = 15
NOTIFY_SECONDS = 60
ADDRESS = re.compile(r"\w+://\S+")  # a webhook's is a secret
LONGEST_FACT = 4000  # characters; environment variables aren't made for logs
Say = Callable[[str], None]


def announcer(folder: RunFolder) -> Say:
    """A function that prints a line on the terminal and to the experiment's progress log."""

    def say(text: str) -> None:
        line = log_progress(folder, text)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{line}\n")  # print() would write the line feed by itself, after other runs' lines
            sys.stderr.flush()

    return say


def log_progress(folder: RunFolder, text: str) -> str:
    """Add a line to the experiment's progress log only, for what the terminal gets with more detail; return it."""
    line = f"{time.strftime('%H:%M:%S')}  {folder.name:<16} {text}"
    with contextlib.suppress(OSError):  # a full disk or a closed terminal must not end the training
        folder.progress_log.parent.mkdir(parents=True, exist_ok=True)
        files.append_line(folder.progress_log, line, durable=False)
    return line


def progress_reporter(payload: RunStore, say: Say, in_job: bool) -> Callable[[], None]:
    """A function, to be called often, that reports the run's progress at intervals: longer ones in a job, because
    hundreds of jobs may share the log."""
    seconds = JOB_PROGRESS_SECONDS if in_job else PROGRESS_SECONDS
    last_time, last_text = time.monotonic(), ""

    def report() -> None:
        nonlocal last_time, last_text
        if time.monotonic() - last_time < seconds:
            return
        last_time = time.monotonic()
        try:
            text = progress.describe(progress.read_progress(payload.path))
        except (OSError, ValueError):  # a progress report isn't worth a failed training
            return
        if text != last_text:
            last_text = text
            say(text)

    return report


def explain(
    folder: RunFolder, target: AttemptFolder, ended: Ended, detail: str, advice: str, rank: int | None = None
) -> str:
    """The message that the user reads after ranks have failed."""
    log = target.log(rank if rank is not None else ended.rank or 0)
    lines = Tails([(0, log)]).get(0, "").splitlines()
    shown = "\n".join(f"    {line}" for line in lines[-LOG_LINES_SHOWN:])
    return f"run {folder.name}: {detail}. The last lines of {log}:\n{shown}\n{advice}"


def notify(command: str | None, **facts: object) -> str | None:
    """Run the user's notification command at a run's end; return a description of its failure, or None.

    The description goes into logs that others read, so it has neither the command nor addresses in its messages.
    The command gets the facts as environment variables, such as MEGABOA_RUN and MEGABOA_STATE.
    """
    if not command:
        return None
    environment = {f"MEGABOA_{name.upper()}": str(value)[:LONGEST_FACT] for name, value in facts.items()}
    try:
        done = subprocess.run(
            command,
            shell=True,
            env={**os.environ, **environment},
            timeout=NOTIFY_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the notification took more than {NOTIFY_SECONDS} s and was ended"
    except OSError as error:
        return f"the notification failed: {error}"
    if done.returncode:
        said = ADDRESS.sub("(address)", done.stderr.strip()) or "it wrote no message"
        return f"the notification failed with exit status {done.returncode}: {said}"
    return None
