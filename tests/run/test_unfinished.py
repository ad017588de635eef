"""megaboa.run.identity and unfinished: which store a run has, and what would be left lying if it began again."""

import shutil
from dataclasses import replace

import made
import pytest

from megaboa.files import link, write_json
from megaboa.observe.measure import drift
from megaboa.paths import RunFolder
from megaboa.plan import in_place
from megaboa.plan.parents import trained_parent
from megaboa.records import AttemptEnd, AttemptStart, ModelSource, write
from megaboa.run import ledger, supervisor, unfinished
from megaboa.run.call import TrainingFailed
from megaboa.run.checkpoints import MARKER
from megaboa.run.identity import as_it_lies, asked_as, identity_of, is_outdated, is_trained, store_of
from megaboa.run.outlook import outlook

TIMEOUT = "dist.distributed_timeout_minutes"


@pytest.fixture
def run(tmp_path):
    """A run of a recipe, which reads nothing of the stages before it: with this learning rate and these overrides."""

    def make(lr=1e-3, overrides=None, **more):
        folder = tmp_path / "results" / "my" / "runs" / "a"
        asked = {
            **{"model": {"name": "m", "recipe": "r", "init": "scratch", "tokenizer": None}, "data": {}},
            **{"optimizer": {"lr": lr}, "training": {"train_iters": 60}, "overrides": overrides or {}},
            **{"device": "cpu", "world_size": 1, **more},
        }
        write_json(folder / "run.json", asked)
        write_json(folder / "launch.json", {"store": str(tmp_path / "store"), "checkpoint": {}})
        return RunFolder(folder)

    return make


def trained_to(folder, *steps, completed=False):
    """The run's store, with complete checkpoints of these steps."""
    identity = identity_of(folder)
    store = store_of(folder, identity)
    write(store.identity, identity)
    ledger.append(store.ledger, AttemptStart(attempt=1))
    for step in steps:
        write_json(store.checkpoints / f"iter_{step:07d}" / MARKER, {"iteration": step, "files": {}})
    if completed:
        ledger.append(store.ledger, AttemptEnd(attempt=1, outcome="completed", iteration=max(steps, default=0)))
    return store


def before_the_table(folder, **overrides):
    """A store of a version that took every override for one that changes losses."""
    identity = identity_of(folder)
    older = replace(identity, run={**identity.run, "overrides": overrides})
    store = store_of(folder, older)
    write(store.identity, older)
    return store, older


def test_a_store_made_when_harmless_overrides_counted_is_found_whatever_they_are_now(run):
    folder = run()
    store, older = before_the_table(folder, **{TIMEOUT: 30, "train.manual_gc": True})
    assert identity_of(folder) == older and store_of(folder, identity_of(folder)).path == store.path
    write(folder.train_manifest, made.trained(identity=older.digest))
    assert is_trained(folder) and not is_outdated(folder, store)
    assert unfinished.other_work(folder) == []


def test_a_template_in_the_models_folder_counts_for_runs_that_are_tuned_with_it(run):
    """Those that began before it counted keep their store, whatever it is now."""
    model = {"name": "m", "hf": "mine", "revision": None, "init": "pretrained", "tokenizer": None}

    def tuned(template, task="sft", own=None):
        folder = run(model=model, task=task, tuning={"template": own} if task != "pretrain" else {})
        facts = {"path": "mine", "digest": "d", "vocab_size": 8, "params": 9, "dtype": "float32", "device": "cpu"}
        write(folder.source_manifest, ModelSource(name="m", chat_template=template, **facts))
        write_json(folder.experiment_folder.model("m").imported, {"digest": "d"})
        return folder

    before = trained_to(tuned(None), 20)
    assert store_of(tuned("new"), identity_of(tuned("new"))).path == before.path
    assert unfinished.other_work(tuned("new")) == []
    shutil.rmtree(before.path)
    trained_to(tuned("old"), 20)
    [work] = unfinished.other_work(tuned("new"))
    assert work.differences == ("chat_template: old → new (its content)",)
    assert not unfinished.other_work(tuned("old"))
    one, other = (identity_of(tuned(template, own="{{ a }}")) for template in ("old", "new"))
    assert one == other
    one, other = (identity_of(tuned(template, task="pretrain")) for template in ("old", "new"))
    assert one == other


@pytest.mark.parametrize("init", ["pretrained", "scratch"])
def test_a_model_whose_folder_has_been_moved_is_the_same_by_its_content(run, init):
    facts = {"name": "m", "vocab_size": 8, "params": 9, "dtype": "float32", "device": "cpu"}

    def of(path, looked_at=None, digest="d", imported=None, **more):
        model = {"name": "m", "hf": path, "revision": None, "init": init, "tokenizer": None}
        folder = run(model=model, **more)
        write(folder.source_manifest, ModelSource(path=looked_at or path, digest=digest, **facts))
        if init == "pretrained":
            write_json(
                folder.model_manifest, {"digest": f"of {imported or digest}", "source_digest": imported or digest}
            )
        return folder

    store = trained_to(of("my/base"), 20)
    before = identity_of(of("my/base"))
    write(of("my/base").train_manifest, made.trained(identity=before.digest, store=str(store.path)))
    moved = of("./my/base2", looked_at="my/base2")
    assert identity_of(moved) == before and is_trained(moved) and not is_outdated(moved, store)
    assert unfinished.other_work(moved) == [] and as_it_lies(moved, before) == moved.document("run")
    assert drift(asked_as(moved, before), before, made.trained(identity=before.digest), []) == []
    assert trained_parent(moved).run.model == moved.run.model, "a child has the same model"
    assert in_place.before(moved, moved.run).store.path == store.path
    for make in (
        lambda: of("my/base2", digest="e"),
        lambda: of("my/base2", looked_at="my/base"),  # nobody has looked at the new one yet
        lambda: of("my/base2", lr=2e-3),
        *([lambda: of("my/base2", digest="e", imported="d")] if init == "pretrained" else []),
    ):
        folder = make()
        assert identity_of(folder) != before and is_outdated(folder, store) and unfinished.other_work(folder)


def test_the_name_of_a_model_does_not_count(run):
    def of(name, lr=1e-3):
        return run(lr=lr, model={"name": name, "recipe": "r", "init": "scratch", "tokenizer": None})

    store = trained_to(of("small"), 20)
    before = identity_of(of("small"))
    write(of("small").train_manifest, made.trained(identity=before.digest, store=str(store.path)))
    renamed = of("tiny")
    assert identity_of(renamed) == before and is_trained(renamed) and not is_outdated(renamed, store)
    assert unfinished.other_work(renamed) == [] and drift(asked_as(renamed, before), before, made.trained(), []) == [
        "the store holds another run than the one that train.json is about"
    ]
    assert trained_parent(renamed).run.model["name"] == "tiny"
    (work,) = unfinished.other_work(of("tiny", lr=2e-3))
    assert work.differences == ("optimizer.lr: 0.001 → 0.002",)


def test_a_run_that_continues_in_place_leaves_nothing(run):
    begun = run()
    earlier = trained_to(begun, 20)
    other = run(lr=2e-3)
    assert [work.store.path for work in unfinished.other_work(other)] == [earlier.path]
    parent = {"experiment": "my", "run": "a", "iteration": 20, "identity": identity_of(begun).digest}
    continued = run(lr=2e-3, parent={**parent, "load": {"optimizer": True, "rng": True}})
    assert continued.is_in_place and unfinished.other_work(continued) == []


def test_what_has_been_continued_in_place_is_compared_by_its_newest_version(run):
    first = identity_of(run())
    trained_to(run(), 20)
    parent = {
        "experiment": "my",
        "run": "a",
        "iteration": 20,
        "identity": first.digest,
        "load": {"optimizer": True, "rng": True},
    }
    continued = run(lr=2e-3, parent=parent)
    write(continued.parent_manifest, made.trained(identity=first.digest))
    second = trained_to(continued, 60, completed=True)
    (work,) = unfinished.other_work(run(lr=2e-3))
    assert (work.store.path, work.step) == (second.path, 60)
    assert "parent.iteration: 20 → not set" in work.differences and "optimizer.lr" not in str(work.differences)


def test_an_override_that_counts_is_another_run(run):
    folder = run()
    store, older = before_the_table(folder, **{"model.moe_permute_fusion": True, TIMEOUT: 30})
    assert identity_of(folder) != older and is_outdated(folder, store)


def test_a_store_of_todays_identity_goes_before_an_older_one(run):
    folder = run()
    today = trained_to(folder, 20)
    before_the_table(folder, **{TIMEOUT: 30})
    assert store_of(folder, identity_of(folder)).path == today.path


def test_a_run_that_would_begin_again_beside_unfinished_work_says_what_differs(run):
    store = trained_to(run(lr=1e-3), 20, 40)
    (work,) = unfinished.other_work(run(lr=2e-3))
    assert (work.store.path, work.step) == (store.path, 40)
    assert work.differences == ("optimizer.lr: 0.001 → 0.002",)
    assert "step 40 of 60" in unfinished.explain(run(lr=2e-3), [work])


def test_what_appears_and_disappears_is_named_too(run):
    trained_to(run(overrides={"model.x": 1}), 20)
    (work,) = unfinished.other_work(run(bridge_source={"commit": "c"}))
    assert set(work.differences) == {"overrides.model.x: 1 → not set", "bridge_source.commit: not set → c"}


@pytest.mark.parametrize(("steps", "completed"), [((), False), ((60,), False), ((20,), True)])
def test_finished_work_and_work_without_a_checkpoint_stop_nobody(run, steps, completed):
    trained_to(run(lr=1e-3), *steps, completed=completed)
    assert unfinished.other_work(run(lr=2e-3)) == []


def test_once_the_new_run_has_begun_there_is_nothing_to_ask(run):
    trained_to(run(lr=1e-3), 20)
    trained_to(run(lr=2e-3))
    assert unfinished.other_work(run(lr=2e-3)) == []
    assert unfinished.other_work(run(lr=1e-3)) == [], "changed back: resumed"
    assert len(unfinished.other_work(run(lr=3e-3))) == 1


def test_before_its_inputs_are_made_the_runs_own_file_decides(run, tmp_path):
    folder = run(data={"blend": {"text": 1.0}})
    manifest = tmp_path / "results" / "my" / "data" / "text.json"
    write_json(manifest, {"digest": "d1"})
    trained_to(folder, 20)
    manifest.unlink()
    assert unfinished.other_work(RunFolder(folder.path)) == []
    assert len(unfinished.other_work(run(lr=2e-3, data={"blend": {"text": 1.0}}))) == 1
    write_json(manifest, {"digest": "d2"})
    (work,) = unfinished.other_work(run(data={"blend": {"text": 1.0}}))
    assert work.differences == ("corpora.text: d1 → d2 (its content)",)


def test_the_supervisor_does_not_begin_again_unasked(run):
    trained_to(run(lr=1e-3), 20)
    folder = run(lr=2e-3)
    with pytest.raises(TrainingFailed, match=r"optimizer\.lr: 0\.001 → 0\.002\n.*--config restart=a") as failed:
        supervisor.train(folder)
    assert "--restart" in str(failed.value)
    assert not store_of(folder, identity_of(folder)).path.exists()


@pytest.mark.parametrize("finished", [20, 40])
def test_of_several_older_stores_the_trained_one_counts_or_else_the_one_that_came_furthest(run, finished):
    folder = run()
    stores = {minutes: before_the_table(folder, **{TIMEOUT: minutes}) for minutes in (20, 30, 40)}
    write_json(stores[30][0].checkpoints / "iter_0000050" / MARKER, {"iteration": 50, "files": {}})
    assert identity_of(folder) == stores[30][1]
    write(folder.train_manifest, made.trained(identity=stores[finished][1].digest))
    assert identity_of(folder) == stores[finished][1] and is_trained(folder)


def test_digests_are_shown_by_their_beginning(run):
    before = identity_of(run(note="a" * 64))
    now = run(note="not a digest")
    assert unfinished.differences(before, now.documents["run"], None) == [f"note: {'a' * 12} → not a digest"]


def test_a_run_whose_store_is_gone_is_trained_again_only_if_asked_to(run, monkeypatch):
    folder = run()
    store = trained_to(folder, 60, completed=True)
    link(store.ledger, folder.attempts_link)
    assert unfinished.lost(folder) is None
    shutil.rmtree(store.path)
    assert unfinished.lost(folder) == store.path
    assert unfinished.lost(run(lr=2e-3)) is None, "as it is now it has never been trained"
    folder = run()
    with pytest.raises(
        TrainingFailed, match=r"is gone: put it back, or call with --config restart=a to train it again"
    ):
        supervisor.train(folder)
    assert "is gone: put it back, or train it again (--config restart=a)" in outlook(folder)
    assert outlook(folder, restarts=True) is None


def test_a_run_that_continues_itself_does_not_begin_again_with_other_data(run):
    begun = run()
    store = trained_to(begun, 20, completed=True)
    other = run(note="its data is another")
    assert unfinished.left_by_other_content(other) is None, "without the key it is another run"
    write_json(other.path / "launch.json", {**other.document("launch"), "continues": True})
    other = RunFolder(other.path)
    assert unfinished.left_by_other_content(other).path == store.path
    with pytest.raises(TrainingFailed, match=r"would start at step 0, as its data .*: call again, and"):
        supervisor.train(other)
    trained_to(other, 10)
    assert unfinished.left_by_other_content(other) is None, "it has begun"
