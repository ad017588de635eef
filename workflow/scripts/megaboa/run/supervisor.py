"""One run from its files to its manifest: lock, attempt, ranks, and the judgement whether it is finished.

A run is finished when its last step's checkpoint is complete or, where nothing is saved, when every rank has left its
record at the last step. Exit codes don't count: Bridge also ends with 0 on a signal or a time limit.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaboa import files, store
from megaboa.launch import local
from megaboa.observe.progress import describe, last_step, read_progress
from megaboa.results import AttemptFolder, RunFolder, RunStore
from megaboa.run import checkpoints, ledger
from megaboa.run.identity import identity_of, store_of
from megaboa.run.inputs import check_documents, check_nodes

RANK_SCRIPT = Path(__file__).parents[2] / "train_rank.py"
PROGRESS_SECONDS = 2.0
LOG_LINES_SHOWN = 15
RESUMES = "The next call goes on from the newest complete checkpoint."


class TrainingFailed(Exception):
    """An attempt ended before the run's last step; the message is what the user reads."""


class Interrupted(BaseException):
    """The supervisor was asked to end."""


def train(folder: RunFolder) -> dict[str, Any]:
    """Bring the run to its last step and write its manifest; every call goes on where the last one ended."""
    identity = identity_of(folder)
    payload = store_of(folder, identity)
    payload.path.mkdir(parents=True, exist_ok=True)
    say = _announcer(folder)
    with store.locked(payload.lock, on_wait=lambda holder: say(f"is being trained by {holder}; waiting for it")):
        files.write_json(payload.identity, identity)
        payload.ledger.touch()
        files.link(payload.ledger, folder.attempts_link)
        if not finished(folder, payload):
            check_nodes(folder)
            check_documents(folder)
            attempt(folder, payload, say)
        if identity_of(RunFolder(folder.path)) != identity:  # read anew
            raise TrainingFailed(f"run {folder.name} was changed while it was trained; call again for what it is now")
        manifest = manifest_of(folder, payload, identity)
        files.write_json(folder.train_manifest, manifest)
        return manifest


def attempt(folder: RunFolder, payload: RunStore, say: Callable[[str], None]) -> None:
    """Start the ranks once and watch them to their end."""
    number = ledger.next_attempt(payload.ledger)
    target = payload.attempt(number)
    (target.path / "end").mkdir(parents=True, exist_ok=True)
    checkpoints.remove_unfinished(payload.checkpoints)
    resumed_from = checkpoints.latest(payload.checkpoints)
    world_size = folder.run["world_size"]
    ledger.record_start(payload.ledger, number, resumed_from, world_size)
    beginning = f"step {resumed_from}" if resumed_from else "the start"
    say(f"attempt {number}, {world_size} rank(s), from {beginning}")

    def close(outcome: ledger.Outcome, detail: str) -> None:
        ledger.record_end(payload.ledger, number, outcome, checkpoints.latest(payload.checkpoints), detail)

    try:
        ended = _run_ranks(folder, payload, target, resumed_from, say)
    except Interrupted:
        close("interrupted", "the supervisor was asked to end")
        raise
    except BaseException as error:
        close("failed", f"{type(error).__name__}: {error}")
        raise
    if not finished(folder, payload):
        detail = str(ended) if not ended.ok else "every rank ended with 0, but before the last step"
        close("failed", detail)
        raise TrainingFailed(explain(folder, target, ended, detail, RESUMES))
    close("completed", str(ended))
    say(describe(read_progress(payload.path)))


def finished(folder: RunFolder, payload: RunStore) -> bool:
    last = last_step(payload)
    if last is None:
        return False
    if checkpoints.latest(payload.checkpoints) >= last:
        return True
    return not _saves(folder, payload) and _ended_at(folder, payload, last)


def manifest_of(folder: RunFolder, payload: RunStore, identity: dict[str, Any]) -> dict[str, Any]:
    iteration = checkpoints.latest(payload.checkpoints)
    return {
        "run": folder.name,
        "identity": files.digest(identity),
        "store": str(payload.path),
        "train_iters": last_step(payload),
        "iteration": iteration or last_step(payload),
        "checkpoint": str(checkpoints.folder(payload.checkpoints, iteration)) if iteration else None,
        "world_size": folder.run["world_size"],
    }


def rank_command(folder: RunFolder, payload: RunStore, target: AttemptFolder, resume_from: int) -> list[str]:
    return [
        sys.executable,
        str(RANK_SCRIPT),
        f"--run={folder.path}",
        f"--store={payload.path}",
        f"--attempt={target.path}",
        f"--resume-from={resume_from}",
    ]


def _run_ranks(
    folder: RunFolder, payload: RunStore, target: AttemptFolder, resumed_from: int, say: Callable[[str], None]
) -> local.Ended:
    with _signals_interrupt():
        ranks = local.start(
            rank_command(folder, payload, target, resumed_from),
            folder.run["world_size"],
            target.path,
            folder.launch["cpus_per_rank"],
        )
        try:
            return local.wait(ranks, _progress_reporter(payload, say))
        except BaseException:
            local.stop(ranks)
            raise


def _saves(folder: RunFolder, payload: RunStore) -> bool:
    asked = folder.launch["checkpoint"]
    if "save_interval" in asked:
        return asked["save_interval"] != 0
    return not payload.found.exists() or files.read_json(payload.found)["saves"]


def _ended_at(folder: RunFolder, payload: RunStore, step: int) -> bool:
    """Whether every rank of the newest attempt has left its record at this step."""
    target = payload.attempt(ledger.next_attempt(payload.ledger) - 1)
    records = [target.end_record(rank) for rank in range(folder.run["world_size"])]
    return all(record.exists() and files.read_json(record)["step"] >= step for record in records)


def explain(folder: RunFolder, target: AttemptFolder, ended: local.Ended, detail: str, advice: str) -> str:
    """What the user reads when ranks have failed."""
    log = target.log(ended.rank or 0)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    shown = "\n".join(f"    {line}" for line in lines[-LOG_LINES_SHOWN:])
    return f"run {folder.name}: {detail}. The last lines of {log}:\n{shown}\n{advice}"


def _announcer(folder: RunFolder) -> Callable[[str], None]:
    """Says a line on the terminal and in the experiment's progress log."""
    folder.progress_log.parent.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')}  {folder.name:<16} {text}"
        with contextlib.suppress(OSError):  # a full disk or a closed terminal must not end the training
            files.append_line(folder.progress_log, line)
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)

    return say


def _progress_reporter(payload: RunStore, say: Callable[[str], None]) -> Callable[[], None]:
    last_time, last_text = time.monotonic(), ""

    def report() -> None:
        nonlocal last_time, last_text
        if time.monotonic() - last_time < PROGRESS_SECONDS:
            return
        last_time = time.monotonic()
        try:
            text = describe(read_progress(payload.path))
        except (OSError, ValueError):  # seeing is not worth a training
            return
        if text != last_text:
            last_text = text
            say(text)

    return report


class _signals_interrupt:  # noqa: N801 (used as a with-statement's verb)
    """SIGTERM, SIGINT and SIGHUP raise Interrupted here, so that the ranks are ended and the ledger is closed."""

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __enter__(self) -> None:
        def interrupt(number: int, frame: object) -> None:
            raise Interrupted(signal.Signals(number).name)

        self.before = {number: signal.signal(number, interrupt) for number in self.numbers}

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
