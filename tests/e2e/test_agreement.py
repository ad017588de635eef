"""The default experiment's checks: they hold where rounding differs, and fail where something is wrong.

The short form of the protocol in docs/benchmarks/agreement.md, by the same program.
"""

import json
import subprocess
import sys

import pytest
from clone import user_environment

pytestmark = pytest.mark.slow

PROTOCOL = """\
import json, sys
from pathlib import Path

sys.path.insert(0, "benchmarks")
import agreement

agreement.start()
protocol = agreement.Protocol(Path("results/tiny"))
for name, seed, mistake in json.loads(sys.argv[1]):
    print("verdict", json.dumps([name, seed, mistake, protocol.check(name, seed, mistake)]), flush=True)
"""
SEEDS = (1, 2)
RUNS = ("dp2", "tp2-sp", "pp2", "cp2", "moe-ep2")
MISTAKES = {
    "gradients of the experts times 1.01": "moe-ep2",
    "one microbatch in four dropped": "moe-ep2",
    "experts' gradients not reduced over ep ranks": "moe-ep2",
    "norms' gradients not reduced over tp ranks": "tp2-sp",
}


@pytest.fixture(scope="module")
def verdicts(workspace):
    workspace.snakemake("preflight", "data", "import")
    asked = [
        *((run, seed, None) for seed in SEEDS for run in RUNS),
        *((run, 1, what) for what, run in MISTAKES.items()),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROTOCOL, json.dumps(asked)],
        cwd=workspace.path,
        env={**user_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [
        json.loads(line.removeprefix("verdict ")) for line in done.stdout.splitlines() if line.startswith("verdict ")
    ]
    return {(run, seed, mistake): check for run, seed, mistake, check in lines}


@pytest.mark.parametrize("run", RUNS)
def test_a_layout_agrees_wherever_the_last_bit_of_the_weights_is(verdicts, run):
    for seed in SEEDS:
        check = verdicts[run, seed, None]
        assert (check["state"], check["steps"]) == ("PASS", 30), check
        assert check["exact_steps"] == 30 or check["flip"], check


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_ranks_fails(verdicts, mistake):
    check = verdicts[MISTAKES[mistake], 1, mistake]
    assert check["state"] == "FAIL", check


def test_a_wrong_factor_of_the_experts_gradients_shows_in_their_norm_alone(verdicts):
    check = verdicts["moe-ep2", 1, "gradients of the experts times 1.01"]
    assert check["max_difference"] < 1e-5 < check["max_grad_norm"]


def test_a_seed_moves_weights(verdicts):
    assert len({verdicts[run, seed, None]["max_grad_norm"] for run in RUNS for seed in SEEDS}) > len(RUNS)
