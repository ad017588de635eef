"""`snakemake tune`: settings are tried by real ranks; a crash is a row, and a search that is killed resumes."""

import subprocess
import sys
import time

import pytest
import yaml
from clone import kill_group, user_environment

from megaboa import records
from megaboa.files import read_json, read_jsonl, write_json
from megaboa.formats import counted

pytestmark = pytest.mark.slow

TUNE = """\
tune:
  settings: 6
  steps: 5
  minutes: 10
  tolerance: 0.2
  also: {overrides.optimizer.use_precision_aware_optimizer: [null, true]}  # on the CPU it isn't there
"""
HERE = "mine-tune-run"


def trials(workspace):
    return [read_jsonl(path) for path in workspace.path.glob(f"store/tunings/{HERE}/*/trials.jsonl")]


@pytest.fixture(scope="module")
def killed(workspace):
    """The trials of a search that is killed, with all its processes, after the second of them."""
    config = workspace.experiment("mine", {})
    text = config.read_text().replace("sweep:\n  runs:\n", TUNE).replace("global_batch_size: 8", "global_batch_size: 4")
    config.write_text(text)
    call = workspace.start("tune", "--configfile", config)
    try:
        deadline = time.monotonic() + 300
        while len((trials(workspace) or [[]])[0]) < 2:
            assert call.poll() is None, call.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        kill_group(call)
    return trials(workspace)[0]


@pytest.fixture(scope="module")
def resumed(workspace, killed):
    return workspace.snakemake("tune", "--rerun-incomplete", "--nolock", "--configfile", workspace.path / "mine.yaml")


def test_a_search_that_is_killed_resumes(workspace, killed, resumed):
    assert f"{counted(len(killed), 'trial')} made before" in resumed
    [made] = trials(workspace)
    assert made[: len(killed)] == killed
    assert workspace.json(HERE, "tune.json")["trials"] == len(made)


def test_every_setting_is_a_row_also_one_that_crashes(workspace, resumed):
    found = workspace.json(HERE, "tune.json")
    states = {row["setting"]["name"]: row["state"] for row in found["settings"]}
    assert set(states.values()) == {"measured", "failed"}
    assert {state for name, state in states.items() if "precision" in name} == {"failed"}
    assert {state for name, state in states.items() if "precision" not in name} == {"measured"}
    why = next(row["why"] for row in found["settings"] if row["state"] == "failed")
    assert "RefusedOnCpu" in why
    rows = workspace.results(HERE, "tune.tsv").read_text().splitlines()
    assert len(rows) == 7


def test_the_winner_was_measured_and_its_keys_can_be_pasted(workspace, resumed):
    found = workspace.json(HERE, "tune.json")
    measured = [row for row in found["settings"] if row["state"] == "measured"]
    assert found["winner"] == measured[0]["setting"]["name"]
    assert all(row["seconds"] > 0 for row in measured)
    assert max(row["trials"] for row in measured) >= 2, "the fastest are tried again"
    keys = yaml.safe_load(workspace.results(HERE, "winner.yaml").read_text()) or {}
    assert sum(map(len, keys.values())) == len(measured[0]["setting"]["values"])


RECIPE = """\
experiment: own
device: cpu
models: {gpt: {recipe: recipes/gpt_tiny.py}}
resources: {gpus_per_node: 2}
sweep: {runs: {run: {model: gpt}}}
tune: {settings: 2, steps: 5, tolerance: 0.9}
"""


def test_a_recipe_is_tuned_when_preflight_has_read_it(workspace):
    """Its micro-batch is 2, and the other setting's is 1."""
    config = workspace.path / "own.yaml"
    config.write_text(RECIPE)
    workspace.snakemake("preflight", "--configfile", config)
    workspace.snakemake("tune", "--configfile", config)
    found = workspace.json("own-tune-run", "tune.json")["settings"]
    assert {row["setting"]["name"]: row["state"] for row in found} == {"mbs1": "measured", "mbs2": "measured"}
    assert {
        name: workspace.json("own-tune-run", "runs", name, "run.json")["training"]["micro_batch_size"]
        for name in ("mbs1", "mbs2")
    } == {"mbs1": 1, "mbs2": 2}


@pytest.fixture(scope="module")
def turns(workspace, resumed):
    """An experiment of two runs whose data and model are there."""
    runs = {"dp2": "{resources.gpus_per_node: 2}", "tp2": "{resources.gpus_per_node: 2, parallel.tp: 2}"}
    config = workspace.experiment("turns", runs)
    config.write_text(config.read_text().replace("init: pretrained", "init: scratch"))
    workspace.snakemake("data", "import", "--configfile", config)
    return config


def test_the_runs_of_an_experiment_are_measured_in_turn(workspace, turns):
    """benchmarks/in_turn.py: some steps of each, by forked ranks; a second call measures nothing again."""
    command = [sys.executable, "benchmarks/in_turn.py", turns, "--steps", "2", "--out", "turns.json"]
    done, again = (subprocess.run(command, cwd=workspace.path, capture_output=True, text=True) for _ in range(2))
    assert done.returncode == 0, done.stderr
    rows = read_json(workspace.path / "turns.json")
    assert [row["run"] for row in rows] == ["dp2", "tp2"]
    for row in rows:
        [trial] = row["trials"]
        assert len(trial["steps"]) == 2 and len(trial["losses"]) == 7
        assert row["tokens"] == pytest.approx(8 * 64 / row["seconds"] / 2)
        assert f"| `{row['run']}` |" in done.stdout
    assert again.stdout == done.stdout and not again.stderr


def test_a_run_is_measured_next_to_others_of_the_same_shape(workspace, turns):
    """benchmarks/peers.py: transformers' model really trains; what is no checkout of torchtitan is a row of its own."""
    command = [sys.executable, "benchmarks/peers.py", turns, "--runs", "dp2", "--steps", "2", "--no-compile"]
    done = subprocess.run(
        [*command, "--torchtitan", "docs"], cwd=workspace.path, capture_output=True, text=True, env=user_environment()
    )
    assert done.returncode == 0, done.stderr
    ours, theirs, *titans = read_json(workspace.path / "peers/peers.json")
    for side in (ours, theirs):
        assert len(side["seconds"]) == 2 and len(side["losses"]) == 7
    assert theirs["losses"][0] == pytest.approx(ours["losses"][0], abs=0.2), "one shape and vocabulary"
    assert [side["why"].split("docs ")[1] for side in titans] == ["is no torchtitan 0.2: git checkout v0.2.2"] * 2
    assert "times as fast as transformers, FSDP2, the fastest of the others" in done.stdout
    assert "| data | text | random tokens |" in done.stdout
    assert ours["conditions"]["parameters"] == theirs["conditions"]["parameters"]


def test_a_recipe_on_one_rank_is_measured_next_to_a_model_that_is_named(workspace):
    """As nanoGPT trains, without shards."""
    text = RECIPE.replace("experiment: own", "experiment: alone").replace("gpus_per_node: 2", "gpus_per_node: 1")
    (workspace.path / "alone.yaml").write_text(text)
    sizes = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256}
    (workspace.path / "gpt2").mkdir()
    write_json(workspace.path / "gpt2" / "config.json", sizes)
    workspace.snakemake("preflight", "--configfile", "alone.yaml")
    command = [sys.executable, "benchmarks/peers.py", "alone.yaml", "--runs", "run", "--no-compile", "--steps", "2"]
    command += ["--out", "alone-peers"]
    done, refused = (
        subprocess.run([*command, *more], cwd=workspace.path, capture_output=True, text=True, env=user_environment())
        for more in (["--model", "gpt2"], [])
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = read_json(workspace.path / "alone-peers/peers.json")
    assert len(ours["seconds"]) == len(theirs["seconds"]) == 2
    assert theirs["conditions"]["layout"] == "one rank"
    assert "times as fast as transformers, the fastest of the others" in done.stdout
    assert refused.returncode == 1 and "say --model FOLDER" in refused.stderr


def test_nothing_is_done_twice_and_the_users_runs_are_left_alone(workspace, resumed):
    assert workspace.planned("tune", "--configfile", workspace.path / "mine.yaml") == {}
    assert not workspace.results("mine").exists()


def test_the_machine_is_measured_by_the_ranks_of_a_run(workspace):
    """And the planner takes the measurement from then on."""
    config = workspace.experiment("machine", {"alone": "{}", "pair": "{resources.gpus_per_node: 2}"})
    workspace.snakemake("calibrate", "--configfile", config)
    measured = records.read(records.Calibration, workspace.results("machine", "calibration.json"))
    assert measured.node.ranks == 2, "those of the larger run"
    assert records.read(records.Calibration, workspace.path / "calibrations" / "cpu.json") == measured
    assert workspace.planned("calibrate", "--configfile", config) == {}
