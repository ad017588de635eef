"""The driver of real GPUs is asked while a run trains on them: what it says is in files, summary, report and doctor.

Rehearsed without GPUs, with a library of the same ABI, by tests/observe/test_gpu_use.py.
"""

import csv
import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clone import edit
from gpu_runs import TWO, done, experiment, on_two_gpus
from sampled import assert_sampled

from megaboa.records import Summary, read, read_gpu_events
from megaboa.store_paths import RunStore

pytestmark = on_two_gpus

STEPS, SECONDS = 1000, 0.2
FIELDS = ("uuid", "index", "name", "driver_version", "power.limit", "power.default_limit", "clocks.max.sm")


@pytest.fixture(scope="module")
def smi():
    """What nvidia-smi says of the GPUs, by uuid."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [dict(zip(FIELDS, row, strict=True)) for row in csv.reader(said.splitlines(), skipinitialspace=True)]
    return {row["uuid"]: row for row in rows[:2]}


def configuration(workspace):
    config = experiment(workspace, "sampled", {"dp2": f"{{{TWO}}}"}, init="scratch")
    edit(config, "train_iters: 20", f"train_iters: {STEPS}")
    edit(config, "save_interval: 10", f"save_interval: {STEPS}")
    edit(config, "seq_length: 128", "seq_length: 128, precision: bf16_mixed")
    edit(config, "launch: {", f"launch: {{gpu_sampling_seconds: {SECONDS}, ")
    return config


@pytest.fixture(scope="module")
def trained(workspace):
    done(workspace, configuration(workspace))
    return workspace


def summary_of(workspace):
    return read(Summary, workspace.results("sampled", "runs", "dp2", "metrics", "summary.json"))


def test_samples_are_what_gpus_can_say_and_reach_the_summary(trained, smi):
    samples = assert_sampled(trained.store("sampled", "dp2"), summary_of(trained), set(smi))
    print(summary_of(trained).gpus.total, len(samples), samples[0], samples[-1])
    assert samples[0].ecc_uncorrected and None not in samples[0].ecc_uncorrected  # data center GPUs have ECC
    between = [later.time - sooner.time for sooner, later in itertools.pairwise(samples)]
    assert sorted(between)[len(between) // 2] == pytest.approx(SECONDS, rel=0.5)
    assert max(max(sample.utilisation) for sample in samples) > 10  # they did work


def test_the_gpus_are_those_that_nvidia_smi_lists(trained, smi):
    found = read_gpu_events(RunStore(trained.store("sampled", "dp2")).attempt(1).gpus(socket.gethostname()))[0]
    for gpu in found.gpus:
        said = smi[gpu.uuid]
        assert (str(gpu.index), gpu.name, found.driver) == (said["index"], said["name"], said["driver_version"])
        assert gpu.limit_watts == pytest.approx(float(said["power.limit"]), abs=1)
        assert gpu.default_limit_watts == pytest.approx(float(said["power.default_limit"]), abs=1)
        assert gpu.most_sm_mhz == float(said["clocks.max.sm"])


def test_the_report_draws_them_and_has_their_columns(trained):
    folder = trained.results("sampled", "report")
    assert (folder / "gpus.png").stat().st_size > 10_000 and "figure-gpus" in (folder / "index.html").read_text()
    head = (folder / "tables" / "runs.tsv").read_text().splitlines()[0].split("\t")
    assert {"gpus.watts_peak", "gpus.celsius_most", "gpus.power_capped", "energy.watts_per_gpu"} <= set(head)


def test_no_sampler_outlives_its_run(trained):
    said = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in said.splitlines() if "sample_gpus.py" in line and "/sampled/dp2/" in line]


def test_a_sample_costs_milliseconds(tmp_path):
    """By hand, 30 samples: processor time of the process, its start included."""
    script = str(Path(__file__).parents[3] / "workflow" / "scripts" / "sample_gpus.py")
    process = subprocess.Popen([sys.executable, script, f"--out={tmp_path / 'gpus.jsonl'}", f"--seconds={SECONDS}"])
    time.sleep(8)
    process.kill()
    _, _, used = os.wait4(process.pid, 0)
    samples = len(read_gpu_events(tmp_path / "gpus.jsonl")) - 1
    print(f"{samples} samples of all GPUs took {used.ru_utime + used.ru_stime:.2f} s of a processor")
    assert samples > 20 and used.ru_utime + used.ru_stime < 2
