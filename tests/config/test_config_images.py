"""Images that the workflow builds: mistakes that are seen before anything is built."""

import pytest
from pydantic import ValidationError

from megaboa.config import ConfigError, load
from megaboa.config.models.resources import Build

EXPERIMENT = """\
experiment: good
models:
  m: {{recipe: vanilla_gpt_pretrain_config}}
training: {{train_iters: 10}}
image: {{runtime: pyxis, build: {{file: Dockerfile{build}}}{image}}}
"""


@pytest.fixture
def said(tmp_path, monkeypatch):
    """The only problem of an experiment beside which there is a Dockerfile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Dockerfile").write_text("ARG BASE=debian:12\nARG PLACE\nFROM ${BASE}\nCOPY here ${PLACE}\n")
    (tmp_path / "here").touch()

    def read(build="", image=""):
        (tmp_path / "e.yaml").write_text(EXPERIMENT.format(build=build, image=image))
        with pytest.raises(ConfigError) as caught:
            load(["e.yaml"])
        head, problem = str(caught.value).splitlines()
        assert head.startswith("1 problem ")
        return problem.removeprefix("  e.yaml:5: ")

    return read


PLACE = ", args: {PLACE: /x}"


def test_an_engine_that_nobody_knows(said):
    assert said(PLACE + ", engine: kaniko").startswith("image.build.engine: 'kaniko' is not allowed; allowed: auto")


def test_an_image_of_two_origins(said):
    assert said(PLACE, f", path: 'x@sha256:{'0' * 64}'") == "image: path and build are both set: remove one"


def test_an_argument_without_a_value(said):
    assert said() == "image.build: Dockerfile: ARG PLACE has no value: set image.build.args.PLACE"


def test_an_argument_that_the_dockerfile_lacks(said):
    assert said(", args: {PLACE: /x, BASES: a}").endswith("Dockerfile has no ARG BASES; it has BASE, PLACE")


def test_a_file_that_is_copied_and_is_not_there(said, tmp_path):
    (tmp_path / "here").unlink()
    assert said(PLACE) == "image.build: Dockerfile:4: COPY here: nothing of that name is in ./"


def test_a_builds_arguments_hold_no_secrets():
    with pytest.raises(ValidationError, match="GITHUB_PAT is named like a secret"):
        Build.model_validate({"args": {"GITHUB_PAT": "abc"}})
