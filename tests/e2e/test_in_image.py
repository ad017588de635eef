"""The chain in an image, started by a real Apptainer: a Debian, into which this machine's Python is mounted.

Where there is none (`.ci/install_apptainer`), a stand-in starts on this machine what it is asked to start.
"""

import os
import shutil
import sys

import pytest
from image import machine

from megaboa.files import read_json, write_json

pytestmark = pytest.mark.slow

INSTALLED = shutil.which("apptainer")
LOGGED = """\
#!/bin/sh
printf '%s\\n' "$(echo "$@" | tr '\\n' ' ')" >> "$(dirname "$0")/called"
"""
# Root may lack capabilities here that Apptainer wants, and users' namespaces are what users have.
REAL = f'{LOGGED}APPTAINER_USERNS=1 exec {INSTALLED} "$@"\n'
STAND_IN = f"""\
{LOGGED}
while [ "${{1%.sif}}" = "$1" ]; do shift; done
shift
exec "$@"
"""


def experiment(workspace, launch="", more=""):
    text = f"""\
    image: {{runtime: apptainer, path: {workspace.path}/tiny.sif, mounts: {machine.MOUNTS}}}
    launch: {{python: {sys.executable}{launch}}}
    export: {{runs: all}}
    {more}
    """
    return workspace.experiment("boxed", {"dp2": "{resources.gpus_per_node: 2}"}, more=text)


@pytest.fixture(scope="module")
def calls(workspace):
    folder = workspace.path / "bin"
    folder.mkdir()
    (folder / "apptainer").write_text(REAL if INSTALLED else STAND_IN)
    (folder / "apptainer").chmod(0o755)
    image = workspace.path / "tiny.sif"
    if INSTALLED:
        machine.require()
        machine.sif(image, workspace.path.parent / "debian")
    else:
        image.write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0" + bytes(100))
    config = experiment(workspace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        workspace.snakemake("pretrain", "export", "--configfile", config)
    return (folder / "called").read_text().splitlines()


@pytest.mark.parametrize(
    "program",
    ["train_rank.py", *(f"megaboa {name}" for name in ("check-inside", "import-model", "prove-import"))]
    + [f"megaboa {name}" for name in ("export-model", "prove-export")],
)
def test_what_needs_megatrons_kernels_runs_in_the_image(workspace, calls, program):
    called = [line for line in calls if f"/{program} " in line]
    assert called
    assert all(line.startswith("exec --nv --no-home") and f"{workspace.path}/tiny.sif" in line for line in called)


def test_preflight_in_the_image_comes_before_training(workspace, calls):
    checked, trained = (
        min(place for place, line in enumerate(calls) if word in line) for word in ("/megaboa check-inside", "--claim=")
    )
    assert checked < trained
    assert workspace.json("boxed", "preflight-in-image.json")["how"] == "apptainer"


@pytest.mark.skipif(not INSTALLED, reason="there is no apptainer")
def test_the_entrypoint_was_tested_in_the_image(workspace, calls):
    contract = workspace.json("boxed", "image.json")["contract"]
    assert (contract["state"], contract["how"]) == ("PASS", "apptainer")


def test_preflight_alone_makes_no_image(workspace, calls):
    path = f"image: {{runtime: apptainer, path: {workspace.path}/tiny.sif}}\n"
    config = workspace.experiment("fresh", {"a": "{}"}, more=path)
    planned = workspace.planned("preflight", "--configfile", config)
    assert "preflight" in planned and not {"image", "preflight_in_image"} & set(planned)


def test_the_proof_holds(workspace, calls):
    assert workspace.json("boxed", "runs", "dp2", "proof.json")["state"] == "PASS"


def test_where_things_are_started_makes_nothing_again(workspace, calls):
    config = experiment(workspace, ", srun_args: [--mpi=none]", "resources: {partition: other}")
    assert workspace.planned("pretrain", "export", "--configfile", config) == {}
    preview = workspace.json("boxed", "preview", "specs", "inside.json")
    assert preview["container"]["places"] == ["--partition=other"]


def test_an_image_that_is_made_again_as_it_was_makes_nothing_again(workspace, calls):
    """Its manifest is younger then than what was converted and trained in it, and tells of another test of it."""
    targets = ("pretrain", "export", "--configfile", experiment(workspace))
    expensive = {"import_model", "prove_import", "train", "export_model", "prove_export"}
    assert not expensive & set(workspace.planned(*targets, "--forcerun", "image"))
    image = workspace.results("boxed", "image.json")
    write_json(image, {**read_json(image), "contract": {"state": "NOT_RUN", "why": "made again"}})
    assert not expensive & set(workspace.planned(*targets))


def test_what_was_converted_in_another_image_is_converted_again(workspace, calls):
    """By the digest in its manifest, now that the image's own is younger (from the test above) and another."""
    manifest = workspace.results("boxed", "models", "dense", "import.json")
    before, time = manifest.read_text(), manifest.stat().st_mtime_ns
    digest = workspace.json("boxed", "image.json")["digest"]
    manifest.write_text(before.replace(digest, "of-another"))
    os.utime(manifest, ns=(time, time))
    planned = workspace.planned("import", "--configfile", experiment(workspace))
    manifest.write_text(before)
    os.utime(manifest, ns=(time, time))
    assert planned["import_model"] == 1


def test_another_image_makes_all_again(workspace, calls):
    (workspace.path / "tiny.sif").rename(workspace.path / "other.sif")
    config = experiment(workspace)
    config.write_text(config.read_text().replace("tiny.sif", "other.sif"))
    planned = workspace.planned("pretrain", "export", "--configfile", config)
    assert {"image", "import_model", "train", "export_model"} <= set(planned)
