"""The default experiment's agreements, with weights moved by rounding and with real mistakes: a short form of the
protocol of docs/benchmarks/agreement.md."""

import subprocess
import sys

import pytest
from clone import user_environment

pytestmark = pytest.mark.slow

SEEDS = 1
RUNS = ("tp2-sp", "moe-ep2")


@pytest.fixture(scope="module")
def verdicts(workspace):
    """Of honest pairs and of mistakes: (run, seed, mistake) and PASS or FAIL."""
    workspace.snakemake("preflight", "data", "import")
    command = [sys.executable, "benchmarks/agreement.py", "results/tiny", "--mistakes", "--seeds", str(SEEDS)]
    command += ["--twins", "1"]
    done = subprocess.run(
        [*command, "--runs", *RUNS],
        cwd=workspace.path,
        env={**user_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    lines = [line for line in done.stdout.splitlines() if "  PASS  " in line or "  FAIL  " in line]
    assert lines, done.stderr[-4000:]
    found = {}
    for line in lines:
        run, seed, state = line.split()[:3]
        mistake = line.split("  ", 1)[1].rpartition("  ")[2].partition(":")[0]
        found[run, int(seed), None if mistake == "-" else mistake] = (state, line)
    return found


def test_rounding_passes(verdicts):
    honest = {key: found for key, found in verdicts.items() if key[2] is None}
    assert len(honest) == SEEDS * len(RUNS)
    assert [line for state, line in honest.values() if state != "PASS" or ": within rounding: " not in line] == []


def test_every_mistake_fails(verdicts):
    mistakes = {key[2]: found for key, found in verdicts.items() if key[2] is not None}
    assert len(mistakes) == 12 and "gradients of the experts times 1.01" in mistakes
    assert [line for state, line in mistakes.values() if state != "FAIL"] == []
