"""Which inputs make a job run again, as Snakemake sees them."""

import os
from types import SimpleNamespace

import pytest

from megaboa.files import write_json
from megaboa.plan import rule_inputs
from megaboa.plan.rule_inputs import Inputs, Planned
from megaboa.plan.shared import Shared
from megaboa.records import Image, read


def old(path):
    """As Snakemake marks an input whose time doesn't count."""
    return f"ancient {path}"


@pytest.fixture
def made(plan_of, tmp_path, monkeypatch):
    """Inputs of a plan of two runs, of which `done` is trained."""
    plan = plan_of("models: {dense: {init: pretrained}}\nsweep: {runs: {done: {}, other: {optimizer.lr: 1.0}}}\n")
    monkeypatch.setattr(rule_inputs, "is_trained", lambda folder: folder.name == "done")
    shared = Shared(plan, tmp_path / "results")
    planned = Planned(str(shared.folder), {})
    return SimpleNamespace(shared=shared, inputs=Inputs(shared, planned.file, old))


def names(found):
    return [
        path.split("/small/")[1] if not path.startswith("ancient") else old(path.split("/small/")[1]) for path in found
    ]


def test_what_comes_before_training_trains_nothing_again(made):
    assert names(made.inputs.preflight("other")) == ["preflight.json"]
    assert names(made.inputs.preflight("done")) == ["ancient preflight.json"]
    assert names(made.inputs.import_proof("other")) == ["models/dense/proof.json"]
    assert names(made.inputs.import_proof("done")) == ["ancient models/dense/proof.json"]
    assert [path.startswith("ancient") for run in ("other", "done") for path in made.inputs.index(run)] == [False, True]
    waited_for = names(made.inputs.before_training("other"))
    assert waited_for[:-3] == names(made.shared.run_inputs(made.shared.runs["other"]))
    assert waited_for[-3:] == ["preflight.json", *names(made.inputs.index("other")), "models/dense/proof.json"]


def test_a_capture_waits_for_the_index_that_it_reads(made, plan_of, tmp_path):
    """Of fine-tuning. It failed where nothing was trained before; pretraining's makes its own."""
    assert made.inputs.index_of_capture("other") == []
    text = (
        "task: sft\ncorpora: {stdlib: {source: python-stdlib, messages: messages}}\ndata: {blend: stdlib}\n"
        "tuning: {template: config/experiments/templates/chatml.jinja}\nmodels: {dense: {init: pretrained}}\n"
    )
    shared = Shared(plan_of(text), tmp_path / "results")
    inputs = Inputs(shared, made.inputs.planned, old)
    [run] = [run.name for run in shared.plan.runs]
    [index] = inputs.index_of_capture(run)
    assert index == inputs.index(run)[0] and "/indexes/" in index


def test_without_an_image_nothing_waits_for_one(made):
    """Its manifest then tells of this Python."""
    write_json(made.shared.paths.specs.image, {})
    write_json(made.shared.paths.image, {"runtime": "none", "digest": "1", "python": "3.12", "packages": {}})
    assert made.inputs.image("done") == made.inputs.image_of_conversion("import.json") == []


def test_an_image_that_is_made_trains_and_converts_nothing_again(plan_of, tmp_path, monkeypatch):
    file = tmp_path / "image.sqsh"
    file.write_bytes(b"hsqs" + bytes(96))
    plan = plan_of(f"image: {{runtime: pyxis, path: {file}}}")
    shared, run = Shared(plan, tmp_path / "results"), plan.runs[0].name
    image, imported = shared.paths.image, shared.paths.model("dense").imported
    manifest = {"runtime": "pyxis", "digest": "1", "python": "3.12", "packages": {}, "path": str(file), "bytes": 100}
    stat = file.stat()

    def inputs_of(is_trained):
        monkeypatch.setattr(rule_inputs, "is_trained", lambda folder: is_trained)
        return Inputs(shared, Planned(str(shared.folder), {}).file, old)

    assert names(inputs_of(True).image(run)) == ["image.json"], "it is yet to be made"
    write_json(shared.paths.specs.image, {})
    write_json(image, manifest | {"mtime_ns": stat.st_mtime_ns, "sha256": "1"})
    assert names(inputs_of(False).image(run)) == ["image.json"]
    assert names(inputs_of(True).image(run)) == ["ancient image.json"]
    assert names(inputs_of(True).image_of_conversion(str(imported))) == ["image.json"]
    write_json(imported, {"image": list(read(Image, image).marks)})
    assert names(inputs_of(True).image_of_conversion(str(imported))) == ["ancient image.json"]
    write_json(imported, {"image": ["another", 1]})
    assert names(inputs_of(True).image_of_conversion(str(imported))) == ["image.json"]
    later = image.stat().st_mtime + 5
    os.utime(shared.paths.specs.image, (later, later))
    assert names(inputs_of(True).image(run)) == ["image.json"], "its specification has changed"


def test_an_index_that_is_made_is_not_made_again_as_preflight_ran_again(made):
    [name] = made.shared.indexes
    needs = [*made.shared.index_inputs(name), f"{made.shared.folder}/specs/indexes/{name}.json"]
    assert names([made.inputs.preflight_of_index(name)]) == ["preflight.json"]
    for path in [*needs, str(made.shared.paths.index(name))]:
        write_json(path, {})
    assert names([made.inputs.preflight_of_index(name)]) == ["ancient preflight.json"]
    later = made.shared.paths.index(name).stat().st_mtime + 5
    os.utime(needs[0], (later, later))
    assert names([made.inputs.preflight_of_index(name)]) == ["preflight.json"], "it will be made again anyway"


def test_files_of_a_dry_run_lie_elsewhere():
    plain = Planned("results/e", {})
    assert plain("runs/{run}/run.json") == "results/e/runs/{run}/run.json"
    looked = Planned("results/e", {"results/e/runs/a/run.json": "results/e/preview/runs/a/run.json"})
    wildcards = {"run": "a"}
    assert looked("runs/{run}/run.json")(wildcards) == "results/e/preview/runs/a/run.json"
    assert looked("runs/{run}/run.json")({"run": "b"}) == "results/e/runs/b/run.json"


def test_an_input_of_a_dry_run_that_is_no_reason_is_the_last_calls_if_it_has_one(tmp_path):
    results, preview = tmp_path / "e", {str(tmp_path / "e" / "plan.tsv"): "elsewhere/plan.tsv"}
    assert Planned(str(results), preview).unchanged("plan.tsv") == "elsewhere/plan.tsv"
    write_json(results / "plan.tsv", {})
    assert Planned(str(results), preview).unchanged("plan.tsv") == str(results / "plan.tsv")
