"""One rank of a run: its arguments, and what comes before Bridge is imported (`training.py`)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megaboa import files, records
from megaboa.bridge import process
from megaboa.paths import RunFolder
from megaboa.records import Identity
from megaboa.run import gpu_sampler
from megaboa.run.identity import identity_of
from megaboa.store_paths import AttemptFolder, RunStore

WORD_SECONDS = 0.5  # between two looks by a rank


def main() -> None:
    wanted = arguments()
    store, attempt = RunStore(wanted.store), AttemptFolder(wanted.attempt)
    folder = RunFolder(wanted.run, files.read_json(attempt.asked))
    process.reached["started"] = process.started()
    process.prepare(folder.run.device, folder.launch.cpus_per_rank)
    from megaboa.bridge import training

    process.reached["imported"] = time.time()
    if identity_of(folder) != records.read(Identity, store.identity):
        sys.exit(f"what run {folder.name} reads (corpora, model, image) was made again while it started; call again")
    if wanted.verified:
        wait_for_word(wanted.verified)
        process.reached["verified"] = time.time()
    if not wanted.capture:  # not under a profiler, which would record the sampler too
        gpu_sampler.start(folder, attempt)
    training.train(training.Rank(folder, store, attempt, wanted))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder below results/")
    parser.add_argument("--store", type=Path, required=True, help="the run's payload folder")
    parser.add_argument("--attempt", type=Path, required=True, help="the attempt's folder in the store")
    parser.add_argument("--claim", type=int, default=0, help="number of the supervisor's claim; 0: it has none")
    parser.add_argument("--resume-from", type=int, default=0, help="iteration of the checkpoint to continue from")
    parser.add_argument("--parent", type=Path, help="folder of the parent's checkpoints, where that one is among them")
    parser.add_argument("--verified", type=Path, help="file that is empty until that checkpoint may be loaded")
    parser.add_argument("--local-copies", metavar="NAME", help="copy the state to the nodes, under this name")
    parser.add_argument("--capture", action="store_true", help="profile the first steps instead of training")
    parser.add_argument(
        "--skip", type=steps_of, action="extend", default=[], help="steps whose batches are left out, as in 40-45"
    )
    return parser.parse_args(words)


def steps_of(text: str) -> list[int]:
    """`40-42` as [40, 41, 42]."""
    first, last = map(int, text.split("-"))
    return [*range(first, last + 1)]


def wait_for_word(path: Path) -> None:
    """Wait until the file has content. Its mere existence may be reported late by a file server."""
    while not path.read_text():
        time.sleep(WORD_SECONDS)
