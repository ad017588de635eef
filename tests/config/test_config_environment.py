"""SQSH, MOUNT and GPUS_PER_NODE, as the scripts had them that users come from."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megaboa.config import ConfigError, load
from megaboa.plan import image_specs, make_plan

GOOD = """\
experiment: good
models:
  m: {recipe: vanilla_gpt_pretrain_config}
training: {train_iters: 10}
"""
PYXIS = GOOD + "image: {runtime: pyxis}\n"


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Load an experiment where `a.sqsh` and the scripts' own image are."""
    if not shutil.which("mksquashfs"):
        pytest.skip("squashfs-tools are not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").mkdir()
    for name in ("a.sqsh", "megatron-lm+latest.sqsh"):
        subprocess.run(["mksquashfs", "tree", name, "-quiet", "-no-progress"], check=True)

    def make(text, **variables):
        (tmp_path / "e.yaml").write_text(text)
        return load(["e.yaml"], variables=variables)

    return make


def test_nothing_is_set_and_no_image_is_named(read):
    """What a user of the scripts sees who calls them without any variable."""
    loaded = read(PYXIS)
    experiment = loaded.experiment
    assert experiment.image.path == "./megatron-lm+latest.sqsh"
    assert experiment.resources.gpus_per_node == 8
    there = ["/fsx:/fsx"] if Path("/fsx").exists() else []
    assert experiment.image.mounts == [".:/workspace/megatron", *there]
    said = "\n".join(loaded.notes)
    for name, value in (
        ("SQSH", "./megatron-lm"),
        ("MOUNT", ".:/workspace/megatron,/fsx:/fsx"),
        ("GPUS_PER_NODE", "8"),
    ):
        assert re.search(rf"{name} is not set: \S+ is {re.escape(value)}", said)
    assert f"{Path.cwd()}:/workspace/megatron:rw" in image_specs.mounts(experiment)


def test_every_variable_goes_before_the_file(read):
    text = GOOD + "image: {runtime: pyxis, path: a.sqsh, mounts: ['/tmp:/tmp']}\nresources: {gpus_per_node: 2}\n"
    loaded = read(text, SQSH="./megatron-lm+latest.sqsh", MOUNT=".:/x,/tmp:/y:ro", GPUS_PER_NODE="4")
    assert loaded.experiment.image.path == "./megatron-lm+latest.sqsh"
    assert loaded.experiment.image.mounts == [".:/x", "/tmp:/y:ro"]
    assert loaded.experiment.resources.gpus_per_node == 4
    assert loaded.notes == (
        "SQSH is set: image.path is ./megatron-lm+latest.sqsh, in place of a.sqsh",
        "MOUNT is set: image.mounts is .:/x,/tmp:/y:ro, in place of ['/tmp:/tmp']",
        "GPUS_PER_NODE is set: resources.gpus_per_node is 4, in place of 2",
    )
    assert make_plan(loaded).notes == loaded.notes


def test_an_image_of_its_own_has_none_of_the_defaults(read):
    loaded = read(GOOD + "image: {runtime: pyxis, path: a.sqsh}\n")
    assert loaded.notes == () and loaded.experiment.image.mounts is None
    assert loaded.experiment.resources.gpus_per_node == 1


def test_sqsh_goes_before_a_build(read):
    loaded = read(GOOD + "image: {runtime: pyxis, build: {file: none}}\n", SQSH="a.sqsh")
    assert loaded.experiment.image.path == "a.sqsh" and loaded.experiment.image.build is None


def test_without_an_image_they_are_not_used_and_that_is_said(read):
    loaded = read(GOOD, SQSH="a.sqsh", GPUS_PER_NODE="8")
    assert loaded.notes == (
        "SQSH is set, and not used: image.runtime is none",
        "GPUS_PER_NODE is set, and not used: image.runtime is none",
    )
    assert loaded.experiment.resources.gpus_per_node == 1 and loaded.experiment.image.path is None


def test_an_empty_variable_is_not_set(read):
    assert read(PYXIS, SQSH="").notes[0].startswith("SQSH is not set")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"GPUS_PER_NODE": "all"}, "environment: resources.gpus_per_node: GPUS_PER_NODE is 'all', and must be a whole"),
        ({"GPUS_PER_NODE": "0"}, "GPUS_PER_NODE is '0'"),
        ({"SQSH": "none.sqsh"}, "SQSH (environment): image.path: there is no image 'none.sqsh'"),
        ({"SQSH": "a.sif"}, "SQSH (environment): image.path: 'a.sif' is an image for apptainer"),
        ({"MOUNT": "/none-such:/x"}, "MOUNT (environment): image.mounts[0]: there is no '/none-such' to mount as /x"),
        ({"MOUNT": "/tmp"}, "MOUNT (environment): image.mounts[0]: '/tmp' is not a mount: write `source:target`"),
    ],
)
def test_a_bad_value_is_one_problem(read, variables, said):
    with pytest.raises(ConfigError) as caught:
        read(PYXIS, **variables)
    assert said in str(caught.value) and str(caught.value).startswith("1 problem ")


def test_a_sweep_over_what_is_set(read):
    swept = PYXIS + "sweep: {grid: {resources.gpus_per_node: [1, 2]}}\n"
    with pytest.raises(ConfigError, match=r"is also set in GPUS_PER_NODE \(environment\): remove one of the two"):
        read(swept, GPUS_PER_NODE="4")
    assert not any("GPUS_PER_NODE" in note for note in read(swept).notes)  # the default doesn't stand in its way
