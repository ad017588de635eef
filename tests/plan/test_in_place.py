"""A run that continues from its own checkpoint under its own name: which one, and what is kept of what it was."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import made
import pytest

from megaboa.commands import inspect
from megaboa.config import ConfigError
from megaboa.errors import InputError
from megaboa.files import link, write_json, write_text
from megaboa.paths import RunFolder
from megaboa.plan import Plan, in_place, restarts
from megaboa.plan.mismatches import obstacles
from megaboa.plan.shared import Shared
from megaboa.records import LM_LOSS, AttemptEnd, AttemptStart, Identity, Kept, TrainRecord, plain, read, write
from megaboa.run import checkpoints, ledger, supervisor
from megaboa.run.call import TrainingFailed
from megaboa.run.identity import identity_of, is_trained, store_of, stored
from megaboa.store_paths import RunStore

PlanOf = Callable[..., Plan]
ITSELF = "sweep: {runs: {base: {continue_from: itself}}}"


class Trainer:
    """Plans an experiment as a call does, and trains its run: a store with an identity and checkpoints."""

    def __init__(self, plan_of: PlanOf) -> None:
        self.plan_of = plan_of
        self.folder = RunFolder(Path("results/small/runs/base"))

    def plan(self, text: str = ITSELF, **given: object) -> Plan:
        return self.plan_of(text, **{"checkpoint.save_interval": 10, "training.train_iters": 20, **given})

    def call(self, text: str = ITSELF, **given: object) -> Plan:
        plan = self.plan(text, **given)
        in_place.keep(plan, Path("results"))
        plan.write("results")
        return plan

    def train(self, plan: Plan, *iterations: int) -> Identity:
        run = plan["base"]
        parent = run.folder("results", "small").parent_manifest
        identity = Identity(run=run.documents["run"], parent=read(TrainRecord, parent).identity if parent else None)
        store = store_of(run.folder("results", "small"), identity)
        write_json(store.identity, plain(identity))
        save(store, *iterations)
        return identity


def save(store: RunStore, *iterations: int) -> None:
    for iteration in iterations:
        folder = checkpoints.folder(store.checkpoints, iteration)
        folder.mkdir(parents=True)
        (folder / checkpoints.LAST_WRITTEN).write_text("checkpoint: {ckpt_format: torch_dist}\n")
    checkpoints.mark_complete(store.checkpoints)


@pytest.fixture
def trainer(plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.chdir(tmp_path)
    return Trainer(plan_of)


def parent_of(plan: Plan) -> tuple[str, int, str | None]:
    parent = plan["base"].run.parent
    return str(parent), parent.iteration, parent.identity


FROM_THE_START = "sweep: {runs: {base: {}}}"


def test_more_steps_go_on_from_the_last_checkpoint_and_the_same_plan_stays(trainer: Trainer) -> None:
    first = trainer.train(trainer.call(FROM_THE_START), 10, 20)
    longer = trainer.call(**{"training.train_iters": 40})
    assert parent_of(longer) == ("small/base@20", 20, first.digest)
    assert longer["base"].row["parent"] == "small/base@20"
    assert parent_of(trainer.call(**{"training.train_iters": 40})) == parent_of(longer)
    trainer.train(longer, 30)
    assert parent_of(trainer.call(**{"training.train_iters": 40})) == parent_of(longer)


@pytest.mark.parametrize("evaluated", [True, False])
def test_the_best_checkpoint_may_be_one_of_the_steps_before(trainer: Trainer, evaluated: bool) -> None:
    best = "export: {runs: all, checkpoint: best}\n"
    trainer.train(trainer.call(best + FROM_THE_START), 10, 20)
    [(store, _)] = stored(trainer.folder)
    if evaluated:
        lines = ({"event": "step", "step": 1}, {"event": "eval", "step": 20, "losses": {LM_LOSS: 2.0}})
        write_text(store.path / "attempts/01/steps.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    longer = {"training.train_iters": 40, "checkpoint.save_interval": 40}
    if not evaluated:
        assert [text for text in trainer.plan(best + ITSELF, **longer).warnings if "best is" in text]
        with pytest.raises(ConfigError, match=r"export\.checkpoint: is `best`, and the run has no validation loss"):
            trainer.plan(best + ITSELF, **{**longer, "training.eval_iters": 0})
        return
    assert trainer.plan(best + ITSELF, **{**longer, "training.eval_iters": 0}).exports == ["base"]
    assert not [text for text in trainer.plan(best + ITSELF, **longer).warnings if "best is" in text]


def test_what_it_was_is_kept_next_to_it(trainer: Trainer) -> None:
    first = trainer.train(trainer.call(FROM_THE_START), 10, 20)
    trainer.call(**{"training.train_iters": 40})
    earlier = RunFolder(trainer.folder.path).parent_folder
    train = read(TrainRecord, earlier.train_manifest)
    assert (train.identity, train.iteration, train.train_iters) == (first.digest, 20, 20)
    assert [kept.iteration for kept in train.checkpoints] == [10, 20] and RunStore(Path(train.store)).identity.exists()
    assert (earlier.name, earlier.experiment) == ("base", "small")
    assert earlier.run.training["train_iters"] == 20 and trainer.folder.run.training["train_iters"] == 40
    assert trainer.folder.parent_manifest == earlier.train_manifest


def test_further_steps_go_on_from_where_those_ended(trainer: Trainer) -> None:
    trainer.train(trainer.call(FROM_THE_START), 20)
    second = trainer.train(trainer.call(**{"training.train_iters": 40}), 30, 40)
    third = trainer.call(**{"training.train_iters": 60})
    assert parent_of(third) == ("small/base@40", 40, second.digest)
    now = RunFolder(trainer.folder.path)
    assert now.parent_folder.parent_folder.run.training["train_iters"] == 20


def test_a_plan_that_was_changed_before_it_trained_goes_on_from_the_same_checkpoint(trainer: Trainer) -> None:
    first = trainer.train(trainer.call(FROM_THE_START), 20)
    trainer.call(**{"training.train_iters": 40})
    assert parent_of(trainer.call(**{"training.train_iters": 50})) == ("small/base@20", 20, first.digest)


def test_a_call_that_ended_before_it_trained_with_other_settings_can_be_followed_by_the_key(trainer: Trainer) -> None:
    trainer.train(trainer.call(FROM_THE_START), 20)
    ((store, identity),) = stored(trainer.folder)
    store.ledger.touch()
    link(store.ledger, trainer.folder.attempts_link)
    trainer.call(FROM_THE_START, **{"optimizer.lr": 1e-2})
    plan = trainer.plan(**{"optimizer.lr": 1e-2, "training.train_iters": 40})
    assert parent_of(plan) == ("small/base@20", 20, identity.digest)
    with pytest.raises(ConfigError, match="20 is the step at which the run ends"):
        trainer.plan(**{"optimizer.lr": 1e-2})


def test_unfinished_work_goes_on_in_another_layout(trainer: Trainer) -> None:
    first = trainer.train(trainer.call(FROM_THE_START, **{"training.train_iters": 40}), 10)
    given = {"training.train_iters": 40, "parallel.tp": 2, "resources.gpus_per_node": 2}
    with pytest.raises(restarts.UnfinishedWorkError, match="continue_from: itself"):
        restarts.check(trainer.plan(FROM_THE_START, **given), "results", [])
    plan = trainer.plan(**given)
    assert parent_of(plan) == ("small/base@10", 10, first.digest)
    assert restarts.check(plan, "results", []) == []


def test_a_step_may_be_named(trainer: Trainer) -> None:
    trainer.train(trainer.call(FROM_THE_START), 10, 20)
    plan = trainer.plan("sweep: {runs: {base: {continue_from: itself@10}}}", **{"optimizer.lr": 1e-3})
    assert parent_of(plan)[:2] == ("small/base@10", 10)
    with pytest.raises(ConfigError, match="keeps no checkpoint of step 15, but of 10, 20"):
        trainer.plan("sweep: {runs: {base: {continue_from: itself@15}}}")


@pytest.fixture
def extended(trainer: Trainer) -> tuple[Identity, Identity]:
    """Two versions of the run: to step 20, and to step 40. The first one has a checkpoint from after the boundary."""
    first = trainer.train(trainer.call(FROM_THE_START), 10, 20)
    second = trainer.train(trainer.call(**{"training.train_iters": 40}), 30, 40)
    ((store, _),) = [one for one in stored(trainer.folder) if one[1] == first]
    save(store, 25)
    return first, second


def test_a_step_of_an_earlier_version_may_be_named(trainer: Trainer, extended: tuple[Identity, Identity]) -> None:
    first, second = extended
    back = "sweep: {runs: {base: {continue_from: itself@10}}}"
    for given in ({"training.train_iters": 40}, {"training.train_iters": 40, "optimizer.lr": 1e-2}):
        assert parent_of(trainer.plan(back, **given)) == ("small/base@10", 10, first.digest)
    with pytest.raises(ConfigError, match="keeps no checkpoint of step 25, but of 10, 20, 30, 40"):
        trainer.plan(back.replace("10", "25"), **{"training.train_iters": 60})
    within = trainer.plan(back.replace("10", "30"), **{"training.train_iters": 40})
    assert parent_of(within) == ("small/base@30", 30, second.digest)
    plan = trainer.call(back, **{"training.train_iters": 60})
    assert read(TrainRecord, trainer.folder.parent_manifest).identity == first.digest
    third = trainer.train(plan, 50)
    assert parent_of(trainer.plan(back, **{"training.train_iters": 60})) == parent_of(plan)
    with pytest.raises(ConfigError, match="keeps no checkpoint of step 30, but of 10, 50"):
        trainer.plan(back.replace("10", "30"), **{"training.train_iters": 60})
    assert parent_of(trainer.plan(**{"training.train_iters": 80})) == ("small/base@50", 50, third.digest)


def test_a_step_of_an_earlier_version_may_be_exported(trainer: Trainer, extended: tuple[Identity, Identity]) -> None:
    def plan(step: int, iterations: int) -> Plan:
        return trainer.plan(
            f"{ITSELF}\nexport: {{runs: all, checkpoint: {step}}}", **{"training.train_iters": iterations}
        )

    for iterations in (40, 60):  # trained, and to be trained
        for step in (10, 20, 30, 40):
            assert plan(step, iterations)["base"].run.training["train_iters"] == iterations
        with pytest.raises(ConfigError, match="no checkpoint of step 25 is kept, the nearest is of 20 and 30"):
            plan(25, iterations)


def test_another_run_may_continue_from_an_earlier_version(
    trainer: Trainer, extended: tuple[Identity, Identity]
) -> None:
    first, _ = extended
    both = "sweep: {runs: {base: {continue_from: itself}, other: {continue_from: small/base@10}}}"
    plan = trainer.call(both, **{"training.train_iters": 40})
    other = plan["other"]
    assert (str(other.run.parent), other.run.parent.identity) == ("small/base@10", first.digest)
    manifest = other.folder("results", "small").parent_manifest
    assert read(TrainRecord, manifest).identity == first.digest
    assert not [path for path in Shared(plan).run_inputs(other) if "runs/base" in path]
    with pytest.raises(ConfigError, match="keeps no checkpoint of step 25, but of 10, 20, 30, 40"):
        trainer.plan(both.replace("@10", "@25"), **{"training.train_iters": 40})


TRUNK = "{training.train_iters: 20}"
EXTENDED = "{continue_from: itself, training.train_iters: %d}"
EARLY, LATE = (
    f"branch{step}: {{continue_from: small/base@{step}, training.train_iters: {step + 5}}}" for step in (10, 30)
)
BEYOND = "beyond: {continue_from: small/branch10@15, training.train_iters: 18}"
NEW = "new: {continue_from: small/base@10, training.train_iters: 20}"


class Family:
    """A trunk, `base`, and branches of its checkpoints, planned and trained as calls do."""

    def __init__(self, plan_of: PlanOf) -> None:
        self.plan_of = plan_of

    def call(self, base: str, *branches: str) -> Plan:
        runs = f"sweep: {{runs: {{base: {base}, {', '.join(branches)}}}}}"
        plan = self.plan_of(runs, **{"checkpoint.save_interval": 5})
        in_place.keep(plan, Path("results"))
        plan.write("results")
        return plan

    def train(self, plan: Plan, name: str, *iterations: int, outcome: str = "completed") -> Identity:
        folder = RunFolder(plan[name].folder("results", "small").path)
        for manifest in (folder.model_manifest, *folder.corpus_manifests.values()):
            write_json(manifest, {"digest": "d"})
        identity = identity_of(folder)
        store = store_of(folder, identity)
        if not store.identity.exists():
            write_json(store.identity, plain(identity))
            save(store, *iterations)
            ledger.append(store.ledger, AttemptStart(attempt=1))
            ledger.append(store.ledger, AttemptEnd(attempt=1, outcome=outcome, iteration=iterations[-1]))
            store.attempt(1).path.mkdir(parents=True)
        link(store.ledger, folder.attempts_link)
        if outcome == "completed":
            write(folder.train_manifest, made.trained(identity=identity.digest, store=str(store.path)))
        return identity

    def trained(self, plan: Plan) -> list[str]:
        return [run.name for run in plan.runs if is_trained(run.folder("results", "small"))]

    def outlook(self, plan: Plan) -> list[str]:
        return restarts.outlooks(plan, "results", [run.name for run in plan.runs])


@pytest.fixture
def family(plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    """The trunk and a branch of its step 10, and of that one another."""
    monkeypatch.chdir(tmp_path)
    found = Family(plan_of)
    plan = found.call(TRUNK, EARLY, BEYOND)
    for name, steps in (("base", (10, 20)), ("branch10", (15,)), ("beyond", (18,))):
        found.train(plan, name, *steps)
    assert found.trained(plan) == ["base", "branch10", "beyond"]
    return found


def test_branches_stay_while_their_trunk_is_extended(family: Family) -> None:
    longer = family.call(EXTENDED % 40, EARLY, BEYOND, LATE)
    assert family.trained(longer) == ["branch10", "beyond"]
    base, early, beyond = family.outlook(longer)
    assert base.startswith("base continues from its own step 20")
    assert early == "branch10 has all its steps (15): nothing is trained again"
    assert beyond == "beyond has all its steps (18): nothing is trained again"
    second = family.train(longer, "base", 30, 40)
    assert family.train(longer, "branch30", 35).parent == second.digest, "what it learned from is the extension, too"
    again = family.call(EXTENDED % 60, EARLY, BEYOND, LATE)
    assert again["branch30"].run.parent.identity == second.digest
    assert family.trained(again) == ["branch10", "beyond", "branch30"]


def test_branches_stay_where_an_extension_is_undone(family: Family) -> None:
    longer = family.call(EXTENDED % 40, EARLY, BEYOND)
    family.train(longer, "base", 30, 40)
    fresh = family.train(family.call(EXTENDED % 40, EARLY, BEYOND, NEW), "new", 20)
    undone = family.call(TRUNK, EARLY, BEYOND, NEW)
    finished = {"base": 20, "branch10": 15, "beyond": 18, "new": 20}
    assert family.outlook(undone) == [
        f"{name} has all its steps ({step}): nothing is trained again" for name, step in finished.items()
    ]
    family.train(undone, "base", 20)
    assert family.trained(undone) == list(finished)
    assert fresh.run["parent"]["identity"] and fresh == identity_of(undone["new"].folder("results", "small"))


def test_unfinished_branches_resume_where_their_trunk_is_extended_or_that_is_undone(family: Family) -> None:
    family.train(family.call(TRUNK, NEW), "new", 15, outcome="interrupted")
    longer = family.call(EXTENDED % 40, NEW)
    assert restarts.check(longer, "results", []) == []
    assert family.outlook(longer)[1] == "new resumes at step 15 of 20"
    family.train(longer, "base", 30, 40)
    undone = family.call(TRUNK, NEW)
    assert restarts.check(undone, "results", []) == []
    assert family.outlook(undone)[1] == "new resumes at step 15 of 20"


def test_branches_are_trained_again_with_another_trunk(family: Family) -> None:
    """Also if it is continued in place from an earlier step than theirs, or has as many steps."""
    other = family.call("{training.train_iters: 20, optimizer.lr: 5.0e-4}", EARLY)
    assert family.outlook(other)[1] == "branch10 trains again after base, which it continues from"
    family.train(other, "base", 10, 20)
    assert family.trained(other) == ["base"]
    longer = family.call(EXTENDED.replace("}", ", optimizer.lr: 5.0e-4}") % 40, EARLY)
    assert family.trained(longer) == [], "the branch's step is of the trunk with the other rate"
    said = family.outlook(longer)[1]
    assert said.startswith("branch10 trains again from small/base@10: parent: ") and "(its content)" in said
    replaced = family.call("{continue_from: itself@10, training.train_iters: 40, optimizer.lr: 1.0e-4}", EARLY, LATE)
    family.train(replaced, "base", 20, 30, 40)
    late = family.train(replaced, "branch30", 35)
    assert late.parent and family.trained(replaced) == ["base", "branch30"]


def test_a_run_of_another_experiment_may_continue_from_an_earlier_version(
    trainer: Trainer, extended: tuple[Identity, Identity]
) -> None:
    first, second = extended
    (store,) = [store for store, identity in stored(trainer.folder) if identity == second]
    write(trainer.folder.train_manifest, made.trained(identity=second.digest, store=str(store.path)))
    mine = "experiment: mine\nsweep: {runs: {base: {continue_from: small/base@%s}}}"
    assert parent_of(trainer.plan(mine % 10, **{"training.train_iters": 50})) == ("small/base@10", 10, first.digest)
    assert parent_of(trainer.plan(mine % 40, **{"training.train_iters": 50})) == ("small/base@40", 40, None)
    with pytest.raises(ConfigError, match="keeps no checkpoint of step 25, but of 10, 20, 30, 40"):
        trainer.plan(mine % 25, **{"training.train_iters": 50})


def test_inspect_finds_checkpoints_of_earlier_versions(trainer: Trainer, extended: tuple[Identity, Identity]) -> None:
    stores = {identity.digest: store for store, identity in stored(trainer.folder)}
    first, second = (stores[one.digest] for one in extended)
    second.ledger.touch()
    link(second.ledger, trainer.folder.attempts_link)
    assert inspect.folder_of("small/base@10").resolve() == checkpoints.folder(first.checkpoints, 10).resolve()
    assert inspect.folder_of("small/base").resolve() == checkpoints.folder(second.checkpoints, 40).resolve()
    with pytest.raises(InputError, match="no complete checkpoint of step 25; it has 10, 20, 30, 40"):
        inspect.folder_of("small/base@25")


def test_its_job_waits_for_no_file_of_its_own(trainer: Trainer) -> None:
    trainer.train(trainer.call(FROM_THE_START), 20)
    plan = trainer.plan(**{"training.train_iters": 40})
    assert not [path for path in Shared(plan).run_inputs(plan["base"]) if "runs/base" in path]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"training.train_iters": 20, "optimizer.lr": 1e-2},
            "training.train_iters: 20 is the step at which the run ends, and it begins after",
        ),
        ({"training.train_iters": 40, "training.global_batch_size": 1, "training.micro_batch_size": 1}, "is less than"),
    ],
)
def test_what_can_not_go_on_is_said_with_its_key(trainer: Trainer, given: dict, said: str) -> None:
    trainer.train(trainer.call(FROM_THE_START), 20)
    with pytest.raises(ConfigError, match=said):
        trainer.plan(**given)


def test_a_run_may_end_at_a_step_that_it_has_trained_from_a_checkpoint_before(trainer: Trainer) -> None:
    for step in (10, 20):
        trainer.train(trainer.call(FROM_THE_START), step)
    with pytest.raises(ConfigError, match=r"raise it, or continue from an earlier checkpoint \(@10\)"):
        trainer.plan(**{"training.train_iters": 20, "optimizer.lr": 1e-2})
    earlier = trainer.plan(ITSELF.replace("itself", "itself@10"), **{"training.train_iters": 20, "optimizer.lr": 1e-2})
    assert earlier["base"].run.parent.iteration == 10
    with pytest.raises(ConfigError, match=r"begins after step 20 of small/base: raise it \(run base\)"):
        trainer.plan(**{"training.train_iters": 5})


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"training.train_iters": 40}, []),
        ({"training.train_iters": 20}, ["training.train_iters"]),
        ({"training.train_iters": 20, "optimizer.lr": 1.0}, ["training.train_iters"]),
        (
            {"training.train_iters": 20, "models.dense.config.hidden_size": 512},
            ["continue_from", "training.train_iters"],
        ),
    ],
)
def test_what_stands_against_continuing(trainer: Trainer, given: dict, keys: list[str]) -> None:
    given = {"schedule.decay": "constant", **given}
    trainer.train(trainer.call(FROM_THE_START, **{"schedule.decay": "constant"}), 20)
    ((store, _),) = stored(trainer.folder)
    assert obstacles(trainer.plan(FROM_THE_START, **given)["base"], store, 20) == keys


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"training.train_iters": 40}, []),
        ({"training.train_iters": 20, "optimizer.lr": 1.0}, ["training.train_iters", "schedule.decay"]),
    ],
)
def test_a_rate_that_has_decayed_stands_against_it_where_the_run_becomes_no_longer(
    trainer: Trainer, given: dict, keys: list[str]
) -> None:
    trainer.train(trainer.call(FROM_THE_START), 20)
    ((store, _),) = stored(trainer.folder)
    assert obstacles(trainer.plan(FROM_THE_START, **given)["base"], store, 20) == keys


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({"training.train_iters": 40}, True),
        ({"training.train_iters": 40, "schedule.decay": "constant"}, False),
        ({"training.train_iters": 40, "schedule.decay_iters": 40}, False),
        ({"training.train_iters": 40, "load.optimizer": False}, False),
    ],
)
def test_a_rate_that_had_decayed_and_rises_again_is_said(trainer: Trainer, given: dict, warned: bool) -> None:
    trainer.train(trainer.call(FROM_THE_START), 10, 20)
    said = "the learning rate had decayed to its end by step 20, and rises again, as the schedule now ends at step 40"
    assert [runs for text, runs in trainer.plan(**given).warnings.items() if said in text] == [["base"]] * warned
    earlier = trainer.plan("sweep: {runs: {base: {continue_from: itself@10}}}", **given)
    assert not [text for text in earlier.warnings if "rises again" in text]


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, []),
        ({"training.seed": 7}, ["training.seed was 1234, and is 7: the data is shuffled otherwise, so some texts"]),
        ({"training.seq_length": 64}, ["training.seq_length was 128, and is 64: .* at another position"]),
        (
            {"data.split": "90,5,5"},
            ["data.split was .*, and is 90,5,5: documents that were trained on may be validated"],
        ),
        (
            {"corpora.more": {"source": "python-stdlib"}, "data.blend": {"text": 1, "more": 3}},
            ["data.blend was text, and is text:1,more:3: "],
        ),
        ({"data.blend": {"text": 3}}, []),  # in another unit
    ],
)
def test_what_changes_the_data_is_said(trainer: Trainer, given: dict, warned: list[str]) -> None:
    trainer.train(trainer.call(FROM_THE_START), 20)
    plan = trainer.plan(**{"training.train_iters": 40, "schedule.decay_iters": 40, **given})
    said = [text for text in plan.warnings if text.startswith("continue_from: ")]
    assert len(said) == len(warned), said
    assert all(re.match(f"continue_from: {pattern}", text) for pattern, text in zip(warned, said, strict=True)), said


def test_a_finished_run_has_no_warnings_of_what_it_continued(trainer: Trainer) -> None:
    trainer.train(trainer.call(FROM_THE_START), 20)
    given = {"training.train_iters": 40, "training.seed": 7}
    assert len([text for text in trainer.plan(**given).warnings if text.startswith("continue_from: ")]) == 2
    second = trainer.train(trainer.call(**given), 40)
    write(trainer.folder.train_manifest, made.trained(identity=second.digest))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megaboa.run.identity.identity_of", lambda folder: second)
        assert not [text for text in trainer.plan(**given).warnings if text.startswith("continue_from: ")]


# runs that are new in the experiment


def test_a_new_run_begins_at_step_0_and_stays_as_it_is(trainer: Trainer) -> None:
    plan = trainer.call()
    assert plan["base"].run.parent is None
    assert trainer.plan()["base"].run.parent is None, "planned, and not begun"
    trainer.train(plan)
    assert trainer.plan()["base"].run.parent is None, "begun, and nothing saved"
    ((store, _),) = stored(trainer.folder)
    save(store, 10)
    assert trainer.plan()["base"].run == plan["base"].run, "interrupted: it resumes"
    save(store, 20)
    assert trainer.plan()["base"].run == plan["base"].run, "finished"
    assert parent_of(trainer.plan(**{"training.train_iters": 40}))[1] == 20


def test_an_experiment_that_was_continued_gets_one_more_run(trainer: Trainer) -> None:
    grid = "continue_from: itself\nsweep: {grid: {optimizer.lr: {base: {optimizer.lr: 1e-3}}}}"
    trainer.train(trainer.call(grid), 10, 20)
    longer = {"training.train_iters": 40}
    trainer.train(trainer.call(grid, **longer), 40)
    more = grid.replace("}}}", "}, more: {optimizer.lr: 1e-2}}}")
    plan = trainer.call(more, **longer)
    assert [str(run.run.parent) for run in plan.runs] == ["small/base@20", "None"]


def test_a_run_that_has_lost_its_checkpoint_does_not_begin_again(trainer: Trainer) -> None:
    plan = trainer.call()
    trainer.train(plan, 20)
    ((store, _),) = stored(trainer.folder)
    link(store.ledger, trainer.folder.attempts_link)
    store.ledger.touch()
    ledger.append(store.ledger, AttemptEnd(attempt=1, outcome="completed", iteration=20))
    said = "continue_from: small/base has been trained, and store/runs/small/base has no checkpoint of the settings in"
    shutil.rmtree(store.checkpoints)
    with pytest.raises(ConfigError, match=said):
        trainer.plan()
    shutil.rmtree(store.path)
    with pytest.raises(ConfigError, match=said):
        trainer.plan()
    for own in ("runs: {base: {continue_from: null}}", "grid: {any: {base: {continue_from: null}}}"):
        assert trainer.plan(f"continue_from: itself\nsweep: {{{own}}}")["base"].run.parent is None


def test_a_run_that_saves_nothing_stays_as_it_is(trainer: Trainer) -> None:
    trainer.train(trainer.call())
    write(trainer.folder.train_manifest, made.trained(checkpoints=()))
    assert trainer.plan()["base"].run.parent is None
    write(trainer.folder.train_manifest, made.trained(checkpoints=(Kept(iteration=20, bytes=1),)))
    with pytest.raises(ConfigError, match="has been trained"):
        trainer.plan()


def test_a_longer_run_that_saved_nothing_does_not_begin_again(trainer: Trainer) -> None:
    trainer.train(trainer.call())
    write(trainer.folder.train_manifest, made.trained(checkpoints=()))
    with pytest.raises(ConfigError, match="has been trained without saving a checkpoint: set continue_from: null"):
        trainer.plan(**{"training.train_iters": 40})
    assert trainer.plan()["base"].run.parent is None


def test_lost_results_do_not_make_a_run_new(trainer: Trainer) -> None:
    trainer.train(trainer.call(), 20)
    shutil.rmtree(trainer.folder.path)
    said = "has been trained, and its results are gone .*: call once without this key and with the settings that it had"
    with pytest.raises(ConfigError, match=said):
        trainer.plan()


def test_other_content_makes_another_run(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trainer.train(trainer.call(), 10)
    monkeypatch.setattr("megaboa.run.unfinished.identity_of", lambda folder: replace(first, corpora={"text": "new"}))
    assert parent_of(trainer.plan())[1] == 10


def with_corpus(identity: Identity, digest: str) -> Callable[[RunFolder], Identity]:
    """identity_of, as if a corpus had another content by now."""
    return lambda folder: replace(identity, run=folder.document("run"), corpora={"text": digest})


def test_other_content_of_a_run_that_continues_leaves_none_of_its_steps(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its settings and its parent stay the same."""
    trainer.train(trainer.call(FROM_THE_START), 20)
    given = {"training.train_iters": 40}
    plan = trainer.call(**given)
    second = trainer.train(plan, 30)
    monkeypatch.setattr("megaboa.run.unfinished.identity_of", with_corpus(second, "new"))
    monkeypatch.setattr("megaboa.run.supervisor.identity_of", with_corpus(second, "new"))
    with pytest.raises(TrainingFailed, match=r"would start at small/base@20, .* call again, and .* from step 30"):
        supervisor.train(plan["base"].folder("results", "small"))
    assert parent_of(trainer.plan(**given)) == ("small/base@30", 30, second.digest)
    named = trainer.plan("sweep: {runs: {base: {continue_from: itself@20}}}", **given)
    with pytest.raises(
        restarts.UnfinishedWorkError, match=r"would start at small/base@20, and .* has its step 30 of 40"
    ):
        restarts.check(named, "results", [])


def test_a_finished_run_whose_content_is_another_is_planned_as_it_was_and_refused_by_its_job(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no call could make its data again from the file as it was."""
    first = trainer.train(trainer.call(), 20)
    monkeypatch.setattr("megaboa.run.unfinished.identity_of", with_corpus(first, "new"))
    monkeypatch.setattr("megaboa.run.supervisor.identity_of", with_corpus(first, "new"))
    assert trainer.plan()["base"].run.parent is None
    with pytest.raises(TrainingFailed, match=r"has all its 20 steps: .* \(training.train_iters above 20\)"):
        supervisor.train(trainer.plan()["base"].folder("results", "small"))
    longer = trainer.call(**{"training.train_iters": 40})
    second = trainer.train(longer, 40)
    monkeypatch.setattr("megaboa.run.unfinished.identity_of", with_corpus(second, "newer"))
    assert parent_of(trainer.plan(**{"training.train_iters": 40})) == parent_of(longer)


def test_a_named_step_does_not_leave_what_was_trained_from_it(trainer: Trainer) -> None:
    named = "sweep: {runs: {base: {continue_from: itself@10}}}"
    trainer.train(trainer.call(FROM_THE_START), 10, 20)
    trainer.train(trainer.call(named, **{"training.train_iters": 60}), 30)
    again = trainer.plan(named, **{"training.train_iters": 60, "optimizer.lr": 1e-2})
    assert parent_of(again)[1] == 10
    with pytest.raises(restarts.UnfinishedWorkError, match="has its step 30 of 60"):
        restarts.check(again, "results", [])


def test_a_step_of_a_new_run_is_refused(trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="small/base has not been trained, so it has no step 10: remove @10"):
        trainer.plan("sweep: {runs: {base: {continue_from: itself@10}}}")
