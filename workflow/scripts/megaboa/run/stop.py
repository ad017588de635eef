"""Asking a run to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megaboa import files
from megaboa.run import claims, progress
from megaboa.run.patience import patiently
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import RunStore


class Answer(NamedTuple):
    asked: bool  # False: nobody trains the run
    said: str  # what will happen, in a sentence


def stop(store: RunStore, say: Callable[[str], None] = print) -> Answer:
    """Ask a run to stop. A waiting job is cancelled."""
    last, training = claims.last_holder(store.claims), claims.holder(store.claims) is not None
    if last is None or (last.job is None and claims.is_held(store.claims) is False):
        return Answer(False, "it isn't running")
    known = progress.read_progress(store.path)
    if known.state == "done":
        return Answer(False, "it has all its steps")
    if not training and not known.goes_on:  # a requeued job that waits has released the run too, but goes on
        return Answer(False, "it isn't running")
    if last.job is None:
        patiently(lambda: files.touch(store.stop), say)
        return Answer(True, f"asked {claims.describe(last)} to save and stop")
    return _stop_job(store, last, training, say)


def _stop_job(store: RunStore, holder: claims.Holder, training: bool, say: Callable[[str], None]) -> Answer:
    """Stop a run that a job holds, or held: a requeued job that waits has released the run, but will claim it again."""
    ours, job, name = cluster(), holder.job, claims.describe(holder)
    if claims.is_of_other_cluster(holder):  # the same number may be another job here
        return _ask_by_file(store, say, name, "its cluster can't be asked from here")
    try:
        found = ours.job(job)
    except UnreachableError:
        return _ask_by_file(store, say, f"{ours.name} job {job}", f"{ours.name} doesn't answer")
    if found is None and claims.is_of_other_user(holder):
        return _ask_by_file(store, say, name, f"{ours.name} says nothing of it")
    if found and found.waits:
        done = ours.cancel(job)
        became = "was cancelled" if done else "could not be cancelled"
        return Answer(True, f"{ours.name} job {job} was waiting in the queue, and {became}")
    if found is None or found.has_ended or not training:
        return Answer(False, f"{ours.name} job {job} has ended already")
    patiently(lambda: files.touch(store.stop), say)
    return Answer(True, f"asked {ours.name} job {job} to save and stop")


def _ask_by_file(store: RunStore, say: Callable[[str], None], name: str, why: str) -> Answer:
    """Leave the stop file, which the supervisor finds if it is alive."""
    patiently(lambda: files.touch(store.stop), say)
    return Answer(True, f"asked {name} to save and stop, if it runs: {why}")
