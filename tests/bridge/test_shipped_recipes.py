"""docs/reference/recipes.md: every recipe of Bridge's is in it, and what it says of some of them still holds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MEGABOA = ROOT / "workflow" / "scripts" / "megaboa"
CONFIGS = ROOT / "tests" / "fixtures" / "hf_configs.json"
PAGE = (ROOT / "docs" / "reference" / "recipes.md").read_text()
SAMPLE = (
    "llama32_1b_pretrain_1gpu_h100_bf16_config",
    "qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config",
    "moonlight_16b_pretrain_8gpu_h100_bf16_config",
    "step35_196b_a11b_pretrain_512gpu_h100_bf16_config",
    "nemotronh_4b_pretrain_1gpu_h100_bf16_config",
)


def rows(text):
    return {found[1]: found[0] for found in re.finditer(r"^\| `(\w+)` \|.*$", text, re.MULTILINE)}


@pytest.fixture(scope="module")
def printed():
    command = [sys.executable, MEGABOA, "list-recipes", "--configs", CONFIGS, "--names", "--only", *SAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_recipe_is_in_the_table(printed):
    names = json.loads(printed.splitlines()[0])
    assert len(names) > 80 and list(rows(PAGE)) == names


def test_what_the_table_says_of_some_still_holds(printed):
    found = rows(printed)
    assert set(found) == set(SAMPLE)
    assert found == {name: rows(PAGE)[name] for name in SAMPLE}


def test_what_does_not_pass_is_explained():
    cells = {name: [cell.strip() for cell in row.split("|")[1:-1]] for name, row in rows(PAGE).items()}
    assert {row[-2] for row in cells.values()} <= {"PASS", "FAIL", "needs the image", "needs mamba_ssm", "not built"}
    assert all(row[-1] for row in cells.values() if row[-2] != "PASS")
    assert "config of its model was not at hand" not in PAGE
    assert sum(row[-2] == "PASS" or row[-2].startswith("needs") for row in cells.values()) > 0.7 * len(cells)
