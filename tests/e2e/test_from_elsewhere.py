"""The workflow from another folder, and as a module of another workflow: as Snakemake's users expect."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from clone import TINY, Workspace, copy_repository

pytestmark = pytest.mark.slow

URL = "https://github.com/somebody/megaboa"
# What snakedeploy writes, but for the lines of comments.
DEPLOYED = """\
from snakemake.utils import min_version


min_version("6.10.0")


configfile: "config/config.yaml"


module megaboa:
    snakefile:
        github("somebody/megaboa", path="workflow/Snakefile", tag="v9")
    config:
        config


use rule * from megaboa
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a tag."""
    path = copy_repository(tmp_path_factory.mktemp("published") / "megaboa")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(path)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"], ["tag", "v9"]):
        subprocess.run([*git, *words], check=True)
    return path


def experiment() -> str:
    return TINY.format(name="tiny", steps=3, save_interval=3) + "    one: {}\n"


def test_from_another_folder(clone, tmp_path):
    (tmp_path / "tiny.yaml").write_text(experiment())
    here = Workspace(tmp_path)
    words = ["-s", os.path.relpath(clone / "Snakefile", here.path), "--configfile", "tiny.yaml"]
    output = here.snakemake("data", *words)
    assert "profiles/default" in output, "the workflow's own profile is taken"
    assert here.json("tiny", "data", "text", "verification.json")["digest"]
    assert not (clone / "results").exists()


def test_as_snakedeploy_leaves_it(clone, tmp_path, monkeypatch):
    """The library of a module in a repository is cloned, at the module's tag."""
    settings = {"COUNT": "1", "KEY_0": f"url.file://{clone}.insteadOf", "VALUE_0": URL}
    for name, value in settings.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "workflow").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "workflow" / "Snakefile").write_text(DEPLOYED)
    (tmp_path / "config" / "config.yaml").write_text(experiment())
    here = Workspace(tmp_path)
    assert "train" in here.snakemake("-n"), "without a target: everything"
    here.snakemake("metrics")
    assert here.json("tiny", "runs", "one", "metrics", "summary.json")["steps"] == 3
    commit = subprocess.check_output(["git", "-C", str(clone), "rev-parse", "v9"], text=True).strip()
    kept = {path.name for path in (tmp_path / ".snakemake" / "megaboa").iterdir()}
    assert kept == {commit, "calls"}, "the clone, and marks of calls"


def test_as_a_part_of_another_workflow(clone, tmp_path):
    """With a part of its configuration, other names of rules, and a rule that reads a result; hooks are called."""
    tree = "".join(f"  {line}\n" for line in experiment().splitlines())
    (tmp_path / "all.yaml").write_text(f"greeting: hello\npretraining:\n{tree}")
    (tmp_path / "Snakefile").write_text(
        f"""\
configfile: "all.yaml"


module megaboa:
    snakefile:
        "{clone}/Snakefile"
    config:
        config["pretraining"]


use rule * from megaboa as pretraining_*


onstart:
    print("mine has started")


rule greet:
    default_target: True
    input:
        rules.pretraining_verify_corpus.output[0].format(corpus="text"),
    output:
        "greeting.txt",
    params:
        greeting=config["greeting"],
    shell:
        "echo {{params.greeting}} > {{output}}"
"""
    )
    here = Workspace(tmp_path)
    output = here.snakemake()
    assert "mine has started" in output and "pretraining_tokenize" in output
    assert (tmp_path / "greeting.txt").read_text() == "hello\n"
    assert here.results("tiny", "runs", "one", "run.json").exists()
