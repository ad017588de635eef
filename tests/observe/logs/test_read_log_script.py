"""`megaboa read-log`, as somebody calls it who has a log and no Snakemake."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from called import called
from log_texts import FIXTURES, START, step_line

MEGABOA = Path(__file__).parents[3] / "workflow" / "scripts" / "megaboa"


def read_log(*arguments, code=0):
    done = called("read-log", *arguments)
    assert done.returncode == code, done.stderr
    return done.stderr if code else json.loads(done.stdout)


def test_a_log_as_json():
    summary = read_log(FIXTURES / "bridge_one_gpu.log", "--peak-tflops", 989)
    assert summary["step_seconds"]["median"] == pytest.approx(0.38595)
    assert summary["mfu"] == {"median": pytest.approx(417.4 / 989), "peak_tflops": 989.0}


def test_standard_input_and_compressed_logs(tmp_path):
    text = (FIXTURES / "megatron_deepspeed.log").read_bytes()
    (tmp_path / "log.gz").write_bytes(gzip.compress(text))
    read = subprocess.run([sys.executable, MEGABOA, "read-log", "-"], input=text, capture_output=True)
    assert read.returncode == 0, read.stderr.decode()
    assert json.loads(read.stdout) == read_log(tmp_path / "log.gz")


def test_logs_of_ranks_and_attempts_are_one_run(tmp_path):
    for attempt, steps in ((1, range(1, 11)), (2, range(6, 21))):
        folder = tmp_path / f"{attempt:02d}"
        folder.mkdir()
        (folder / "rank-0.log").write_text(START)
        (folder / "rank-1.log").write_text("".join(map(step_line, steps)))
    summary = read_log(*sorted(tmp_path.glob("*/rank-*.log")))
    assert (summary["attempts"], summary["ranks"]) == (2, ["0", "1"])
    assert (summary["steps"]["printed"], summary["steps"]["replayed"]) == (20, 5)


def test_a_log_that_is_not_there(tmp_path):
    assert "nothing.log: No such file" in read_log(tmp_path / "nothing.log", code=1)
