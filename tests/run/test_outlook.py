"""megaboa.run.outlook: whether a run that has begun resumes or trains again, and why."""

import made
import pytest

from megaboa import files
from megaboa.paths import RunFolder
from megaboa.records import AttemptEnd, AttemptStart, RankEnd, write
from megaboa.run import claims, ledger
from megaboa.run.checkpoints import MARKER
from megaboa.run.identity import identity_of, store_of
from megaboa.run.outlook import outlook
from megaboa.store_paths import RunStore

SETS = {"validation_sets": {"law": {"text": 1.0}}}


@pytest.fixture
def run(tmp_path):
    """A run of a recipe, which reads nothing of the stages before it."""

    def make(steps=60, lr=1e-3, store="store", save_interval=20, **more):
        folder = tmp_path / "results" / "my" / "runs" / "a"
        asked = {
            **{"model": {"name": "m", "recipe": "r", "init": "scratch", "tokenizer": None}, "data": {}},
            **{"optimizer": {"lr": lr}, "training": {"train_iters": steps}, "overrides": {}},
            **{"device": "cpu", "world_size": 1, **more},
        }
        files.write_json(folder / "run.json", asked)
        checkpoint = {"save_interval": save_interval}
        files.write_json(folder / "launch.json", {"store": str(tmp_path / store), "checkpoint": checkpoint})
        return RunFolder(folder)

    return make


def trained_to(folder, *saved, outcome="interrupted"):
    """One attempt that has saved these steps."""
    identity = identity_of(folder)
    store = store_of(folder, identity)
    write(store.identity, identity)
    ledger.append(store.ledger, AttemptStart(attempt=1))
    ledger.append(store.ledger, AttemptEnd(attempt=1, outcome=outcome, iteration=max(saved, default=0)))
    store.attempt(1).path.mkdir(parents=True)
    for step in saved:
        files.write_json(store.checkpoints / f"iter_{step:07d}" / MARKER, {"iteration": step, "files": {}})
    files.link(store.ledger, folder.attempts_link)
    return identity


def test_a_run_that_has_not_begun_has_no_outlook(run):
    assert outlook(run()) is None


def test_an_interrupted_run_resumes_whether_a_restart_is_asked_for_or_not(run):
    trained_to(run(), 20, 53)
    assert outlook(run()) == "resumes at step 53 of 60"
    kept = "resumes at step 53 of 60 (restart drops nothing, since no setting has changed)"
    assert outlook(run(), restarts=True) == kept


def test_a_process_that_a_killed_call_has_left_is_named(run):
    trained_to(run(), 20, 53)
    store = RunStore.of(run().attempts_link)
    me = claims.myself(None)
    with claims.held(store.claims, me):
        said = f"is being trained by process {me.pid} on host {me.host}: a call waits for its end, and"
        assert outlook(run()) == f"{said} `megaboa stop my/a` lets it save and end"
        still = f"; process {me.pid} on host {me.host} still trains it as it was"
        assert outlook(run(lr=2e-3)).endswith(f"(continue_from: itself would continue from step 53){still}")
    assert outlook(run()) == "resumes at step 53 of 60"


def test_a_run_without_a_checkpoint_starts_again(run):
    trained_to(run())
    assert outlook(run()) == "starts again from step 0: nothing was saved"


def test_a_run_with_all_its_steps_is_not_trained_again(run):
    trained_to(run(), 60)
    assert outlook(run()) == "has all its steps (60): nothing is trained again"


def test_without_checkpoints_the_ranks_records_decide(run):
    """As in the supervisor: what the ledger says doesn't count if its checkpoint is gone."""
    trained_to(run(), outcome="completed")
    assert outlook(run()) == "starts again from step 0: nothing was saved"
    unsaved = run(save_interval=0)
    assert outlook(unsaved) == "starts again from step 0: nothing was saved"
    write(store_of(unsaved, identity_of(unsaved)).attempt(1).end_record(0), RankEnd(step=60))
    assert outlook(unsaved) == "has all its steps (60): nothing is trained again"


def test_a_changed_run_trains_again_for_these_keys(run):
    trained_to(run(steps=60), 60, outcome="completed")
    before = RunStore.of(run().attempts_link).path
    why = "trains again from step 0: training.train_iters: 60 → 90"
    assert outlook(run(steps=90)) == f"{why} (continue_from: itself would continue from step 60)"
    assert outlook(run(steps=90), restarts=True) == f"{why} (its 60 steps stay in {before})"
    many = outlook(run(steps=90, lr=2e-3, device="cuda", world_size=2))
    assert many.startswith("trains again from step 0: ") and " and 2 more (" in many
    trained_to(run(steps=90), 30)
    assert outlook(run(steps=60)) == "has all its steps (60): nothing is trained again", "changed back"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], "continue_from: itself would continue from step 60"),
        (
            ["training.train_iters"],
            "continue_from: itself with training.train_iters above 60 would continue from step 60",
        ),
        (["training.train_iters", "continue_from"], "its 60 steps stay in "),
    ],
)
def test_continuing_is_offered_only_where_the_plan_would_allow_it(run, keys, said):
    trained_to(run(), 60, outcome="completed")
    asked = []
    text = outlook(run(lr=2e-3), obstacles=lambda store, step: asked.append((store.path.name, step)) or keys)
    assert text.startswith(f"trains again from step 0: optimizer.lr: 0.001 → 0.002 ({said}")
    assert asked == [(RunStore.of(run().attempts_link).path.name, 60)]


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ((20, 40, 60), "(continue_from: itself@40 would train only the steps after it again)"),
        ((60,), "(continue_from: itself with training.train_iters above 60 would continue from step 60)"),
    ],
)
def test_a_set_that_a_finished_run_gets_needs_only_its_last_steps(run, saved, said):
    trained_to(run(), *saved, outcome="completed")

    def too_short(store, step):
        return ["training.train_iters"] if step >= 60 else []

    text = outlook(run(data=SETS), obstacles=too_short)
    assert text == f"trains again from step 0: data.validation_sets.law.text: not set → 1.0 {said}"
    for manifest in run(data=SETS).corpus_manifests.values():  # the corpus of the set is made by now
        files.write_json(manifest, {"digest": "d1"})
    made_now = outlook(run(data=SETS), obstacles=too_short)
    assert "corpora.text: None → d1 (its content)" in made_now and made_now.endswith(said)
    with_rate = outlook(run(data=SETS, lr=2e-3), obstacles=too_short)
    assert "itself with training.train_iters above 60" in with_rate


def test_a_run_that_continues_in_place_resumes_from_its_checkpoint(run):
    identity = trained_to(run(), 60, outcome="completed")
    parent = {
        "experiment": "my",
        "run": "a",
        "iteration": 60,
        "load": {"optimizer": True, "rng": True},
        "identity": identity.digest,
    }
    folder = run(steps=90, parent=parent)
    write(folder.parent_manifest, made.trained(identity=identity.digest))
    said = "continues from its own step 60 (continue_from: itself): training.train_iters: 60 → 90"
    assert outlook(folder) == said
    assert (
        outlook(run(steps=90, lr=2e-3, parent=parent)) == f"{said.replace(': tr', ': optimizer.lr: 0.001 → 0.002, tr')}"
    )
    trained_to(folder, 70)
    assert outlook(folder) == "resumes at step 70 of 90"


def test_checkpoints_in_another_store_are_named(run, tmp_path):
    trained_to(run(), 20)
    said = outlook(run(store="other"))
    assert said.startswith("trains again from step 0: its checkpoints are in ") and str(tmp_path / "other") in said
