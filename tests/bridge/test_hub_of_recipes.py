"""`megaboa preflight` of recipes whose model's config the hub doesn't give."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import ACCEPTED, GATED, serving
from preflights import write_runs

from megaboa.files import read_json, write_json
from megaboa.paths import ExperimentFolder
from megaboa.records import Budget, CostsSpec, RunsSpec, write

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
RECIPE = "llama3_8b_pretrain_8gpu_h100_bf16_config"
OWN = f"""\
from transformers import AutoConfig

def configure():
    AutoConfig.from_pretrained({GATED!r})
"""
LAYOUT = {"parallel": {"tp": 1, "cp": 2}, "training": {"seq_length": 8192}}  # of Bridge's recipe
REFUSED = {"model": "recipes/gpt_tiny.py", "overrides": {"model.no_such_field": 1}}


@pytest.fixture
def preflight(tmp_path):
    """Of some runs, with a hub at an address: the exit code, and what is said."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    bridges = {"model": RECIPE, **LAYOUT}
    runs = {"bridges": bridges, "again": dict(bridges), "own": {"model": str(own)}, "refused": dict(REFUSED)}
    write_runs(tmp_path, runs)
    specs = ExperimentFolder(tmp_path).specs
    write(specs.costs, CostsSpec(exports=(), budget=Budget()))
    write_json(specs.inside, {"digest": "packages"})

    def preflight(url, *runs, **environment):
        write(specs.runs, RunsSpec(runs=runs, skip_illegal=True))
        command = [sys.executable, "workflow/scripts/megaboa", "preflight", specs.runs, "--out", tmp_path / "out.json"]
        hub = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
        given = {**os.environ, **hub, **environment}
        done = subprocess.run(command, cwd=REPOSITORY, env=given, capture_output=True, text=True)
        return done.returncode, done.stderr

    return preflight


def test_a_gated_model_is_one_sentence_and_is_asked_for_again(preflight, tmp_path):
    with serving() as url:
        code, said = preflight(url, "bridges", "own", "refused")
        remedy = f"is gated: ask for access at https://huggingface.co/{GATED}, then set HF_TOKEN or run `hf auth login`"
        assert f"error: run bridges is not checked: models.own.recipe: '{GATED}' {remedy}\n" in said
        other = f"models.own.recipe: what {tmp_path}/own.py reads is gated: ask for access on its page, then set "
        assert f"error: run own is not checked: {other}HF_TOKEN or run `hf auth login`\n" in said
        assert code == 1 and "1 of 3 runs could never work" in said
        assert set(read_json(tmp_path / "refused.json")["runs"]) == {"refused"}
        code, said = preflight(url, "bridges", HF_TOKEN=ACCEPTED)
    assert code == 0, said
    assert read_json(tmp_path / "out.json")["runs"]["bridges"]["state"] == "PASS"


def test_a_hub_that_cannot_be_reached_is_no_verdict(preflight, tmp_path):
    """Where connections are tried, Bridge and the hub's client do so for two minutes."""
    code, said = preflight("http://127.0.0.1:9", "bridges", "again", HF_HUB_OFFLINE="1")
    reached = f"models.own.recipe: '{GATED}' is not in the local cache and the hub can't be reached from here: download"
    how = f"it where there is a network (`hf download {GATED} config.json`) and share HF_HOME"
    assert code == 1 and said.splitlines()[-1] == f"error: runs bridges, again are not checked: {reached} {how}"
    assert not (tmp_path / "refused.json").exists()
