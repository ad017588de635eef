"""Which checkpoint an export means."""

import json

import pytest

from megaboa.errors import InputError
from megaboa.files import write_text
from megaboa.paths import RunStore
from megaboa.run import checkpoints, kept


@pytest.fixture
def store(tmp_path):
    """Checkpoints 10, 20, 30 (40 is unfinished); evaluated at 10, 20 and 40, and at 20 in two attempts."""
    for iteration in (10, 20, 30, 40):
        folder = tmp_path / "checkpoints" / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "weights.distcp").write_text("weights")
        if iteration < 40:
            (folder / checkpoints.MARKER).write_text("{}")
    evaluated(tmp_path, 1, {10: 3.0, 20: 1.0})
    evaluated(tmp_path, 2, {20: 3.5, 40: 0.5})
    return RunStore(tmp_path)


def evaluated(path, attempt, losses):
    lines = [{"event": "eval", "step": step, "losses": {"lm loss": loss}} for step, loss in losses.items()]
    text = "".join(json.dumps(line) + "\n" for line in [{"event": "step", "step": 1}, *lines])
    write_text(path / "attempts" / f"{attempt:02d}" / "steps.jsonl", text)


@pytest.mark.parametrize(("wanted", "found"), [("final", 30), ("best", 10), (20, 20)])
def test_a_kept_checkpoint_is_chosen(store, wanted, found):
    assert kept.chosen("r", store, wanted) == found


def test_of_a_step_evaluated_twice_the_last_counts(store):
    assert kept.evaluations(store)[20].losses["lm loss"] == 3.5


@pytest.mark.parametrize("wanted", [40, 15])
def test_what_was_not_kept_is_refused(store, wanted):
    with pytest.raises(InputError, match=f"export.checkpoint is {wanted}, and the kept checkpoints are 10, 20, 30"):
        kept.chosen("r", store, wanted)


def test_without_an_evaluation_there_is_no_best(store):
    for path in store.path.glob("attempts/*/steps.jsonl"):
        path.unlink()
    with pytest.raises(InputError, match=r"none of the kept checkpoints \(10, 20, 30\) was evaluated"):
        kept.chosen("r", store, "best")


def test_without_a_checkpoint_there_is_nothing_to_export(tmp_path):
    with pytest.raises(InputError, match=r"r has no checkpoint to export: set checkpoint.save_interval"):
        kept.chosen("r", RunStore(tmp_path), "final")


def test_a_damaged_checkpoint_is_not_exported(store):
    checkpoints.add_digests(store.checkpoints, 20)
    checkpoints.add_digests(store.checkpoints, 30)
    kept.require_sound("r", store, 30)
    damaged = checkpoints.folder(store.checkpoints, 30) / "weights.distcp"
    damaged.write_text("weightz")
    with pytest.raises(InputError, match=r"checkpoint 30 is damaged: .*has changed.*export.checkpoint: 20"):
        kept.require_sound("r", store, 30)
    damaged.unlink()
    with pytest.raises(InputError, match=r"weights.distcp is missing"):
        kept.require_sound("r", store, 30)
