"""megaboa.run.health: what a node finds out about itself, and who is to blame when all have answered."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaboa.config.models.resources import Launch
from megaboa.records import LaunchSpec, Start, parse, write
from megaboa.run import gpus, health, site
from megaboa.run.gpu_watch import Watch
from megaboa.scheduler.ranks import ReservedPort

SCRIPT = Path(health.__file__).parents[2] / "check_node.py"
FIELDS = [*gpus.FIELDS, *gpus.OPTIONAL_FIELDS]
# Two H200 as driver 580.159.04 shows them.
H200 = """\
0, GPU-09e6f601-e14b-ad55-9d71-050fb2ff2479, NVIDIA H200, 00000000:00:06.0, 143771, 0, 580.159.04, 0, [N/A], No, No, None
1, GPU-27601621-658f-4cb4-b29f-8a49eb98abd8, NVIDIA H200, 00000000:00:07.0, 143771, 0, 580.159.04, 0, [N/A], No, No, None
"""  # noqa: E501


def gpu(**changed):
    return {**gpus.parse(H200, FIELDS)[0], **{key.replace("__", "."): value for key, value in changed.items()}}


def test_only_the_standard_library_is_needed():
    code = "import sys, megaboa.run.health, megaboa.run.health_rank, megaboa.launch.networks; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    third_party = {name.partition(".")[0] for name in found.stdout.split()} - set(sys.stdlib_module_names)
    assert third_party <= {"megaboa", "__main__"}


# nvidia-smi


def test_nvidia_smis_answer_is_read_and_what_it_does_not_know_is_none():
    first, second = gpus.parse(H200, FIELDS)
    assert first["name"] == "NVIDIA H200" and first["memory.total"] == "143771"
    assert first["retired_pages.pending"] is None and first["gpu_recovery_action"] == "None"
    assert second["index"] == "1" and second["pci.bus_id"] == "00000000:00:07.0"
    assert gpus.parse("0, [Not Supported], N/A, \n", ["a", "b", "c", "d"]) == [
        {"a": "0", "b": None, "c": None, "d": None}
    ]
    assert gpus.parse("\n", FIELDS) == []
    [part] = gpus.parse(H200.splitlines()[0].replace("143771, 0", "[Insufficient Permissions], [N/A]"), FIELDS)
    assert gpus.problems(part, memory_gib=140) == [], "a GPU in parts, asked by a user who isn't root"
    with pytest.raises(ValueError, match="No devices were found"):
        gpus.parse("No devices were found\n", FIELDS)


def test_a_field_that_the_driver_does_not_know_is_recognized():
    assert gpus.unknown_field('Field "gpu_recovery_action" is not a valid field to query.\n\n') == "gpu_recovery_action"
    assert gpus.unknown_field(H200) is None


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [
        (None, ["0", "1"]),
        ("", []),  # as the CPU backend hides them
        ("1", ["1"]),
        ("0,1", ["0", "1"]),
        ("GPU-27601621", ["1"]),
        ("7", []),
    ],
)
def test_only_the_jobs_own_gpus_count(chosen, indices):
    assert [gpu["index"] for gpu in gpus.visible(gpus.parse(H200, FIELDS), chosen)] == indices


def test_parts_of_a_gpu_count_though_they_are_not_listed():
    listed = gpus.parse(H200, FIELDS)
    assert gpus.visible(listed, "MIG-1f2e, MIG-3d4c") == [] and gpus.count(listed, "MIG-1f2e, MIG-3d4c") == 2
    assert gpus.count(listed, None) == 2 and gpus.count(listed, "1") == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"memory__used": "640"}, None),
        ({"memory__used": "70123"}, "68.5 GiB of memory are in use by other processes"),
        ({"ecc__errors__uncorrected__volatile__total": "3"}, "3 uncorrected memory errors"),
        ({"ecc__errors__uncorrected__volatile__total": None}, None),
        ({"retired_pages__pending": "Yes"}, "wait to be retired"),
        ({"remapped_rows__pending": "Yes"}, "wait to be remapped"),
        ({"remapped_rows__pending": "1"}, "wait to be remapped"),
        ({"remapped_rows__failure": "Yes"}, "couldn't be remapped"),
        ({"gpu_recovery_action": "Reset"}, "asks for its recovery: Reset"),
        ({"gpu_recovery_action": None}, None),
        ({"memory__total": "[GPU requires reset]"}, "memory.total reads [GPU requires reset]"),
        ({"memory__total": "81559"}, "79.6 GiB of memory instead of 140"),
    ],
)
def test_what_the_driver_reports_is_a_problem_or_is_not(changed, said):
    found = gpus.problems(gpu(**changed), memory_gib=140)
    assert found == [] if said is None else len(found) == 1 and found[0].startswith("GPU 0: ") and said in found[0]


def test_memory_is_measured_with_the_slack_of_its_name():
    assert gpus.problems(gpu(memory__total="81559"), memory_gib=80) == []  # an H100 with "80 GB"
    assert gpus.problems(gpu(memory__total="183359"), memory_gib=192) == []  # a B200 with "192 GB"
    assert gpus.problems(gpu(memory__total="40960"), memory_gib=None) == []


LOG = """\
[    4.031011] NVRM: Persistence mode is deprecated and will be removed in a future release.
[  500.250000] NVRM: Xid (PCI:0000:00:06): 79, pid=1234, name=python, GPU has fallen off the bus.
[99000.500000] NVRM: Xid (PCI:0000:00:06): 31, pid=1234, name=python, Ch 00000008, intr 00000000. MMU Fault
[99500.000000] NVRM: Xid (PCI:0000:00:07): 95, pid='<unknown>', name=<unknown>, Uncontained: LTC TAG (0x2,0x0)
[99500.100000] NVRM: Xid (PCI:0000:00:07 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9)
[99600.000000] NVRM: Xid (PCI:0000:c1:00): 48, pid=99, An uncorrectable double bit error (DBE) has been detected
"""


def test_xid_lines_are_read_with_their_age():
    xids = gpus.parse_xids(LOG, uptime=100_000)
    assert [(xid.number, xid.pci) for xid in xids] == [
        (79, "0000:00:06"),
        (31, "0000:00:06"),
        (95, "0000:00:07"),
        (94, "0000:00:07"),
        (48, "0000:c1:00"),
    ]
    assert xids[2].age == 500 and xids[0].text.endswith("fallen off the bus.")


def test_only_recent_faults_of_the_hardware_of_own_gpus_count():
    found = gpus.xid_problems(gpus.parse_xids(LOG, uptime=100_000), gpus.parse(H200, FIELDS))
    assert len(found) == 1 and found[0].startswith("GPU 1: Xid 95 ")  # 79 is old, 31 a program's, 48 another job's GPU
    young = gpus.xid_problems(gpus.parse_xids(LOG, uptime=600), gpus.parse(H200, FIELDS))
    assert [text[:14] for text in young] == ["GPU 0: Xid 79 ", "GPU 1: Xid 95 "]


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A nvidia-smi that knows some fields only, and answers with the given text for these."""

    def install(answer, unknown=(), code=0):
        script = tmp_path / "bin" / "nvidia-smi"
        script.parent.mkdir(exist_ok=True)
        refusals = "".join(
            f"case $1 in *{name}*) echo 'Field \"{name}\" is not a valid field to query.'; exit 2;; esac\n"
            for name in unknown
        )
        script.write_text(f"#!/bin/sh\n{refusals}cat <<'END'\n{answer}END\nexit {code}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(health, "OCCUPIED_PATIENCE_SECONDS", 0)

    return install


def ask_driver(count, memory_gib=None):
    result = health.Result("n1", 0)
    return health.check_gpus(count, memory_gib, result), result


def test_healthy_gpus_pass(smi):
    smi(H200)
    complete, result = ask_driver(2, 141)
    assert complete and result.problems == []
    assert [gpu["uuid"][:8] for gpu in result.measured["gpus"]] == ["GPU-09e6", "GPU-2760"]


def test_gpus_with_less_memory_than_the_run_was_planned_for_are_a_problem(smi, tmp_path):
    smi(H200)
    node = socket.gethostname()
    start = parse(Start, Launch().model_dump(mode="json"), "a test")
    launch = LaunchSpec(gpus_per_node=4, start=start)  # so that nothing is started on the two

    def problems(gpu):
        place = SimpleNamespace(job="17", nodes=[node], start_on_nodes=lambda command, *_: subprocess.Popen(command))
        return site.check_nodes(place, replace(launch, gpu=gpu), "cuda", tmp_path / "health", os.environ).nodes[node]

    assert problems("h200-141g") == problems(None) == ["2 GPUs instead of 4"]
    assert problems("b200-192g")[:2] == [f"GPU {n}: 140.4 GiB of memory instead of 192" for n in (0, 1)]


def test_a_job_on_parts_of_a_gpu_has_them(smi, monkeypatch):
    smi(H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1f2e")
    complete, result = ask_driver(1)
    assert complete and result.problems == []


def test_an_older_driver_is_asked_without_the_fields_it_does_not_know(smi):
    smi(
        "0, GPU-1, NVIDIA A100-SXM4-80GB, 00000000:07:00.0, 81920, 4, 525.60.13, 0, [N/A]\n",
        unknown=["remapped_rows.pending", "remapped_rows.failure", "gpu_recovery_action"],
    )
    complete, result = ask_driver(1, 80)
    assert complete and result.problems == []
    assert "gpu_recovery_action" not in result.measured["gpus"][0]


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (H200, 0, "2 GPUs instead of 4"),
        ("No devices were found\n", 6, "nvidia-smi fails: exit code 6: No devices were found"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9, "couldn't communicate"),
        ("Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n", 255, "device handle"),
    ],
)
def test_missing_gpus_are_a_problem_and_no_rank_is_started(smi, answer, code, said):
    smi(answer, code=code)
    complete, result = ask_driver(4)
    assert not complete and len(result.problems) == 1 and said in result.problems[0]


def test_a_node_without_a_driver_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    complete, result = ask_driver(1)
    assert not complete and "nvidia-smi isn't there" in result.problems[0]


# the folder


def test_a_folder_is_written_read_and_measured(tmp_path):
    problems = []
    measured = health.measure_folder(tmp_path, problems)
    assert problems == [] and measured["free_bytes"] > 0 and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path):
    problems = []
    health.measure_folder(tmp_path / "missing", problems)
    assert len(problems) == 1 and problems[0].endswith("can't write there: No such file or directory")


# who is to blame


def answer(out, node, number, *, problems=(), stage="done", reached=True, missing=(), error=None):
    result = health.Result(node, number, problems=list(problems), stage=stage, reached=reached, missing=list(missing))
    result.error = error
    return result.write(out)


NODES = ["n0", "n1", "n2", "n3", "n4"]
FAILED = {"error": "the all-reduce over 5 nodes failed: not done in time"}


def everyone(out, changed=None, **otherwise):
    for number, node in enumerate(NODES):
        answer(out, node, number, **{**otherwise, **(changed or {}).get(node, {})})


def blamed(out, nodes=NODES):
    return {node: problems for node, problems in health.verdict(out, nodes).items() if problems}


def test_fit_nodes_have_no_problems(tmp_path):
    everyone(tmp_path)
    assert health.verdict(tmp_path, NODES) == {node: [] for node in NODES}
    assert json.loads((tmp_path / "n3.json").read_text())["ok"] is True


def test_a_dead_node_is_blamed_and_not_those_that_waited_for_it(tmp_path):
    everyone(tmp_path, error="waited for 1 of 5 nodes until the time-out", missing=[2])
    (tmp_path / "n2.json").unlink()
    assert blamed(tmp_path) == {"n2": ["no answer within 30 s"]}
    assert health.verdict(tmp_path, NODES, seconds=60)["n2"] == ["no answer within 60 s"]
    (tmp_path / "n2.json").write_text("{torn")
    assert list(blamed(tmp_path)) == ["n2"]


@pytest.mark.parametrize(
    ("nodes", "silent", "blamed_for_it"), [(2, 1, True), (5, 1, True), (5, 2, False), (20, 2, True), (20, 3, False)]
)
def test_silence_is_blamed_where_few_are_silent(tmp_path, nodes, silent, blamed_for_it):
    names = [f"m{number}" for number in range(nodes)]
    for number in range(silent, nodes):
        answer(tmp_path, names[number], number)
    found = {node: problems for node, problems in health.verdict(tmp_path, names, waited=91.4).items() if problems}
    if blamed_for_it:
        assert found == {node: ["no answer within 91 s"] for node in names[:silent]}
    else:
        assert found == {node: [f"{silent} of {nodes} nodes gave no answer within 91 s"] for node in names}


def test_where_many_are_silent_a_problem_is_still_one(tmp_path):
    answer(tmp_path, "n0", 0, problems=["GPU 3: fell off"])
    answer(tmp_path, "n1", 1)
    assert blamed(tmp_path) == {"n0": ["GPU 3: fell off"]}


def test_a_node_that_began_late_is_not_blamed_for_what_the_others_missed(tmp_path):
    everyone(tmp_path, {"n4": FAILED}, error="waited for 1 of 5 nodes until the time-out", missing=[4])
    for number, node in enumerate(NODES):
        health.mark_of(tmp_path, node).touch()
        os.utime(health.mark_of(tmp_path, node), (0, 1000 + number))
    assert list(blamed(tmp_path)) == ["n4"]
    os.utime(health.mark_of(tmp_path, "n4"), (0, 1000 + health.LATE_SHARE * health.SECONDS + 1))
    assert list(blamed(tmp_path)) == NODES


def test_a_problem_of_its_own_explains_the_failure_of_the_others(tmp_path):
    broken = {"problems": ["GPU 3: 1 uncorrected memory errors since the driver was loaded"], "reached": False}
    everyone(tmp_path, {"n1": broken}, **FAILED)
    assert blamed(tmp_path) == {"n1": broken["problems"]}
    assert json.loads((tmp_path / "n1.json").read_text())["ok"] is False


def test_a_node_that_stopped_after_its_own_tests_is_blamed(tmp_path):
    everyone(tmp_path, {"n4": {"stage": "local", "error": None}}, **FAILED)
    assert list(blamed(tmp_path)) == ["n4"]


def test_a_node_that_the_others_missed_is_blamed_whatever_it_says_itself(tmp_path):
    everyone(tmp_path, {"n4": FAILED}, error="waited for 1 of 5 nodes until the time-out", missing=[4])
    assert blamed(tmp_path) == {"n4": ["the other nodes timed out waiting for it"]}


def test_a_node_that_cannot_reach_the_first_is_blamed(tmp_path):
    everyone(tmp_path, {"n3": {"reached": False, "error": "can't reach the first node"}}, **FAILED)
    assert blamed(tmp_path) == {"n3": ["can't reach the first node"]}


def test_the_first_node_is_blamed_if_nobody_reaches_it(tmp_path):
    alone = {"reached": True, "missing": [1, 2, 3, 4], "error": "waited for 4 of 5 nodes until the time-out"}
    everyone(tmp_path, {"n0": alone}, reached=False, error="can't reach the first node")
    assert blamed(tmp_path) == {"n0": ["no other node can reach it"]}


@pytest.mark.parametrize(
    "changed",
    [
        {},  # all were there, and the all-reduce failed
        {"n1": {"stage": "local"}, "n2": {"stage": "local"}, **{n: {"stage": "local"} for n in ("n0", "n3", "n4")}},
        {n: {"reached": False} for n in ("n2", "n3", "n4")},
    ],
)
def test_where_nobody_can_be_singled_out_all_carry_the_error(tmp_path, changed):
    everyone(tmp_path, changed, **FAILED)
    assert list(blamed(tmp_path)) == NODES


def test_of_two_nodes_that_do_not_meet_neither_is_preferred(tmp_path):
    answer(tmp_path, "n0", 0, missing=[1], error="waited for 1 of 2 nodes until the time-out")
    answer(tmp_path, "n1", 1, reached=False, error="can't reach the first node")
    assert list(blamed(tmp_path, ["n0", "n1"])) == ["n0", "n1"]


# with processes


def start(out, *arguments, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER_"))}
    return subprocess.Popen(
        [sys.executable, SCRIPT, "--out", out, *map(str, arguments)],
        env={**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_results_of_a_node_are_written_under_the_name_that_slurm_gives_it(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n17")
    assert health.node_name() == "n17"
    monkeypatch.delenv("SLURMD_NODENAME")
    assert health.node_name() == os.uname().nodename


def test_gpus_that_are_missing_are_written_down_at_once(smi, tmp_path):
    smi(H200)
    process = start(tmp_path / "out", "--gpus", 8, SLURMD_NODENAME="n1")
    assert "2 GPUs instead of 8" in process.communicate(timeout=120)[0] and process.returncode == 0
    result = json.loads((tmp_path / "out" / "n1.json").read_text())
    assert result["stage"] == "done" and not result["ok"] and len(result["measured"]["gpus"]) == 2


def test_a_driver_that_hangs_is_a_result_too(smi, tmp_path):
    smi(H200)
    hanging = tmp_path / "bin" / "nvidia-smi"
    hanging.write_text("#!/bin/sh\nexec sleep 5\n")
    process = start(tmp_path / "out", "--gpus", 1, "--seconds", 1, SLURMD_NODENAME="n1")
    process.communicate(timeout=120)
    result = json.loads((tmp_path / "out" / "n1.json").read_text())
    assert process.returncode == 0 and result["problems"] == ["not done within 1 s: it hangs in nvidia-smi"]


def test_a_rank_that_fails_or_computes_wrongly_is_named(tmp_path):
    logs = [tmp_path / "0.log", tmp_path / "1.log", tmp_path / "2.log"]
    right = '{"said": "started"}\nNCCL version 2.28.3\n\n{"said": "multiply", "wrong": 0, "tflops": 700.0}\n'
    logs[0].write_text(right)
    logs[1].write_text(right.replace('"wrong": 0', '"wrong": 12'))
    logs[2].write_text(
        '{"said": "started"}\n{"said": "failed", "error": "AcceleratorError: CUDA error: unknown error"}\n'
    )
    result = health.Result("n1", 0)
    health.judge_node([health.said(log) for log in logs], logs, 3, result, Watch(()))
    assert result.problems == [
        "GPU 1: 12 wrong numbers in a product of matrices",
        "GPU 2: no result of multiplying matrices: AcceleratorError: CUDA error: unknown error",
    ]
    assert result.measured["tflops"] == [700.0, 700.0, None]


@pytest.mark.slow
def test_a_node_alone_multiplies_matrices(tmp_path):
    process = start(tmp_path, "--folder", tmp_path, "--seconds", 600, SLURMD_NODENAME="n1")
    assert process.communicate(timeout=660)[0] == "n1: ok\n"
    measured = json.loads((tmp_path / "n1.json").read_text())["measured"]
    assert measured["tflops"][0] > 0 and measured["folder"]["free_bytes"] > 0


def start_nodes(out, numbers, world, seconds):
    port = ReservedPort()
    return port, [
        start(
            out,
            "--seconds",
            seconds,
            SLURM_NTASKS=str(world),
            SLURM_PROCID=str(number),
            SLURMD_NODENAME=f"n{number}",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port.number),
        )
        for number in numbers
    ]


@pytest.mark.slow
def test_two_nodes_reduce_with_each_other(tmp_path):
    port, nodes = start_nodes(tmp_path, [0, 1], 2, 600)
    said = {node.communicate(timeout=660)[0] for node in nodes}
    port.close()
    assert said == {"n0: ok\n", "n1: ok\n"}
    assert health.verdict(tmp_path, ["n0", "n1"]) == {"n0": [], "n1": []}
    measured = json.loads((tmp_path / "n1.json").read_text())["measured"]
    assert measured["nodes_gb_per_second"] > 0 and measured["nodes_all_to_all_gb_per_second"] > 0


@pytest.mark.slow
def test_of_three_nodes_the_one_that_never_came_is_blamed(tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    slow.mkdir()
    # An interpreter that starts slowly, as from a busy file system, has less time left, not a later deadline.
    (slow / "sitecustomize.py").write_text("import time; time.sleep(2)\n")
    monkeypatch.setenv("PYTHONPATH", str(slow))
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    seconds = 45 + 4 * round(time.monotonic() - began)
    port, nodes = start_nodes(tmp_path, [0, 2], 3, seconds)
    said = [node.communicate(timeout=3 * seconds)[0] for node in nodes]
    # The first to give up says it; when that is the first node, the other loses the place where they meet.
    assert any("until the time-out" in words for words in said), said
    port.close()
    assert health.verdict(tmp_path, ["n0", "n1", "n2"], 20) == {"n0": [], "n1": ["no answer within 20 s"], "n2": []}
    write(tmp_path / "n1.json", replace(health.Result("n1", 1, stage="done").write(tmp_path), ok=True))
    assert health.verdict(tmp_path, ["n0", "n1", "n2"], 20)["n1"] == ["the other nodes timed out waiting for it"]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_a_single_wrong_number_in_the_product_is_seen(wrong, monkeypatch):
    import torch

    from megaboa.run import health_rank

    plain = torch.Tensor.__matmul__

    def product(left, right):
        result = plain(left, right)
        if wrong:
            result[3, 5] += 1
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert health_rank.multiply(torch.device("cpu"), 128)["wrong"] == (2 if wrong else 0)
