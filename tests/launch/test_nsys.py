"""Nsight Systems around some ranks: exactly those, by whatever name they are told who they are."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megaboa.launch.nsys import nsys_arguments, wrapped
from megaboa.scheduler.local import start, wait

SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "profile_rank.py"
SAY = [sys.executable, "-c", "import os; print('rank', os.environ.get('RANK') or os.environ['SLURM_PROCID'])"]
# Stands for nsys where it isn't needed itself: writes down what it was told, and runs the command.
RECORDER = """\
for argument in "$@"; do case $argument in --output=*) out=${argument#--output=};; esac; done
echo "$@" > "$out"
while [ "${1#-}" != "$1" ] || [ "$1" = profile ]; do shift; done
exec "$@"
"""


def run_ranks(folder, ranks, nsys, world_size=3):
    command = wrapped(SAY, SCRIPT, ranks, folder / "tiny.dp3", nsys)
    ended = wait(start(command, world_size, folder, {}))
    logs = [(folder / f"rank-{rank}.log").read_text() for rank in range(world_size)]
    return ended, logs


def test_exactly_the_chosen_ranks_are_wrapped(tmp_path, fake_command):
    fake_command("nsys", RECORDER)
    nsys = nsys_arguments(["cuda", "nvtx"], ["--enable=efa_metrics"])
    ended, logs = run_ranks(tmp_path, [0, 2], nsys)
    assert ended.ok and logs == ["rank 0\n", "rank 1\n", "rank 2\n"]
    host = socket.gethostname()
    reports = sorted(path.name for path in tmp_path.glob("*.nsys-rep"))
    assert reports == [f"tiny.dp3.{host}.rank-{rank}.nsys-rep" for rank in (0, 2)]
    said = (tmp_path / reports[0]).read_text()
    assert said.startswith("profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop")
    assert "--cuda-graph-trace=node" in said and "--enable=efa_metrics --output=" in said


def test_a_task_of_slurm_knows_its_rank_too(tmp_path, fake_command):
    fake_command("nsys", RECORDER)
    command = wrapped(SAY, SCRIPT, [5], tmp_path / "a.b", [])
    for rank in ("4", "5"):
        environment = {name: value for name, value in os.environ.items() if name != "RANK"}
        environment |= {"SLURM_PROCID": rank, "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"rank {rank}\n"
    assert [path.name for path in tmp_path.glob("*.nsys-rep")] == [f"a.b.{socket.gethostname()}.rank-5.nsys-rep"]


@pytest.mark.parametrize(
    "network, given, plugin, expected",
    [
        ("efa", [], True, ["1", "4"]),
        ("efa", [], False, []),  # an nsys that doesn't have it ends at once where it is asked for it
        ("efa", ["--enable=network_interface"], True, []),
        ("infiniband", [], True, []),
        (None, [], True, []),
    ],
)
def test_one_rank_of_a_node_samples_its_adapters_where_nsys_can(
    tmp_path, fake_command, network, given, plugin, expected
):
    """Two nodes of three ranks, of which two on the first and one on the second are captured."""
    fake_command("nsys", RECORDER)
    if plugin:
        (Path(shutil.which("nsys")).resolve().parent / "plugins" / "efa_metrics").mkdir(parents=True)
    command = wrapped(SAY, SCRIPT, [1, 2, 4], tmp_path / "a.b", given, network)
    for rank in range(6):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank % 3), "WORLD_SIZE": "6"}
        subprocess.run(command, env=environment, check=True)
    asked = {path.stem[-1]: path.read_text() for path in tmp_path.glob("*.nsys-rep")}
    assert sorted(asked) == ["1", "2", "4"]
    assert [rank for rank in sorted(asked) if "--enable=efa_metrics" in asked[rank]] == expected


def test_without_nsys_the_rank_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    ended, logs = run_ranks(tmp_path, [1], [], world_size=2)
    assert not ended.ok and "rank 1" in logs[1] and "set profile.tool to pytorch" in logs[1]


@pytest.mark.skipif(shutil.which("nsys") is None, reason="there is no nsys")
def test_the_real_nsys_writes_a_report_of_the_chosen_rank(tmp_path):
    """Without a GPU nobody would mark the steps, so that all is captured."""
    ended, logs = run_ranks(tmp_path, [1], ["--trace=osrt", "--sample=none", "--cpuctxsw=none"], world_size=2)
    assert ended.ok and logs[0] == "rank 0\n" and "rank 1" in logs[1]
    (report,) = tmp_path.glob("*.nsys-rep")
    assert report.name.endswith(".rank-1.nsys-rep")
