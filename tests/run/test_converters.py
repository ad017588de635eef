"""megaboa.run.converters: a conversion's script on several ranks, on this machine and as a job's step."""

import sys

import pytest

from megaboa.config.models.resources import Launch
from megaboa.errors import InputError
from megaboa.records import ConversionSpec, Image, parse
from megaboa.run import converters, gpus
from megaboa.scheduler.ranks import Ended
from megaboa.scheduler.slurm import allocation
from megaboa.scheduler.slurm.queries import Job

ENV = (
    "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'], *sys.argv[1:])"
)
FAILS = "import os, sys, time; sys.exit('no such tensor') if os.environ['RANK'] == '1' else time.sleep(60)"


def wanted(tp=2, image=None, device="cpu", gpus_per_node=2, nodes=1, **start):
    asked = {"layout": {"tp": tp, "pp": 1, "ep": 1}, "nodes": nodes, "gpus_per_node": gpus_per_node}
    asked |= {"cpus_per_rank": 3, "device": device, "start": Launch().model_dump(mode="json") | start, "image": image}
    return parse(ConversionSpec, asked, "a conversion")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_every_rank_knows_who_it_is_and_what_part_it_has(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENV)
    said = converters.run(wanted(), None, [str(script), "--out=x"], tmp_path / "logs")
    assert said.splitlines() == [f"{rank} 2 3 --out=x --tp=2 --pp=1 --ep=1" for rank in (0, 1)]


def test_one_that_fails_ends_the_others_and_is_named_with_its_words(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    with pytest.raises(InputError, match=r"^rank 1 ended with exit code 1: no such tensor; see \S+rank-1.log$"):
        converters.run(wanted(), None, [str(script)], tmp_path / "logs")


LOSES_ITS_PEER = """\
import os, signal, sys, time
from pathlib import Path
logs, begun = (Path(__file__).with_name(name) for name in ("logs", "begun"))
if os.environ["RANK"] == "0":  # it ends first, and knows nothing
    while not begun.exists():
        time.sleep(0.01)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its words come in any case
begun.touch()
while "Connection closed" not in (logs / "rank-0.log").read_text():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("end", "said", "printed"),
    [
        (
            "print('FAIL head: gone', flush=True); sys.exit('error: the disk is full')",
            "^the disk is full$",
            "FAIL head: gone",
        ),
        ("raise KeyError('lm_head')", r"^rank 1 failed: KeyError: 'lm_head'; see \S+rank-1.log$", ""),
    ],
)
def test_the_rank_that_is_the_cause_says_it_in_one_sentence(tmp_path, capsys, end, said, printed):
    script = tmp_path / "script.py"
    script.write_text(LOSES_ITS_PEER + end)
    with pytest.raises(InputError, match=said):
        converters.run(wanted(), None, [str(script)], tmp_path / "logs")
    assert capsys.readouterr().out.strip() == printed


def test_logs_are_those_of_the_last_call(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-7.log").write_text("of an earlier call")
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    assert converters.run(wanted(), None, [str(script)], tmp_path / "logs") == "done\ndone\n"


def test_in_a_job_they_are_a_step_of_it_in_the_image(tmp_path, monkeypatch, fake_command):
    seen = []

    class Step:
        def __init__(self, job, command, name, logs, environment, *more, **named):
            seen.append((command, environment))

        def poll(self):
            return Ended()

    monkeypatch.setattr(allocation, "SrunRanks", Step)
    monkeypatch.setattr(allocation, "_show_job_once_reachable", lambda job: Job(job, "RUNNING", nodes="n[1-2]"))
    monkeypatch.setattr(allocation.queries, "hostnames", lambda nodes: ["n1", "n2"])
    monkeypatch.setattr(allocation.queries, "cluster", lambda: "lab")
    fake_command("srun", "true")
    monkeypatch.setattr(allocation.queries, "available", lambda: True)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1,2,3")
    image = {"runtime": "pyxis", "mounts": ["/w:/w:rw"], "secrets": [], "workdir": "/w", "variables": {"MINE": "1"}}
    asked = wanted(tp=8, image=image, device="cuda", gpus_per_node=4, nodes=2, network="infiniband")
    image = Image(runtime="pyxis", digest="sha256:1", path="/i.sqsh")
    converters.run(asked, image, ["megaboa", "import-model", "--out=x"], tmp_path / "logs")
    unpacked, (command, environment) = seen
    (name,) = [word for word in unpacked[0] if word.startswith("--container-name=")]
    assert unpacked[0][-1] == "true" and name in command, "once on both hosts, and used by the ranks"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--gres=gpu:4", "--cpus-per-task=12"} <= set(command)
    assert "--container-image=/i.sqsh" in command and "--container-mounts=/w:/w:rw" in command
    assert str(allocation.START_NODE) in command and not any(word.startswith("--fork") for word in command)
    assert command[-7:] == ["python3", "megaboa", "import-model", "--out=x", "--tp=8", "--pp=1", "--ep=1"]
    assert environment["MINE"] == "1" and environment["NCCL_IB_TIMEOUT"] == "22"


def test_nodes_that_are_not_here_are_asked_of_slurm(tmp_path):
    with pytest.raises(InputError, match=r"conversion\.nodes is 2, and here is 1: call `snakemake --profile slurm`"):
        converters.run(wanted(tp=8, nodes=2), None, ["script.py"], tmp_path / "logs")


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="there is no /no/python here"):
        converters.run(wanted(python="/no/python"), None, ["script.py"], tmp_path / "logs")


def test_the_python_is_the_one_of_training(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.executable)")
    said = converters.run(wanted(python=sys.executable), None, [str(script)], tmp_path / "logs")
    assert said.splitlines() == [sys.executable] * 2


@pytest.mark.parametrize(("listed", "refused"), [(1, True), (2, False)])
def test_gpus_are_counted_before_ranks_start(tmp_path, monkeypatch, listed, refused):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "query", lambda: [{"index": number, "uuid": f"GPU-{number}"} for number in range(listed)])
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    if refused:
        with pytest.raises(
            InputError, match=r"2 ranks, and this machine has 1 GPU: make it smaller \(`models.<name>.conversion`"
        ):
            converters.run(wanted(device="cuda"), None, [str(script)], tmp_path / "logs")
    else:
        assert converters.run(wanted(device="cuda"), None, [str(script)], tmp_path / "logs") == "done\ndone\n"
