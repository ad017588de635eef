"""megaboa.run.resume: where the next attempt begins."""

import shutil

import made
import pytest
from ordinary_user import as_ordinary_user

from megaboa.config.models.resources import Recovery
from megaboa.files import file_digest, read_jsonl, write_json
from megaboa.paths import RunFolder
from megaboa.records import AttemptEnd, plain, write
from megaboa.run import checkpoints, ledger
from megaboa.run.inputs import UnusableInputError
from megaboa.run.resume import Beginning, Resumption
from megaboa.store_paths import RunStore

PARENT = {"experiment": "old", "run": "base", "iteration": 10, "load": {"optimizer": True, "rng": True}}


def save(root, iteration):
    folder = checkpoints.folder(root, iteration)
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", checkpoints.LAST_WRITTEN):
        (folder / name).write_text(f"{iteration} {name} " * 100)
    checkpoints.mark_complete(root)
    checkpoints.add_digests(root, iteration)
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def parent(tmp_path):
    """The folder of checkpoints of a run that has been trained."""
    store = RunStore(tmp_path / "store" / "runs" / "old" / "base" / "0123456789ab")
    for iteration in (10, 20):
        save(store.checkpoints, iteration)
    base = tmp_path / "results" / "old" / "runs" / "base"
    write(base / "train.json", made.trained(store=str(store.path), identity="0123"))
    write_json(base / "run.json", {"model": {"name": "m"}})
    return store.checkpoints


@pytest.fixture
def run(tmp_path):
    """A run by what its checkpoints are to be, with or without a parent."""

    def make(parent=None, task="pretrain", **checkpoint):
        folder = RunFolder(tmp_path / "results" / "new" / "runs" / "child")
        write_json(
            folder.path / "run.json", {"model": {"name": "m"}, "task": task, **({"parent": parent} if parent else {})}
        )
        write_json(folder.path / "launch.json", {"checkpoint": checkpoint})
        payload = RunStore(tmp_path / "store" / "child")
        payload.path.mkdir(parents=True, exist_ok=True)
        said = []
        return Resumption(folder, payload, said.append)

    return make


def test_the_beginning_is_the_start_the_parents_checkpoint_or_the_newest_own_one(run, parent):
    assert run().beginning() == Beginning(0)
    child = run(PARENT)
    assert child.beginning() == Beginning(10, parent)
    assert str(child.beginning()) == "step 10 of its parent"
    save(child.payload.checkpoints, 15)
    assert child.beginning() == Beginning(15)


def test_another_task_begins_with_the_parents_weights_at_its_own_step_0(run, parent):
    child = run({**PARENT, "weights_only": True})
    assert child.beginning() == Beginning(0, parent)
    assert str(child.beginning()) == "its parent's weights"


def test_adapters_need_the_parents_checkpoint_as_long_as_they_are_trained(run, parent):
    child = run({**PARENT, "weights_only": True}, task="lora")
    save(child.payload.checkpoints, 5)
    assert child.beginning() == Beginning(5)
    shutil.rmtree(checkpoints.folder(parent, 10))
    with pytest.raises(UnusableInputError, match=r"step 10 of .* is not complete"):
        child.beginning()


def test_who_has_no_sound_checkpoint_left_goes_back_to_the_parents(run, parent):
    child = run(PARENT)
    flip(save(child.payload.checkpoints, 15) / "__0_0.distcp")
    child.set_aside(15, checkpoints.damage(child.payload.checkpoints, 15))
    assert child.beginning() == Beginning(10, parent)
    (entry,) = read_jsonl(child.payload.ledger)
    assert entry["event"] == "distrust" and entry["iteration"] == 15


def test_a_damaged_checkpoint_of_the_parent_is_an_error_and_left_as_it_is(run, parent):
    folder = checkpoints.folder(parent, 10)
    flip(folder / "__0_0.distcp")
    before = {path: file_digest(path) for path in parent.rglob("*") if path.is_file()}
    said = run(PARENT).parent_is_damaged(checkpoints.damage(parent, 10))
    assert f"{folder / '__0_0.distcp'} has changed since it was written" in said
    assert "run child can't continue from step 10 of old/base" in said
    assert "old/base has 20: set continue_from to one of these" in said
    assert {path: file_digest(path) for path in parent.rglob("*") if path.is_file()} == before


def test_a_checkpoint_that_the_parent_has_no_longer(run, parent):
    with pytest.raises(UnusableInputError, match=r"iter_0000011 is not complete. old/base has 10, 20"):
        run({**PARENT, "iteration": 11}).beginning()


def test_without_verify_only_sizes_are_looked_at(run, parent):
    child = run(verify=False)
    folder = save(child.payload.checkpoints, 15)
    flip(folder / "__0_0.distcp")
    assert child.beginning() == Beginning(15)
    (folder / "__0_0.distcp").write_bytes(b"")
    assert child.beginning() == Beginning(0)


def test_after_a_failed_resume_checksums_are_looked_at_in_any_case(run):
    child = run(verify=False)
    flip(save(child.payload.checkpoints, 15) / "__0_0.distcp")
    assert child.could_not_load(15, "it could not be read") is None
    assert checkpoints.complete_iterations(child.payload.checkpoints) == []
    assert "has changed since it was written" in read_jsonl(child.payload.ledger)[-1]["detail"]
    save(child.payload.checkpoints, 15)
    assert "shows no damage, and is the only one" in child.could_not_load(15, "it could not be read")
    (checkpoints.folder(child.payload.checkpoints, 15) / checkpoints.DIGESTS).unlink()
    assert "shows no damage, and is the only one" in child.could_not_load(15, "it could not be read")
    assert checkpoints.complete_iterations(child.payload.checkpoints) == [15], "nobody begins again unasked"


def test_one_that_cannot_be_loaded_is_set_aside_once(run):
    child = run()
    for iteration in (5, 10, 15):
        save(child.payload.checkpoints, iteration)
    assert child.could_not_load(15, "EOFError") is None and child.beginning() == Beginning(10)
    assert "neither checkpoint 15 nor 10 can be loaded" in child.could_not_load(10, "EOFError")
    assert checkpoints.complete_iterations(child.payload.checkpoints) == [5, 10, 15], "put back"
    assert not list(child.payload.checkpoints.glob("damaged_*"))
    assert [entry["event"] for entry in read_jsonl(child.payload.ledger)] == ["distrust", "trust"]
    assert child.could_not_load(15, "EOFError") is None, "another call may try the same again"
    loaded = AttemptEnd(attempt=3, outcome="failed", iteration=10, last_step=12)
    ledger.append(child.payload.ledger, loaded)  # a checkpoint was loaded since
    assert child.could_not_load(10, "EOFError") is None and child.beginning() == Beginning(5)


def test_what_has_changed_is_set_aside_however_often(run):
    child = run(verify=False)
    for iteration in (5, 10, 15):
        flip(save(child.payload.checkpoints, iteration) / "__0_0.distcp")
    for iteration in (15, 10, 5):
        assert child.could_not_load(iteration, "EOFError") is None
    assert checkpoints.complete_iterations(child.payload.checkpoints) == []


def test_at_the_end_only_what_is_to_be_kept_is_left(run):
    child = run(keep_last=1, keep_every=20)
    for iteration in (10, 20, 30, 40, 50):
        save(child.payload.checkpoints, iteration)
    child.prove_newest()
    assert checkpoints.complete_iterations(child.payload.checkpoints) == [20, 40, 50]
    assert len(list(child.payload.checkpoints.iterdir())) == 3


def test_a_parent_with_another_tokenizer_is_refused(run, parent, tmp_path):
    child = run(PARENT)
    for experiment, digest in (("old", "a"), ("new", "a")):
        write(tmp_path / "results" / experiment / "models" / "m" / "source.json", made.source(tokenizer_digest=digest))
    assert child.beginning() == Beginning(10, parent)
    write(tmp_path / "results" / "new" / "models" / "m" / "source.json", made.source(tokenizer_digest="b"))
    with pytest.raises(UnusableInputError, match=r"the tokenizer of old/base differs from this run's"):
        child.beginning()


def test_with_loss_spikes_enough_is_kept_to_go_back_before_one(run):
    wanted = run(save_interval=10, keep_last=1)
    assert wanted.retention["keep_last"] == 1
    recovery = Recovery(loss_spike={"patience": 5}).model_dump(mode="json")
    launch = {**plain(wanted.folder.launch), "recovery": recovery}
    write_json(wanted.folder.path / "launch.json", launch)
    spiky = Resumption(RunFolder(wanted.folder.path), wanted.payload, print)
    assert spiky.retention["keep_last"] == 7, "55 steps may be done before a spike is noticed"


def test_a_checkpoint_that_may_not_be_read_is_not_damaged(run, parent):
    """Its user would lose the steps since the one before, although nothing is wrong with it."""
    child = run()
    own = child.payload.checkpoints
    newest = [save(own, iteration) for iteration in (10, 20)][1]
    (newest / "__0_0.distcp").chmod(0)
    with as_ordinary_user(newest):
        with pytest.raises(UnusableInputError, match=r"run child: checkpoint 20: .*__0_0.distcp may not be read by"):
            child.beginning()
        assert "may not be read" in child.could_not_load(20, "CheckpointException")
    assert newest.exists() and child.beginning() == Beginning(20)
    (checkpoints.folder(parent, 10) / "__0_0.distcp").chmod(0)
    shutil.rmtree(own)
    child = run(PARENT)
    refused = pytest.raises(UnusableInputError, match=r"can't continue from step 10 of old/base: .*may not be read")
    with as_ordinary_user(checkpoints.folder(parent, 10)), refused:
        child.beginning()
