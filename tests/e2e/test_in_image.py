"""The chain with an image, where the runtime is a stand-in: what it is asked to start it starts on this machine.

That ranks run in a real image is shown by tests/image/test_cpu_image.py.
"""

import os
import sys

import pytest

pytestmark = pytest.mark.slow

APPTAINER = """\
#!/bin/sh
echo "$@" >> "$(dirname "$0")/called"
while [ "${1%.sif}" = "$1" ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture(scope="module")
def calls(workspace):
    folder = workspace.path / "bin"
    folder.mkdir()
    (folder / "apptainer").write_text(APPTAINER)
    (folder / "apptainer").chmod(0o755)
    image = workspace.path / "tiny.sif"
    image.write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0" + bytes(100))
    more = f"""\
    image: {{runtime: apptainer, path: {image}}}
    launch: {{python: {sys.executable}}}
    export: {{runs: all}}
    """
    config = workspace.experiment("boxed", {"dp2": "{resources.gpus_per_node: 2}"}, more=more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        workspace.snakemake("pretrain", "export", "--configfile", config)
    return (folder / "called").read_text().splitlines()


@pytest.mark.parametrize(
    "script", ["train_rank.py", "import_model.py", "prove_import.py", "export_model.py", "prove_export.py"]
)
def test_what_needs_megatrons_kernels_runs_in_the_image(workspace, calls, script):
    called = [line for line in calls if f"/{script} " in line]
    assert called
    assert all(line.startswith("exec --nv --no-home") and f"{workspace.path}/tiny.sif" in line for line in called)


def test_the_proof_holds(workspace, calls):
    assert workspace.json("boxed", "runs", "dp2", "proof.json")["state"] == "PASS"
