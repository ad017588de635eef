"""Which checkpoint of a run is exported, and of which of its versions."""

import json
import math
from dataclasses import replace

import pytest

from megaboa.errors import InputError
from megaboa.files import write_json, write_text
from megaboa.paths import EarlierRun, RunFolder
from megaboa.records import Best, Identity, Parent, TrainRecord, plain, read, write
from megaboa.run import checkpoints
from megaboa.run.versions import Chosen, chosen, folder_of
from megaboa.store_paths import RunStore

RUN = {
    "task": "pretrain",
    "model": {"name": "m", "init": "scratch"},
    "data": {"blend": {"wiki": 1.0}, "split": "98,1,1"},
    **{section: {} for section in ("training", "optimizer", "schedule", "parallel")},
    "overrides": {},
    "world_size": 1,
    "parent": None,
}


def store_with(path, *kept, **losses):
    """A store with these checkpoints. `losses`: of one attempt each, by its name."""
    for iteration in kept:
        write_text(checkpoints.folder(path / "checkpoints", iteration) / checkpoints.MARKER, "{}")
    for number, found in enumerate(losses.values(), start=1):
        lines = [{"event": "eval", "step": step, "losses": {"lm loss": loss}} for step, loss in found.items()]
        text = "".join(json.dumps(line) + "\n" for line in [{"event": "step", "step": 1}, *lines])
        write_text(path / "attempts" / f"{number:02d}" / "steps.jsonl", text)
    return RunStore(path)


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "results" / "e" / "runs" / "r")


@pytest.fixture
def store(tmp_path):
    """Checkpoints 10, 20, 30 (40 is unfinished); evaluated at 10, 20 and 40, and at 20 in two attempts."""
    write_text(checkpoints.folder(tmp_path / "checkpoints", 40) / "weights.distcp", "weights")
    return store_with(tmp_path, 10, 20, 30, first={10: 3.0, 20: 1.0}, second={20: 3.5, 40: 0.5})


@pytest.mark.parametrize(("wanted", "found"), [("final", 30), ("best", 10), (20, 20)])
def test_a_kept_checkpoint_is_chosen(folder, store, wanted, found):
    one = chosen(folder, store, wanted)
    assert (one.store, one.iteration) == (store, found)
    assert one.best == (Best(loss=3.0, evaluated=2, kept=3) if wanted == "best" else None)


def test_a_loss_that_is_not_a_number_is_never_the_best(folder, tmp_path):
    store = store_with(tmp_path / "of losses", 10, 20, 30, only={10: math.nan, 20: 3.0, 30: math.inf})
    assert chosen(folder, store, "best").iteration == 20


@pytest.mark.parametrize("wanted", [40, 15])
def test_what_was_not_kept_is_refused(folder, store, wanted):
    with pytest.raises(InputError, match=f"export.checkpoint is {wanted}, and the kept checkpoints are 10, 20, 30"):
        chosen(folder, store, wanted)


def test_without_an_evaluation_there_is_no_best(folder, store):
    for path in store.path.glob("attempts/*/steps.jsonl"):
        path.unlink()
    with pytest.raises(InputError, match=r"none of the kept checkpoints \(10, 20, 30\) was evaluated"):
        chosen(folder, store, "best")


def test_without_a_checkpoint_there_is_nothing_to_export(folder, tmp_path):
    with pytest.raises(InputError, match=r"r has no checkpoint to export: set checkpoint.save_interval"):
        chosen(folder, RunStore(tmp_path), "final")


class Continued:
    """A run that was continued in place at step 20, whose second version has steps 30 and 40 with higher losses."""

    def __init__(self, folder, tmp_path):
        self.folder = folder
        first = store_with(tmp_path / "first", 10, 20, 25, only={10: 3.0, 20: 2.0, 25: 1.0})
        self.first = self._begin(first, Identity(run=RUN, corpora={"wiki": "1"}))
        later = store_with(tmp_path / "later", 30, 40, only={30: 5.0, 40: 4.0})
        identity = self.first.identity
        parent = Parent(experiment="e", run="r", iteration=20, load={"optimizer": True, "rng": True})
        now = Identity(run={**RUN, "parent": plain(replace(parent, identity=read(Identity, identity).digest))})
        self.later = self._begin(later, replace(now, corpora={"wiki": "1"}))
        write_json(folder.file("run"), now.run)
        earlier = EarlierRun(folder.path, identity=read(Identity, identity).digest)
        write_json(earlier.file("run"), RUN)
        record = TrainRecord(
            run="r", identity=earlier.identity, store=str(first.path), iteration=20, train_iters=20, world_size=1
        )
        write(earlier.train_manifest, record)
        self.earlier = earlier

    def _begin(self, store, identity):
        write_json(store.identity, plain(identity))
        return store


@pytest.fixture
def continued(folder, tmp_path):
    return Continued(folder, tmp_path)


def test_best_and_a_step_are_looked_for_in_earlier_versions_too(continued):
    def of(wanted):
        found = chosen(continued.folder, continued.later, wanted)
        return found.store, found.iteration

    assert of("best") == of(20) == (continued.first, 20), "25 is of none that the newest continues from"
    assert of(10) == (continued.first, 10)
    assert of("final") == of(40) == (continued.later, 40)
    with pytest.raises(InputError, match=r"checkpoint is 25, and the kept checkpoints are 10, 20, 30, 40"):
        of(25)


@pytest.mark.parametrize("change", [{"corpora": {"wiki": "2"}}, {"run": {"data": {"blend": {"law": 1.0}}}}])
def test_losses_on_other_data_are_not_compared(continued, change):
    now = read(Identity, continued.later.identity)
    changed = {key: {**getattr(now, key), **value} for key, value in change.items()}
    write_json(continued.later.identity, plain(replace(now, **changed)))
    found = chosen(continued.folder, continued.later, "best")
    assert found == Chosen(continued.later, 40, Best(loss=4.0, evaluated=2, kept=4))


def test_a_step_is_of_the_run_as_it_was_then(continued):
    assert folder_of(continued.folder, continued.first) == continued.earlier
    assert folder_of(continued.folder, continued.first).run.parent is None
    assert folder_of(continued.folder, continued.later) is continued.folder
