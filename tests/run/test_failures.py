"""megaboa.run.failures on what torch, NCCL, gloo, Megatron, Bridge and srun write."""

import re
import textwrap
from pathlib import Path

import pytest

from megaboa.causes import ACTIONS, CAUSES
from megaboa.run import failures
from megaboa.run.failures import Failure, classify
from megaboa.scheduler.ranks import Ended
from megaboa.scheduler.slurm.srun import read_end
from megaboa.store_paths import AttemptFolder

# What every log of ours begins with: an import that Bridge does without.
BEGINNING = """\
W1120 14:36:34.274000 10634 torch/utils/cpp_extension.py:178] No CUDA runtime is found, using CUDA_HOME='/usr/local'
INFO:megatron.bridge.utils.import_utils:Import of FP8GlobalStateManager from \
megatron.core.extensions.transformer_engine failed with: Traceback (most recent call last):
  File "/x/megatron/bridge/utils/import_utils.py", line 324, in safe_import_from
    return getattr(imported_module, symbol), True
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
AttributeError: module 'megatron.core.extensions.transformer_engine' has no attribute 'FP8GlobalStateManager'

[transformers] `torch_dtype` is deprecated! Use `dtype` instead!
WARNING:megatron.bridge.utils.fusions:gradient_accumulation_fusion requires either TransformerEngine or APEX.
"""
STEPS = """\
Starting training loop at iteration 0
Step Time : 0.06s GPU utilization: 0.0MODEL_TFLOP/s/GPU
[2026-11-20 14:45:43] iteration       12/      60 | consumed samples:           96 | elapsed time per iteration (ms): 80
  successfully saved checkpoint from iteration      10 to /s/checkpoints [ t 1/1, p 1/1 ]
"""


def raised(exception, rank=None, logged=False):
    """A log that ends with an exception, as torch prefixes it once ranks know each other."""
    trace = f'Traceback (most recent call last):\n  File "/x/train.py", line 633, in train\n    work()\n{exception}\n'
    prefix = f"[rank{rank}]: " if rank is not None else ""
    said = (
        f"ERROR:megatron.bridge.training.pretrain:Pretrain failed on rank={rank} with {exception}\n" if logged else ""
    )
    return BEGINNING + STEPS + said + textwrap.indent(trace, prefix)


GLOO_RESET = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:32688: "
    "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
)
GLOO_CLOSED = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:36"
)
GLOO_TIMEOUT = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
    "Timed out waiting 1800000ms for recv operation to complete"
)
GLOO_CONNECT = (
    "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
)
NCCL_REMOTE = """\
torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2027, \
remote process exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
NET/IB : Got completion from peer 10.0.0.2<46312> with status=12 opcode=0 len=0 vendor err 129"""
WATCHDOG = """\
[rank1]:[E1120 16:31:00.412 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=120, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600029 milliseconds \
before timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
"""
STORE_TIMEOUT = (
    "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
    "(n1, 29500)."
)
CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.02 GiB is free."
)
CPU_OOM = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 549755813888 bytes. Error code 12 (Cannot allocate memory)"
)
NCCL_OOM = """\
torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled cuda \
error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""
SLURM_OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."
ECC = (
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be "
    "asynchronously reported at some other API call, so the stacktrace below might be incorrect."
)
KERNEL_FAULT = (Path(__file__).parents[1] / "doctor" / "logs" / "h200_illegal_memory_access.log").read_text()
# Words of cudaGetErrorString (libcudart 13.0), and of torch around it.
PEER = "Invalid access of peer GPU memory over nvlink or a hardware error"  # a program's fault, too: driver_types.h
NOT_READY = (
    "Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: "
    "system not yet initialized"
)
MEGATRON_NAN = (
    "RuntimeError: Rank 0, node n1, device 0, iteration 13: Unexpected result nan "
    "(message='found NaN in local forward loss calculation')"
)
DISK_FULL_IN_SAVE = """\
torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0])
Traceback (most recent call last): (RANK 0)
  File "/x/torch/distributed/checkpoint/utils.py", line 252, in all_reduce
OSError: [Errno 28] No space left on device"""
DATA_MISSING = (
    "AssertionError: One or both of the .idx and .bin files cannot be found at the path prefix /store/corpora/text/text"
)
DAMAGED = "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"
UNKNOWN_KEYS = (
    "megatron.core.dist_checkpointing.core.CheckpointingException: Object shards are missing from the checkpoint"
)


@pytest.mark.parametrize(
    ("exception", "cause"),
    [
        (CUDA_OOM, "out_of_memory"),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", "out_of_memory"),
        ("RuntimeError: CUDA error: out of memory", "out_of_memory"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out_of_memory"),
        ("RuntimeError: CUDA driver error: out of memory", "out_of_memory"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "out_of_memory"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "out_of_memory"),
        (CPU_OOM, "out_of_memory"),
        (NCCL_OOM, "out_of_memory"),
        ("MemoryError", "out_of_memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "out_of_memory"),
        (DISK_FULL_IN_SAVE, "disk_full"),
        ("OSError: [Errno 122] Disk quota exceeded: '/s/x'", "disk_full"),
        (ECC, "gpu_failure"),
        ("torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution", "gpu_failure"),
        (NCCL_OOM.replace("out of memory", "uncorrectable NVLink error detected during the execution"), "gpu_failure"),
        (f"RuntimeError: Unexpected error from cudaGetDeviceCount(). {NOT_READY}", "gpu_failure"),
        ("RuntimeError: No CUDA GPUs: no CUDA-capable device is detected", "gpu_failure"),
        (KERNEL_FAULT, "crash"),
        (f"torch.AcceleratorError: CUDA error: {PEER}", "crash"),
        ("RuntimeError: CUDA error: device-side assert triggered", "crash"),
        (MEGATRON_NAN, "nan"),
        ("ModuleNotFoundError: No module named 'transformer_engine'", "import_error"),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory", "import_error"),
        ("AssertionError: bad header, cannot read: /store/corpora/text/text.idx", "data"),
        (DATA_MISSING, "data"),
        ("ValueError: mmap length is greater than file size", "data"),
        ("ValueError: buffer is smaller than requested size", "data"),
        (GLOO_RESET, "transient"),
        (GLOO_CLOSED, "transient"),
        (GLOO_TIMEOUT, "transient"),
        (GLOO_CONNECT, "transient"),
        (NCCL_REMOTE, "transient"),
        (STORE_TIMEOUT, "transient"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "transient"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "transient"),
        ("OSError: [Errno 116] Stale file handle: '/s/x'", "transient"),
        ("OSError: [Errno 5] Input/output error", "transient"),
        ("OSError: [Errno 98] Address already in use", "transient"),
        ("KeyError: 'tokens'", "crash"),
        ("RuntimeError: The size of tensor a (3) must match the size of tensor b (4)", "crash"),
    ],
)
@pytest.mark.parametrize("rank", [None, 0])
def test_one_rank_says_why(exception, cause, rank):
    failure = classify(Ended(0, 1), {None: "", 0: raised(exception, rank)}, steps=12)
    assert failure.cause == cause and failure.rank == 0
    assert failure.evidence and failure.evidence in raised(exception, rank)


def test_weights_of_another_shape_are_no_damage():
    """Trying again would not help."""
    said = "CheckpointingException: Global shape mismatch for loaded (torch.Size([2, 64])) and expected ((4, 64))"
    log = f"{BEGINNING}    raise CheckpointingException(_msg)\nmegatron.core.dist_checkpointing.core.{said}\n"
    failure = classify(Ended(0, 1), {0: log}, steps=0)
    assert failure.cause == "config" and "Global shape mismatch" in failure.evidence


@pytest.mark.parametrize("exception", [DAMAGED, "_pickle.UnpicklingError: invalid load key, '\\x00'.", UNKNOWN_KEYS])
def test_a_checkpoint_is_damaged_only_if_it_could_not_be_read(exception):
    logs = {0: raised(exception, 0)}
    assert classify(Ended(0, 1), logs, steps=0).cause == "damaged_checkpoint"
    assert classify(Ended(0, 1), logs, steps=3).cause == "crash"


def in_loading(exception, rank, function="_load_checkpoint_from_path"):
    return raised(exception, rank).replace("in train\n", f"in {function}\n")


@pytest.mark.parametrize("exception", ["EOFError", "KeyError: 'optimizer'", "zlib.error: Error -3", "BadZipFile: no"])
@pytest.mark.parametrize("function", ["load_checkpoint", "_load_checkpoint_from_path", "read_train_state"])
def test_whatever_ends_the_reading_of_a_checkpoint_is_the_checkpoints_fault(exception, function):
    logs = {None: "", 0: in_loading(GLOO_CLOSED, 0), 1: in_loading(exception, 1, function)}
    failure = classify(Ended(0, 1), logs, steps=0, resumed_from=10)
    assert failure == Failure("damaged_checkpoint", f"{exception} (while the checkpoint was read)", 1)
    assert classify(Ended(0, 1), logs, steps=0).cause != "damaged_checkpoint", "it began at the start"
    assert classify(Ended(0, 1), logs, steps=3, resumed_from=10).cause != "damaged_checkpoint"


def test_what_is_no_checkpoints_fault_while_one_is_read():
    for exception, cause in (
        (GLOO_CLOSED, "transient"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "out_of_memory"),
    ):
        logs = {0: in_loading(exception, 0), 1: in_loading(GLOO_CLOSED, 1)}
        assert classify(Ended(0, 1), logs, steps=0, resumed_from=10).cause == cause
    logs = {0: raised("EOFError", 0)}
    assert classify(Ended(0, 1), logs, steps=0, resumed_from=10).cause == "crash", "not in the code that reads it"


REFUSED = "ValueError: hidden_size must be divisible by num_attention_heads"


@pytest.mark.parametrize(
    "exception",
    [
        REFUSED,
        "AssertionError",
        "megaboa.bridge.cpu.refusal.RefusedOnCpu: device cpu has no fp8",
        "error: profile.tool: python has no viztracer",
    ],
)
def test_what_is_refused_before_the_first_step_is_the_settings_fault(exception):
    logs = {0: f"{BEGINNING}{exception}\n", 1: BEGINNING}
    assert classify(Ended(0, 1), logs, steps=0) == Failure("config", exception, 0)
    assert classify(Ended(0, 1), logs, steps=1) == Failure("crash", exception, 0)


def test_what_a_rank_says_by_the_way_is_no_refusal():
    assert classify(Ended(0, 1), {0: f"{BEGINNING}error: RPC failed\ntrying again\n"}, steps=0).cause == "crash"
    log = f"{BEGINNING}megaboa: model.gradient_accumulation_fusion=False (there is no kernel for it)\nbye\n"
    assert classify(Ended(0, 1), {0: log}, steps=0).cause == "crash"


def test_peers_of_a_rank_that_refuses_are_not_heard():
    logs = {0: raised(REFUSED, 0), 1: raised("RuntimeError: peer gone", 1)}
    assert classify(Ended(0, 1), logs, steps=0) == Failure("config", f"[rank0]: {REFUSED}", 0)


def test_the_last_exception_counts_not_one_that_was_dealt_with():
    log = BEGINNING + "KeyError: 'optional'\n\nDuring handling of the above exception, another exception occurred:\n\n"
    assert classify(Ended(0, 1), {0: log + raised(REFUSED, 0)}, 0).evidence == f"[rank0]: {REFUSED}"
    assert classify(Ended(0, 1), {0: log + raised(REFUSED, 0) + "[rank0]: bye\n"}, 9).evidence == f"[rank0]: {REFUSED}"


@pytest.mark.parametrize("steps", [0, 12])
def test_what_bridge_does_without_is_no_cause(steps):
    optional = BEGINNING.replace("AttributeError: module", "ModuleNotFoundError: No module named 'apex', module")
    failure = classify(Ended(0, 1), {0: BEGINNING + optional + "the end\n"}, steps)
    assert failure == Failure("crash", "the end", 0)


# Causes and victims


@pytest.mark.parametrize("victims", [GLOO_RESET, GLOO_CLOSED, NCCL_REMOTE])
@pytest.mark.parametrize(
    ("exception", "cause"),
    [(CUDA_OOM, "out_of_memory"), (ECC, "gpu_failure"), (MEGATRON_NAN, "nan"), (DISK_FULL_IN_SAVE, "disk_full")],
)
def test_lost_connections_of_the_others_are_no_cause(exception, cause, victims):
    logs = {rank: raised(victims, rank, logged=True) for rank in range(4)} | {2: raised(exception, 2, logged=True)}
    for first_seen in (0, 2):  # a victim may be seen to end before the cause
        failure = classify(Ended(first_seen, 1), logs, steps=12)
        assert (failure.cause, failure.rank) == (cause, 2)


@pytest.mark.parametrize("victims", [GLOO_RESET, GLOO_CLOSED, GLOO_TIMEOUT, NCCL_REMOTE])
@pytest.mark.parametrize("own", ["ValueError: sample 17 has 3 tokens", "KeyboardInterrupt"])
def test_lost_connections_of_the_others_are_no_cause_of_an_exception_that_nobody_knows(own, victims):
    """If it comes again at the same step the run stops, which it doesn't for a lost connection."""
    logs = {rank: raised(victims, rank, logged=True) for rank in range(4)} | {2: raised(own, 2, logged=True)}
    for first_seen in (0, 2):
        assert classify(Ended(first_seen, 1), logs, steps=12) == Failure("crash", f"[rank2]: {own}", 2)


@pytest.mark.parametrize("victims", [GLOO_RESET, GLOO_CLOSED, GLOO_TIMEOUT, NCCL_REMOTE])
def test_connections_that_all_have_lost_are_the_networks(victims):
    logs = {rank: raised(victims, rank, logged=True) for rank in range(4)}
    assert classify(Ended(0, 1), logs, steps=12).cause == "transient"


DATA_WORKER = "RuntimeError: DataLoader worker (pid 17) is killed by signal: Terminated."


@pytest.mark.parametrize(
    "logs",
    [
        {0: raised("requests.exceptions.HTTPError: 502") + STEPS + WATCHDOG, 1: raised(NCCL_REMOTE, 1)},
        {
            0: raised(NCCL_REMOTE, 0) + "Exception ignored in: <f>\nAttributeError: 'NoneType'\n",
            1: raised(NCCL_REMOTE, 1),
        },
        {0: raised(GLOO_RESET, 0), 1: raised(DATA_WORKER, 1)},
    ],
)
def test_what_a_rank_says_besides_a_lost_connection_is_no_cause(logs):
    assert classify(Ended(0, 1), logs, steps=12).cause == "transient"


def test_lost_connections_of_victims_hide_that_a_rank_was_killed():
    logs = {0: raised(GLOO_RESET, 0, logged=True), 1: BEGINNING + STEPS}
    failure = classify(Ended(1, -9, "n2"), logs, steps=12)
    assert failure == Failure("killed", "rank 1 on n2 was killed by SIGKILL", 1)


def test_a_rank_that_aborts_itself_says_why():
    logs = {0: BEGINNING + STEPS, 1: BEGINNING + STEPS + WATCHDOG}
    failure = classify(Ended(1, -6), logs, steps=12)
    assert (failure.cause, failure.rank) == ("transient", 1) and "Watchdog caught" in failure.evidence
    assert classify(Ended(0, -6), logs, steps=12).cause == "killed"


def test_a_rank_that_the_kernel_killed_for_its_memory_ran_out_of_memory():
    logs = {0: raised(GLOO_RESET, 0), 1: BEGINNING, None: f"{SLURM_OOM}\nsrun: error: n2: task 1: Out Of Memory\n"}
    assert classify(read_end(143, logs[None]), logs, 5).cause == "out_of_memory"
    assert classify(Ended(1, -9), logs, 5).cause == "out_of_memory"


def test_a_segmentation_fault_before_the_first_step_is_not_the_settings_fault():
    assert classify(Ended(0, -11), {0: BEGINNING + "KeyError: 'x'\n"}, steps=0).cause == "killed"


def test_an_exception_of_one_rank_is_found_although_srun_terminated_the_others():
    srun = """\
srun: error: n1: task 1: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-20T16:28:43 ***
srun: error: n1: task 0: Terminated
"""
    logs = {0: BEGINNING, 1: raised(REFUSED, 1), None: srun}
    assert classify(read_end(143, srun), logs, steps=0) == Failure("config", f"[rank1]: {REFUSED}", 1)
    assert classify(read_end(143, srun), logs, steps=9) == Failure("crash", f"[rank1]: {REFUSED}", 1)


# Nodes


def test_a_lost_node_is_named_and_goes_before_lost_connections():
    srun = """\
slurmstepd: error: *** STEP 13.0 ON n1 CANCELLED AT 2026-11-20T16:29:52 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***
srun: error: Node failure on n2
srun: error: n1: tasks 0-1: Terminated
"""
    failure = classify(read_end(143, srun), {None: srun, 0: raised(GLOO_CLOSED, 0)}, steps=12)
    assert (failure.cause, failure.rank, failure.nodes) == ("node_failure", None, ("n2",))


def test_a_broken_gpu_is_blamed_on_its_node_if_that_is_known():
    logs = {0: raised(GLOO_CLOSED, 0), 1: raised(ECC, 1)}
    assert classify(Ended(1, 1, "n2"), logs, steps=12).nodes == ("n2",)
    assert classify(Ended(0, 1, "n1"), logs, steps=12).nodes == ()  # n1 is a victim's
    assert classify(Ended(1, 1), logs, steps=12).nodes == ()


# No words


@pytest.mark.parametrize(
    ("ended", "logs", "expected"),
    [
        (Ended(), {0: BEGINNING}, Failure("crash", "every rank ended with 0, but before the last step")),
        (Ended(0, 3), {}, Failure("crash", "rank 0 ended with exit code 3", 0)),
        (Ended(0, 3), {0: ""}, Failure("crash", "rank 0 ended with exit code 3", 0)),
        (Ended(0, 3), {0: "first\nlast words \n\n"}, Failure("crash", "last words", 0)),
        (Ended(None, 1), {None: "srun: fatal: no\n"}, Failure("crash", "srun: fatal: no", None)),
        (Ended(0, -9), {}, Failure("killed", "rank 0 was killed by SIGKILL", 0)),
    ],
)
def test_where_nobody_says_why(ended, logs, expected):
    assert classify(ended, logs, steps=1) == expected


def test_a_failure_reads_well():
    assert str(Failure("out_of_memory", "CUDA out of memory")) == "out of memory: CUDA out of memory"


def test_evidence_is_short():
    failure = classify(Ended(0, 1), {0: "RuntimeError: CUDA out of memory " + "x" * 5000}, 1)
    assert failure.cause == "out_of_memory" and len(failure.evidence) == failures.EVIDENCE_LENGTH


def test_only_tails_are_read(tmp_path):
    long, missing = tmp_path / "rank-0.log", tmp_path / "rank-1.log"
    long.write_bytes(b"CUDA out of memory\n" + b"\xff" * failures.TAIL_BYTES + b"the end\n")
    tails = failures.Tails([(0, long), (1, missing)])
    assert list(tails) == [0] and tails[0].endswith("the end\n") and "memory" not in tails[0]


def test_a_long_line_takes_no_time():
    line = "step " + "a.b " * 16_000
    assert classify(Ended(0, 1), {0: line}, 1).cause == "crash"


def test_patterns_are_of_known_causes_and_have_no_groups():
    for end in CAUSES.values():
        assert end.action in ACTIONS, end  # every cause has a default
        assert all(re.compile(word).groups == 0 for word in end.patterns)


class Heard(dict):
    """Logs that remember who was asked."""

    def __init__(self, logs):
        super().__init__(logs)
        self.asked = set()

    def __getitem__(self, rank):
        self.asked.add(rank)
        return super().__getitem__(rank)


def test_thousands_of_ranks_are_not_asked_where_the_first_one_knows():
    logs = Heard({None: "", 3: raised(CUDA_OOM, 3), **{rank: raised(GLOO_RESET, rank) for rank in (0, 1, 2, 4)}})
    assert classify(Ended(3, 1), logs, steps=12).cause == "out_of_memory" and logs.asked == {None, 3}


def test_all_are_asked_where_the_first_one_is_a_victim():
    logs = Heard({None: "", 3: raised(GLOO_RESET, 3), 0: raised(GLOO_RESET, 0), 7: raised(CUDA_OOM, 7)})
    failure = classify(Ended(3, 1), logs, steps=12)
    assert (failure.cause, failure.rank) == ("out_of_memory", 7) and logs.asked == {None, 0, 3, 7}


IN_NO_IMAGE = """\
slurmstepd-n1: error: pyxis: failed to create container filesystem for image: /i.sqsh
slurmstepd-n1: error: pyxis:     \x1b[31m[ERROR]\x1b[0m No such file or directory: /i.sqsh
slurmstepd-n1: error: Failed to invoke spank plugin stack
"""


@pytest.mark.parametrize("place", [0, None])
def test_an_image_that_cannot_be_started(place, tmp_path):
    logs = {0: "", None: "srun: error: n1: task 0: Exited with exit code 1\n"}
    logs[place] = IN_NO_IMAGE + logs[place]
    failure = classify(Ended(0, 1, "n1"), logs, steps=0)
    assert failure.cause == "crash" and failure.evidence == (
        "the image can't be started: failed to create container filesystem for image: /i.sqsh: No such file or "
        "directory: /i.sqsh"
    )


@pytest.mark.parametrize("cut", [0, None])
def test_why_an_image_cannot_be_started_is_told_by_the_log_that_has_it(cut):
    """A host whose step was ended meanwhile has said that it failed, not why."""
    logs = {0: IN_NO_IMAGE, 1: "", None: IN_NO_IMAGE} | {cut: IN_NO_IMAGE.splitlines(keepends=True)[0]}
    assert classify(Ended(0, 1, "n1"), logs, steps=0).evidence.endswith("/i.sqsh: No such file or directory: /i.sqsh")


def test_codes_for_colours_are_no_words(tmp_path):
    (tmp_path / "rank-0.log").write_text("the reason\n\x1b[31m\x1b[0m\n")
    tails = failures.Tails([(0, tmp_path / "rank-0.log")])
    assert classify(Ended(0, 1), tails, steps=0).evidence == "the reason"


NODE_FAILED = "srun: error: n2: task 1: Exited with exit code 255\n"


def test_a_nodes_task_that_starts_no_rank_says_why(tmp_path):
    (tmp_path / "srun.log").write_text(NODE_FAILED)
    (tmp_path / "rank-0.log").write_text("")
    (tmp_path / "node-0.log").write_text("starts ranks 0 to 3\nRuntimeError: of a rank, which has a log for that\n")
    (tmp_path / "node-1.log").write_text("FATAL:   could not open image /i.sif\n")
    failure = classify(Ended(None, 255, "n2"), failures.tails_of(AttemptFolder(tmp_path)), steps=0)
    assert failure.evidence == "FATAL:   could not open image /i.sif"
    (tmp_path / "srun.log").unlink()
    assert failures.tails_of(AttemptFolder(tmp_path))[None] == "FATAL:   could not open image /i.sif\n"


def test_an_image_that_no_nodes_task_can_start_in(tmp_path):
    (tmp_path / "srun.log").write_text(NODE_FAILED)
    (tmp_path / "node-0.log").write_text(IN_NO_IMAGE)
    failure = classify(Ended(None, 1, "n1"), failures.tails_of(AttemptFolder(tmp_path)), steps=0)
    assert failure.evidence.startswith("the image can't be started: failed to create container filesystem")
