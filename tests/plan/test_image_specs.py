"""What the plan tells the image's job and the launcher; and what is another run."""

from pathlib import Path

import pytest
from indexed_files import write_indexed

from megaboa.config import ConfigError
from megaboa.image import obtain
from megaboa.plan import image_specs, specifications
from megaboa.plan.environment import environment
from megaboa.plan.shared import Shared
from megaboa.records import Environment, ImageSpec, ImageStart, parse, plain

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "a" * 64
REFERENCE = f"nvcr.io/nvidia/pytorch@{DIGEST}"
BUILD = "image: {runtime: apptainer, build: {file: Dockerfile, args: {BASE: 'a@sha256:1'}}}"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def plan_in(plan_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda text="", **keys: plan_of(f"training: {{train_iters: 10}}\n{text}", **keys)


def spec_of(plan):
    return specifications.contents(Shared(plan))["image.json"]


def test_without_an_image_all_is_as_it_was(plan_in):
    plan = plan_in()
    assert spec_of(plan) == plain(environment())
    assert plan.runs[0].launch.image is None and "bridge_source" not in plan.runs[0].documents["run"]
    assert Shared(plan).image_manifest == []


def test_a_reference(plan_in, tmp_path):
    plan = plan_in(
        f"image: {{runtime: pyxis, path: '{REFERENCE}', mounts: ['.:/data:ro']}}\nlaunch: {{python: /opt/py}}"
    )
    wanted = spec_of(plan)["container"]
    assert (wanted["path"], wanted["build"], wanted["suffix"]) == (REFERENCE, None, ".sqsh")
    assert wanted["name"] == "pytorch"
    assert specifications.contents(Shared(plan))["inside.json"]["container"]["python"] == "/opt/py"
    launch = plan.runs[0].launch.image
    assert launch.runtime == "pyxis" and launch.workdir == str(tmp_path)
    assert f"{tmp_path}:{tmp_path}:rw" in launch.mounts and f"{ROOT}:{ROOT}:rw" in launch.mounts
    assert launch.mounts[-1] == f"{tmp_path}:/data:ro"
    assert launch.secrets == ("HF_TOKEN", "WANDB_API_KEY")
    assert Shared(plan).image_manifest == ["results/small/image.json"]


def test_partition_and_account_are_the_profiles_where_the_experiment_names_none(plan_in):
    profile = {"gpu_partition": "gpus", "slurm_account": "us"}
    text = f"image: {{runtime: pyxis, path: '{REFERENCE}'}}\nlaunch: {{srun: mysrun}}\n"
    for more, places in (
        ("", ["--partition=gpus", "--account=us"]),
        ("resources: {partition: other}", ["--partition=other", "--account=us"]),
    ):
        found = specifications.contents(Shared(plan_in(text + more), profile=profile))["inside.json"]["container"]
        assert (found["places"], found["srun"]) == (places, "mysrun")


def test_where_things_are_started_makes_no_other_image(plan_in, monkeypatch, tmp_path):
    text = f"image: {{runtime: pyxis, path: '{REFERENCE}'"
    before = specifications.contents(Shared(plan_in(text + "}")))
    more = ", mounts: ['.:/data']}\nresources: {partition: other}\nlaunch: {python: py, srun_args: [--mpi=none]}"
    monkeypatch.setattr("megaboa.plan.specifications.environment", lambda: Environment(packages={}, digest="other"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    after = specifications.contents(Shared(plan_in(text + more)))
    assert after["image.json"] == before["image.json"] and after["inside.json"] != before["inside.json"]


def test_what_lies_inside_another_mount_is_not_mounted_again(plan_in, tmp_path):
    inside = image_specs.mounts(plan_in(f"image: {{runtime: pyxis, path: '{REFERENCE}'}}").experiment)
    assert not any("/store" in mount for mount in inside)
    outside = image_specs.mounts(
        plan_in(f"store: {tmp_path.parent}/s\nimage: {{runtime: pyxis, path: '{REFERENCE}'}}").experiment
    )
    assert f"{tmp_path.parent}/s:{tmp_path.parent}/s:rw" in outside


@pytest.mark.parametrize("name", ["with space", "with,comma"])
def test_a_folder_that_can_not_be_mounted_is_one_error(plan_in, tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ConfigError, match=f"1 problem.*\n  image: {tmp_path}/{name}:.*can't be mounted: rename"):
        plan_in(f"image: {{runtime: pyxis, path: '{REFERENCE}'}}")


def test_folders_of_models_and_recipes_are_mounted(plan_in, tmp_path, monkeypatch):
    for name in ("here", "recipes", "tokenizer"):
        (tmp_path / name).mkdir()
    (tmp_path / "recipes/own.py").write_text("def configure(): ...\n")
    (tmp_path / "tokenizer/tokenizer.json").touch()
    monkeypatch.chdir(tmp_path / "here")
    text = (
        f"image: {{runtime: pyxis, path: '{REFERENCE}'}}\nmodel: own\ncorpora: {{text: {{tokenizer: ../tokenizer}}}}\n"
    )
    text += "models: {own: {recipe: ../recipes/own.py, tokenizer: ../tokenizer, params: 1000}}"
    mounts = image_specs.mounts(plan_in(text).experiment)
    assert f"{tmp_path}/recipes:{tmp_path}/recipes:rw" in mounts
    assert f"{tmp_path}/tokenizer:{tmp_path}/tokenizer:rw" in mounts


def test_a_build_is_what_goes_into_it(plan_in, tmp_path):
    (tmp_path / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\nCOPY file /\n")
    (tmp_path / "file").write_text("1")
    first = spec_of(plan_in(BUILD))["container"]
    assert first["build"]["args"] == {"BASE": "a@sha256:1"} and first["suffix"] == ".sif"
    assert first["name"] == "Dockerfile"
    assert spec_of(plan_in(BUILD.replace("sha256:1", "sha256:2")))["container"] != first
    (tmp_path / "file").write_text("2")
    assert spec_of(plan_in(BUILD))["container"]["build"]["inputs"] != first["build"]["inputs"]


def test_where_and_by_what_it_is_built_makes_no_other_image(plan_in, tmp_path):
    for folder in (tmp_path, tmp_path / "moved"):
        folder.mkdir(exist_ok=True)
        (folder / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\nCOPY file /\n")
        (folder / "file").write_text("1")
    first = specifications.contents(Shared(plan_in(BUILD)))
    moved = BUILD.replace("file: Dockerfile", "file: moved/Dockerfile, context: moved, engine: buildah")
    other = specifications.contents(Shared(plan_in(f"store: elsewhere\n{moved}")))
    assert other["image.json"] == first["image.json"]
    spec = parse(ImageSpec, other["image.json"]["container"], "image.json")
    wanted = obtain.joined(spec, parse(ImageStart, other["inside.json"]["container"], "inside.json"))
    assert (wanted.store, wanted.build.engine, wanted.build.context) == ("elsewhere", "buildah", "moved")
    assert wanted.build.file == "moved/Dockerfile" and wanted.build.args == spec.build.args
    assert obtain._build_identity(wanted) == obtain._build_identity(spec)


def test_a_context_that_a_run_mounts_is_another_image_elsewhere(plan_in, tmp_path):
    (tmp_path / "other").mkdir()
    text, elsewhere = BUILD, BUILD.replace("file: Dockerfile", "file: Dockerfile, context: other")
    for run, same in (("RUN --mount=type=cache,target=/c true", True), ("RUN --mount=target=/c,source=x true", False)):
        (tmp_path / "Dockerfile").write_text(f"ARG BASE\nFROM ${{BASE}}\n{run}\n")
        assert (spec_of(plan_in(text)) == spec_of(plan_in(elsewhere))) is same


def test_another_store_makes_an_image_again_only_for_bridges_checkout_in_it(plan_in):
    image = f"image: {{runtime: pyxis, path: '{REFERENCE}'}}"
    assert spec_of(plan_in(image)) == spec_of(plan_in(f"store: elsewhere\n{image}"))
    source = image.replace("}", f", bridge_source: {{repo: https://x/y, commit: '{COMMIT}'}}}}")
    assert spec_of(plan_in(source)) != spec_of(plan_in(f"store: elsewhere\n{source}"))


def test_another_source_of_bridge_is_another_run(plan_in):
    source = f"image: {{runtime: pyxis, path: '{REFERENCE}', bridge_source: {{repo: https://x/y, commit: COMMIT}}}}"
    plan = plan_in(source.replace("COMMIT", f"'{COMMIT}'"))
    run = plan.runs[0]
    assert plain(run.run.bridge_source) == {"repo": "https://x/y", "commit": COMMIT}
    assert run.launch.image.mounts[-1].endswith(":/opt/Megatron-Bridge:ro")
    assert run.launch.image.variables == {"PYTHONPATH": "/opt/Megatron-Bridge/src"}
    elsewhere = plan_in(source.replace("COMMIT", f"'{COMMIT}', mount_as: /opt/b"))
    assert elsewhere.runs[0].run == run.run and elsewhere.runs[0].launch != run.launch
    assert plan_in(source.replace("COMMIT", f"'{'f' * 40}'")).runs[0].run != run.run


def test_existing_tokens_are_mounted_to_be_read(plan_in, tmp_path):
    (tmp_path.parent / "old").mkdir(exist_ok=True)
    write_indexed(tmp_path.parent / "old" / "a", [[1, 2]])
    text = f"image: {{runtime: pyxis, path: '{REFERENCE}'}}\ndata: {{blend: old}}\n"
    text += "corpora: {old: {megatron: ../old/a}}\n"
    mounts = image_specs.mounts(plan_in(text).experiment)
    assert f"{tmp_path.parent}/old:{tmp_path.parent}/old:ro" in mounts
