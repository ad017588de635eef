"""Every class of trouble: from what programs really say where that can be provoked here, else from their sources."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaboa.causes import CAUSES
from megaboa.check.facts import Facts, Kernels
from megaboa.doctor.troubles import ADVICE, FINER, Case, advice, trouble
from megaboa.layout import Layout
from megaboa.run.failures import classify
from megaboa.scheduler.ranks import Ended

H200 = Path(__file__).parent / "logs" / "h200_out_of_memory.log"  # the last line of a real rank

PROVOKED = {  # by a process that really does it
    "host_memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)); bytearray(2**30)",
    "disk_full": "open('/dev/full', 'w', buffering=1).write('a line\\n')",
    "import_error": "import no_such_package",
    "network": "import socket; socket.create_connection(('127.0.0.1', 9))",
    "data": "import mmap, tempfile; f = tempfile.TemporaryFile(); f.write(b'x'); f.flush(); mmap.mmap(f.fileno(), 99)",
    "config": "raise ValueError('num_attention_heads (6) must be a multiple of tensor_model_parallel_size (4).')",
    "quota": "import errno; raise OSError(errno.EDQUOT, __import__('os').strerror(errno.EDQUOT))",
}
NEEDING_TORCH = {
    "checkpoint": "import torch; torch.save([1], '/tmp/whole.pt'); data = open('/tmp/whole.pt', 'rb').read();"
    "open('/tmp/torn.pt', 'wb').write(data[:-99]); torch.load('/tmp/torn.pt')",
    "hub": "from transformers import AutoConfig; AutoConfig.from_pretrained('meta-llama/Llama-3.1-8B')",
}
AS_SOURCES_SAY = {  # neither GPUs, nor InfiniBand, nor a divergence is at hand
    "nan": "RuntimeError: found NaN in local grad norm for bucket #0 in backward pass before data-parallel",
    "communication": "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    "network": "RuntimeError: NCCL Error 2: unhandled system error; node1:811 [0] NCCL WARN NET/IB : Got async event",
}


def said(program: str, folder: Path) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    program = program.replace("/tmp/", f"{folder}/")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode
    return done.stderr


def named(log: str, ended: Ended | None = None, steps: int = 0):
    failure = classify(ended or Ended(0, 1), {0: log}, steps)
    return trouble(failure.cause, failure.evidence, {0: log})


@pytest.mark.parametrize("name", PROVOKED)
def test_what_programs_say_when_it_happens(name, tmp_path):
    found = named(said(PROVOKED[name], tmp_path))
    assert found.name == name
    assert found.evidence


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDING_TORCH)
def test_what_torch_and_transformers_say_when_it_happens(name, tmp_path):
    assert named(said(NEEDING_TORCH[name], tmp_path)).name == name


@pytest.mark.parametrize("name", AS_SOURCES_SAY)
def test_what_sources_say_of_what_cannot_happen_here(name):
    assert named(AS_SOURCES_SAY[name], steps=5).name == name


@pytest.mark.parametrize(
    ("line", "steps", "name"),
    [
        ("RuntimeError: CUDA driver error: out of memory", 3, "gpu_memory"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", 3, "gpu_memory"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", 3, "host_memory"),
        ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", 3, "node"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", 0, "no_kernels"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", 3, "no_kernels"),
        ("RuntimeError: CUDA error: device kernel image is invalid", 0, "no_kernels"),
    ],
)
def test_what_cuda_says(line, steps, name):
    assert named(f"Traceback (most recent call last):\n  File 'x.py'\n{line}\n", steps=steps).name == name


def test_an_h200_that_ran_out_of_memory():
    found = named(H200.read_text())
    assert found.name == "gpu_memory"
    assert "Tried to allocate 12.28 GiB" in found.evidence[0]


def test_a_graph_that_reached_outside_its_memory_on_an_h200():
    log = (H200.parent / "h200_illegal_memory_access.log").read_text()
    found = named(log, steps=3)
    assert found.name == "kernel_fault" and "illegal memory access" in found.evidence[0]
    graphs = Case(Facts(Layout(1), kernels=Kernels(graphs="full_iteration")))
    assert "model.cuda_graph_impl: none instead of full_iteration" in advice("kernel_fault", graphs)[0]
    assert not any("cuda_graph_impl" in line for line in advice("kernel_fault", Case()))


def test_data_of_a_recipe_is_not_in_the_store():
    assert "remove the corpus's folder" in advice("data", Case())[0]
    [own] = advice("data", Case(own_data=True, in_image=True))
    assert "recipe's config.dataset" in own and "image.mounts" in own


def test_a_killed_rank_leaves_no_words():
    found = named("training\n", Ended(0, -signal.SIGKILL), steps=5)
    assert found.name == "unknown" and found.evidence


@pytest.mark.parametrize(
    ("cause", "name"),
    [
        ("hang", "hang"),
        ("loss_spike", "divergence"),
        ("node_failure", "node"),
        ("preempted", "preemption"),
        ("time_limit", "time_limit"),
        ("cancelled", "cancelled"),
    ],
)
def test_what_the_supervisor_and_slurm_know_needs_no_log(cause, name):
    assert trouble(cause, "as SLURM says", {}).name == name


HEALTHY = """\
node1:811:811 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
node1:811:840 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
node1:811:840 [0] NCCL INFO NET/OFI Selected Provider is efa, EFA
"""


@pytest.mark.parametrize("cause", ["crash", "killed", "hang", "poisoned"])
def test_what_nccl_says_when_all_is_well_is_no_trouble_of_the_network(cause):
    found = trouble(cause, "ZeroDivisionError: division by zero", {0: HEALTHY})
    assert found.name != "network"
    assert found.evidence == ("ZeroDivisionError: division by zero",)


def test_the_supervisors_line_stays_the_first_beside_those_of_the_network():
    log = f"{HEALTHY}node1:811 [0] NCCL WARN NET/IB : Got async event : port error\n"
    for cause in ("crash", "poisoned"):
        found = trouble(cause, "step 7 failed twice in a row: SIGABRT", {0: log})
        assert found.name == "network"
        assert found.evidence[0] == "step 7 failed twice in a row: SIGABRT"
        assert found.evidence[1:] == ("node1:811 [0] NCCL WARN NET/IB : Got async event : port error",)


def test_every_cause_has_a_name_and_every_name_advice():
    assert {*(end.trouble for end in CAUSES.values()), *(name for _, _, name in FINER)} == set(ADVICE)
    assert {cause for causes, _, _ in FINER for cause in causes} <= set(CAUSES)
