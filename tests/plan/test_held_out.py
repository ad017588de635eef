"""megaboa.plan.held_out: what a run validates on of corpora that its parents trained on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import made
import pytest
from test_parents import saved

from megaboa.config import ConfigError
from megaboa.files import link, read_json, write_json
from megaboa.paths import RunFolder
from megaboa.plan import Plan, in_place, specifications
from megaboa.plan.held_out import Ancestor, Lineage, Texts, held_out
from megaboa.plan.parents import _split_of_recipe
from megaboa.plan.shared import Shared
from megaboa.records import Identity, Kept, Preflight, RunCheck, RunSpec, TrainRecord, plain, read, read_if_there, write
from megaboa.run.identity import store_of
from megaboa.store_paths import RunStore

PlanOf = Callable[..., Plan]
TEXTS = {f"corpora.{name}": {"source": f"{name}.jsonl"} for name in ("en", "eo", "yo")}
BASE = "training: {train_iters: 100}\ncheckpoint: {save_interval: 10}\nschedule: {decay: constant}\n"
BOTH = "data.blend: {en: 1, eo: 1}, data.split: '90,10,0', data.validation_sets: {eo: eo}"
LEFT = "data.blend: en, data.split: '90,10,0', data.validation_sets: {eo: eo}"
TOO_GOOD = "documents that were trained on may be validated on, so losses may look too good"


@pytest.fixture
def plans(plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanOf:
    monkeypatch.chdir(tmp_path)
    for name in ("en", "eo", "yo", "other"):
        Path(f"{name}.jsonl").touch()
    return lambda runs, **given: plan_of(f"{BASE}sweep: {{runs: {{{runs}}}}}", **{**TEXTS, **given})


def call(plan: Plan) -> Plan:
    """Write a plan as a call does."""
    in_place.keep(plan, Path("results"))
    plan.write("results")
    specifications.write(Shared(plan))
    return plan


def train(plan: Plan, name: str, *steps: int, corpora: dict[str, str] | None = None) -> Identity:
    """Train a run of this plan: a store with an identity, and checkpoints."""
    folder = plan[name].folder("results", plan.name)
    parent = folder.parent_manifest
    before = read(TrainRecord, parent).identity if parent else None
    identity = Identity(run=plan[name].documents["run"], parent=before, corpora=corpora or {})
    store = store_of(folder, identity)
    write_json(store.identity, plain(identity))
    saved(store.checkpoints, *steps)
    store.ledger.touch()
    link(store.ledger, folder.attempts_link)
    kept = tuple(Kept(iteration=step, bytes=1) for step in steps)
    record = made.trained(
        identity=identity.digest,
        store=str(store.path),
        iteration=max(steps),
        checkpoints=kept,
        parent=plan[name].run.parent,
    )
    write(folder.train_manifest, record)
    return identity


def problem(plans: PlanOf, runs: str, **given: object) -> str:
    with pytest.raises(ConfigError) as error:
        plans(runs, **given)
    return str(error.value)


def of_held_out(plan: Plan) -> list[str]:
    """What a plan warns of, without the difference between parents and their children."""
    return [text for text in plan.warnings if "has other documents in other runs" not in text]


def test_a_corpus_that_leaves_the_blend_keeps_the_share_that_its_parent_held_out(plans: PlanOf) -> None:
    plan = plans(f"base: {{{BOTH}}}, child: {{continue_from: small/base@50, {LEFT}}}, other: {{{LEFT}}}")
    child = plan["child"].run
    assert child.held_out == {"eo": "90,10,0"} and child.data["validation_sets"] == {"eo": {"eo": 1.0}}
    assert plan["other"].run.held_out == {}, "without that parent it is a corpus like any other"
    assert not of_held_out(plan)
    unseen = plans(f"base: {{{BOTH}}}, child: {{continue_from: small/base@50, {LEFT.replace('eo: eo', 'yo: yo')}}}")
    assert "held_out" not in plain(unseen["child"].run.parent), (
        "nothing that it reads has changed, nor has its identity"
    )


def test_the_index_of_a_share_is_not_that_of_the_whole(plans: PlanOf) -> None:
    plan = plans(
        f"base: {{{BOTH}}}, yo: {{data.blend: yo}}, a: {{continue_from: small/base@50, {LEFT}}},"
        f"b: {{continue_from: small/yo@50, {LEFT}}}"
    )
    assert plan["a"].run.steps_before == plan["b"].run.steps_before
    assert plan["a"].launch.index != plan["b"].launch.index


def test_it_is_kept_by_all_that_continue_from_it(plans: PlanOf) -> None:
    plan = plans(
        f"base: {{{BOTH}}}, child: {{continue_from: small/base@50, data.blend: en}},"
        f"last: {{continue_from: small/child@70, {LEFT}}}"
    )
    assert plan["child"].run.held_out == {} and plan["last"].run.held_out == {"eo": "90,10,0"}


def test_of_several_parents_the_one_that_trained_on_most_decides(plans: PlanOf) -> None:
    runs = "base: {SAME}, child: {continue_from: small/base@50, SAME, data.split: '80,10,10'}, " + (
        f"last: {{continue_from: small/child@70, {LEFT}}}"
    )
    plan = plans(runs.replace("SAME", "data.blend: eo, data.split: '90,10,0'", 1).replace("SAME", "data.blend: eo"))
    assert plan["last"].run.held_out == {"eo": "90,10,0"}


def test_a_run_of_another_experiment_is_known_by_its_specifications(plans: PlanOf) -> None:
    train(call(plans(f"base: {{{BOTH}}}", experiment="old")), "base", 50)
    assert plans(f"child: {{continue_from: old/base@50, {LEFT}}}")["child"].run.held_out == {"eo": "90,10,0"}
    renamed = {"corpora.esperanto": {"source": "eo.jsonl"}}
    of_name = LEFT.replace("eo: eo", "eo: esperanto")
    assert plans(f"child: {{continue_from: old/base@50, {of_name}}}", **renamed)["child"].run.held_out == {
        "esperanto": "90,10,0"
    }
    others = {"corpora.eo": {"source": "other.jsonl"}}
    assert plans(f"child: {{continue_from: old/base@50, {LEFT}}}", **others)["child"].run.held_out == {}
    fewer = {"corpora.eo": {"source": "eo.jsonl", "limit": 5}}
    said = problem(plans, f"child: {{continue_from: old/base@50, {LEFT}}}", **fewer)
    assert "data.validation_sets.eo" in said
    assert "names 'eo', which has a source of 'eo', and old/base@50 trained on that: name another corpus" in said
    Path("results/old/specs/corpora/eo.json").unlink()
    plan = plans(f"child: {{continue_from: old/base@50, {LEFT}}}")
    assert of_held_out(plan) == [f"continue_from: it isn't known which texts old/base@50 trained on: {TOO_GOOD}"]


@pytest.mark.parametrize(
    ("base", "child", "key", "said"),
    [
        (
            "data.blend_per_split.train: {en: 1, eo: 1}, data.blend_per_split.valid: yo",
            LEFT,
            "data.validation_sets.eo",
            "names 'eo', which small/base@50 trained on in whole: name another corpus",
        ),
        (
            BOTH,
            "data.blend_per_split.train: en, data.blend_per_split.valid: eo",
            "data.blend_per_split.valid",
            "names 'eo', which small/base@50 trained on, and reads all of it: name another corpus here, and this one "
            "in data.validation_sets",
        ),
        (
            BOTH,
            "data.blend_per_split.train: en, data.blend_per_split.valid: yo, data.blend_per_split.test: eo",
            "data.blend_per_split.test",
            "reads all of",
        ),
        (
            "data.blend: eo, data.split: '90,0,10', training.eval_interval: null",
            LEFT,
            "data.validation_sets.eo",
            "names 'eo', of which small/base@50 held out nothing for validation (data.split: 90,0,10): name another",
        ),
        (
            BOTH,
            LEFT.replace("eo: eo", "all: {eo: 1, yo: 1}"),
            "data.validation_sets.all",
            "mixes 'eo' (what a parent held out of it by 90,10,0) with 'yo' (all of it): make two sets of them",
        ),
    ],
)
def test_what_no_parent_held_out_is_refused(plans: PlanOf, base: str, child: str, key: str, said: str) -> None:
    found = problem(plans, f"base: {{{base}}}, child: {{continue_from: small/base@50, {child}}}")
    assert key in found and said in found


@pytest.mark.parametrize(
    ("base", "child", "said"),
    [
        (
            BOTH,
            "data.blend: eo, data.split: '80,20,0'",
            f"data.split was 90,10,0 in small/base@50, and is 80,20,0: {TOO_GOOD}",
        ),
        (BOTH, "data.blend: eo, data.split: '95,5,0'", None),
        (BOTH, "data.blend: eo, data.split: '100,0,0', training.eval_interval: null", None),
        (BOTH, "data.blend: yo, data.split: '80,20,0'", None),
        (
            "data.blend_per_split.train: eo, data.blend_per_split.valid: yo",
            "data.blend: eo",
            f"small/base@50 trained on 'eo' in whole: {TOO_GOOD}",
        ),
        (BOTH, "data.blend: again", f"small/base@50 trained on 'eo', which has a source of 'again': {TOO_GOOD}"),
    ],
)
def test_a_split_that_holds_out_what_a_parent_trained_on_is_said(
    plans: PlanOf, base: str, child: str, said: str | None
) -> None:
    again = {"corpora.again": {"source": "eo.jsonl", "deduplicate": True}}
    plan = plans(f"base: {{{base}}}, child: {{continue_from: small/base@50, {child}}}", **again)
    assert plan.warnings == ({f"continue_from: {said}": ["child"]} if said else {})


def test_of_a_parent_that_is_gone_only_what_was_recorded_is_known(plans: PlanOf) -> None:
    train(call(plans(f"base: {{{BOTH}}}", experiment="first")), "base", 50)
    second = call(
        plans("base: {continue_from: first/base@50, data.blend: en, data.split: '90,10,0'}", experiment="second")
    )
    train(second, "base", 70)
    runs = f"child: {{continue_from: second/base@70, {LEFT}}}"
    plan = call(plans(runs))
    assert plan["child"].run.held_out == {"eo": "90,10,0"}
    shutil.rmtree("results/first")
    later = plans(runs)
    assert later["child"].run == plan["child"].run, "it stays what it was"
    gone = f"continue_from: it isn't known which texts first/base@50, whose record is gone, trained on: {TOO_GOOD}"
    assert later.warnings == {gone: ["child"]}


def test_a_run_that_was_finished_before_this_was_known_stays_finished(
    plans: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(call(plans(f"base: {{{BOTH}}}", experiment="old")), "base", 50)
    runs = f"child: {{continue_from: old/base@50, {LEFT}}}"
    before = plans(f"child: {{continue_from: old/base@50, {LEFT.replace('eo: eo', 'yo: yo')}}}")["child"].run
    done = {"eo": {"eo": 1.0}}

    def is_trained(folder: RunFolder) -> bool:
        return folder.name == "child" and folder.run.held_out == {} and folder.run.data["validation_sets"] == done

    monkeypatch.setattr("megaboa.plan.parents.is_trained", is_trained)
    plan = plans(runs)
    assert plan["child"].run.parent == before.parent
    assert list(plan.warnings) == [
        "data.validation_sets: the run is finished, and was validated on all of 'eo', also on what its parents trained "
        "on (data.split: 90,10,0), so its losses look too good"
    ]


def is_trained(folder: RunFolder) -> bool:
    """Whether a run is trained as it is planned, if what it reads has the same content."""
    record = read_if_there(TrainRecord, folder.train_manifest)
    return record is not None and read(Identity, RunStore(Path(record.store)).identity).run == folder.document("run")


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.unlink(),
        lambda spec: write_json(spec, read_json(spec) | {"source": "other.jsonl"}),
        lambda spec: write_json(spec, read_json(spec) | {"limit": 5}),
        lambda spec: spec.write_text("{"),
    ],
)
def test_a_finished_run_stays_what_it_is_whatever_becomes_of_its_parents_experiment(
    plans: PlanOf, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    monkeypatch.setattr("megaboa.plan.parents.is_trained", is_trained)
    train(call(plans(f"base: {{{BOTH}}}", experiment="old")), "base", 50)
    runs = f"child: {{continue_from: old/base@50, {LEFT}}}"
    plan = call(plans(runs))
    assert plan["child"].run.held_out == {"eo": "90,10,0"}
    train(plan, "child", 100)
    change(Path("results/old/specs/corpora/eo.json"))
    later = plans(runs)
    assert later["child"].run == plan["child"].run
    assert not later.warnings, "it was validated on what its parent held out"
    call(plans(f"child: {{continue_from: old/base@50, {LEFT.replace('eo: eo', 'yo: yo')}}}"))
    assert plans(runs)["child"].run == plan["child"].run, "also after a plan with other settings"


def test_the_same_file_is_recognized_however_it_is_written(plans: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    Path("x").mkdir()
    train(call(plans(f"base: {{{BOTH}}}", experiment="old")), "base", 50)
    child = f"child: {{continue_from: old/base@50, {LEFT}}}"
    for source in ("./eo.jsonl", str(Path("eo.jsonl").resolve()), "~/eo.jsonl", ["x/../eo.jsonl"]):
        plan = plans(child, **{"corpora.eo": {"source": source}})
        assert plan["child"].run.held_out == {"eo": "90,10,0"}, source
        copy = {"corpora.eo": {"source": "eo.jsonl"}, "corpora.en": {"source": source}}
        said = problem(plans, f"child: {{continue_from: old/base@50, {LEFT}}}", **copy)
        assert "names 'eo', which has the source of 'en'" in said, source
    fewer = {"corpora.eo": {"source": "./eo.jsonl", "limit": 5}}
    assert "which has a source of 'eo', and old/base@50 trained on that" in problem(plans, child, **fewer)


def test_an_unfinished_run_stays_what_it_is_if_its_parents_texts_are_not_known_any_more(plans: PlanOf) -> None:
    train(call(plans(f"base: {{{BOTH}}}", experiment="old")), "base", 50)
    runs = f"child: {{continue_from: old/base@50, {LEFT}}}"
    plan = call(plans(runs))
    Path("results/old/specs/corpora/eo.json").unlink()
    later = plans(runs)
    assert later["child"].run == plan["child"].run
    assert of_held_out(later) == [f"continue_from: it isn't known which texts old/base@50 trained on: {TOO_GOOD}"]
    others = {"corpora.eo": {"source": "other.jsonl"}}
    assert plans(runs, **others)["child"].run.held_out == {}, "another corpus of this name"


def test_a_run_whose_parent_is_trained_again_is_not_finished(plans: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaboa.plan.parents.is_trained", is_trained)
    runs = f"base: {{{BOTH}}}, child: {{continue_from: small/base@50, {LEFT}}}"
    plan = call(plans(runs))
    train(plan, "base", 50, 100)
    train(plan, "child", 100)
    assert plans(runs)["child"].run == plan["child"].run
    other = runs.replace("90,10,0", "95,5,0", 1)
    assert plans(other)["child"].run.held_out == {"eo": "95,5,0"}


def test_losses_of_a_finished_run_that_no_set_can_mend_look_too_good(
    plans: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "data.blend_per_split.train: {en: 1, eo: 1}, data.blend_per_split.valid: yo"
    train(call(plans(f"base: {{{whole}}}", experiment="old")), "base", 50)
    monkeypatch.setattr("megaboa.plan.parents.is_trained", lambda folder: folder.name == "child")
    assert list(plans(f"child: {{continue_from: old/base@50, {LEFT}}}").warnings) == [
        "data.validation_sets.eo: names 'eo', which old/base@50 trained on in whole; the run is finished, so its "
        "losses look too good"
    ]


def test_a_split_that_only_a_recipe_knows_is_asked_for() -> None:
    texts = {name: Texts(frozenset([name]), name) for name in ("en", "eo")}
    base = Ancestor("small/base@50", RunSpec(data={"blend": {"eo": 1.0}}), 50, None, texts)
    data = {"blend": {"en": 1.0}, "split": "90,10,0", "validation_sets": {"eo": {"eo": 1.0}}}
    (found,) = held_out(RunSpec(data=data), texts, Lineage([base])).problems
    assert found.message == (
        "names 'eo', which small/base@50 trained on, by a split that only its recipe knows: set data.split in "
        "small/base, call `snakemake preflight` for small/base first, or name another corpus"
    )


def test_a_run_that_continues_in_place_keeps_it_from_version_to_version(plans: PlanOf) -> None:
    train(call(plans(f"base: {{{BOTH}, training.train_iters: 20}}")), "base", 20)
    itself = f"base: {{continue_from: itself, {LEFT}, training.train_iters: TO}}"
    second = call(plans(itself.replace("TO", "40")))
    assert second["base"].run.held_out == {"eo": "90,10,0"}
    assert [text for text in second.warnings if "data.validation_sets" in text] == []
    assert plans(itself.replace("TO", "40"))["base"].run == second["base"].run
    train(second, "base", 40)
    third = plans(itself.replace("TO", "60").replace("blend: en", "blend: yo"))
    assert third["base"].run.parent.iteration == 40 and third["base"].run.held_out == {"eo": "90,10,0"}


def make(source: str, digest: str) -> None:
    """The corpus `eo` as its job leaves it."""
    write(Path("results/small/data/eo.json"), made.corpus(made.dataset(), name="eo", source=source, digest=digest))


def test_an_earlier_version_trained_on_what_its_corpora_were_then(plans: PlanOf) -> None:
    train(call(plans(f"base: {{{BOTH}, training.train_iters: 20}}")), "base", 20, corpora={"eo": "1"})
    make("eo.jsonl", "1")
    now = {"corpora.eo": {"source": "other.jsonl"}, "corpora.law": {"source": "eo.jsonl"}}
    itself = f"base: {{continue_from: itself, {BOTH.replace('eo: eo', 'law: law')}, training.train_iters: 40}}"
    second = call(plans(itself, **now))
    assert second["base"].run.held_out == {"law": "90,10,0"}
    unknown = f"continue_from: it isn't known which texts small/base@20 trained on: {TOO_GOOD}"
    assert unknown not in second.warnings
    for _ in ("planned", "made"):
        later = plans(itself, **now)
        assert later["base"].run == second["base"].run
        assert unknown in later.warnings
        make("other.jsonl", "2")
    first = {"corpora.eo": {"source": "other.jsonl"}, "corpora.another": {"source": "eo.jsonl"}}
    unrecorded = plans(itself.replace("law: law", "another: another"), **first)
    assert unrecorded["base"].run.held_out == {} and unknown in unrecorded.warnings


def test_a_parent_of_this_experiment_trains_on_what_its_corpora_are_now(
    plans: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaboa.plan.parents.is_trained", is_trained)
    runs = f"base: {{{BOTH}}}, child: {{continue_from: small/base@50, {LEFT}}}"
    train(call(plans(runs)), "base", 50, 100, corpora={"eo": "1"})
    make("eo.jsonl", "1")
    assert plans(runs, **{"corpora.eo": {"source": "other.jsonl"}})["child"].run.held_out == {"eo": "90,10,0"}


def test_a_recipes_split_is_that_of_the_version_that_trained_with_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "results/old/runs/base")
    before, now = (RunSpec(data={"blend": {"eo": 1.0}} | split) for split in ({}, {"split": "80,20,0"}))
    write(folder.experiment_folder.preflight, Preflight(runs={"base": RunCheck(split="80,20,0")}))
    for run, said in ((before, "80,20,0"), (now, None)):
        write(folder.file("run"), run)
        assert _split_of_recipe(RunFolder(folder.path), before) == said


def test_a_set_that_means_other_documents_from_some_step_on_is_said(plans: PlanOf) -> None:
    train(call(plans(f"base: {{{BOTH}, training.train_iters: 20}}")), "base", 20)
    other = f"base: {{continue_from: itself, {BOTH.replace('eo: eo}', 'eo: yo}')}, training.train_iters: 40}}"
    said = "continue_from: data.validation_sets.eo was eo held out by 90,10,0, and is all of yo: its curve joins losses"
    assert [text for text in plans(other).warnings if text.startswith(said)]
    wider = f"base: {{continue_from: itself, {BOTH.replace('90,10', '95,5')}, training.train_iters: 40}}"
    said = (
        "continue_from: data.split was 90,10,0, and is 95,5,0: from here on the validation loss is of other documents"
    )
    assert said in plans(wider).warnings


def test_a_name_that_means_other_documents_in_another_run_is_said_and_no_figure_joins_them(plans: PlanOf) -> None:
    runs = f"old: {{{LEFT}}}, mix: {{{BOTH}}}"
    said = (
        "data.validation_sets.eo: has other documents in other runs, so the report has eo (all of eo) and eo (eo held "
        "out by 90,10,0): to compare the runs, name a corpus that none of them trains on"
    )
    assert plans(runs).warnings == {said: ["old", "mix"]}
    figure = {"name": "one", "kind": "bar", "x": "run", "y": "valid/eo"}
    found = problem(plans, runs, **{"report.figures": [figure]})
    assert "report.figures[0].y" in found
    assert "there are the columns 'valid/eo (all of eo)' and 'valid/eo (eo held out by 90,10,0)': name one" in found
    plans(runs, **{"report.figures": [figure | {"y": "valid/eo (all of eo)"}]})
    assert not plans(f"old: {{{BOTH}}}, mix: {{{BOTH}, training.seed: 2}}").warnings


def test_tokens_are_those_of_the_run_and_of_its_parents(plans: PlanOf) -> None:
    plan = plans(
        "base: {data.blend: en},"
        "child: {data.blend: en, continue_from: small/base@20, training.global_batch_size: 16},"
        "last: {data.blend: en, continue_from: small/child@40, training.global_batch_size: 32}"
    )
    assert plan["base"].row["tokens"] == 100 * 8 * 128
    assert plan["child"].row["tokens"] == (20 * 8 + 80 * 16) * 128
    assert plan["last"].row["tokens"] == (20 * 8 + 20 * 16 + 60 * 32) * 128
