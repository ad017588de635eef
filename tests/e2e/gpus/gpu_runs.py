"""What the tests on GPUs share: small experiments, and the losses of their runs.

Each of the files here has its own runs. They run side by side on the same two GPUs: `make test-gpu`, on a machine that
`make setup DEVICE=cuda` has set up.
"""

import contextlib
import subprocess
import time

import pytest
from clone import edit, kill_group
from gpu_count import gpus

from megaboa.run.checkpoints import latest

on_two_gpus = [pytest.mark.slow, pytest.mark.skipif(gpus() < 2, reason=f"two GPUs are needed, and {gpus()} found")]

TWO = "resources.gpus_per_node: 2"
FP32_RUN, BF16_RUN = "training.precision: fp32", "training.precision: bf16_mixed"
GRAPH = {  # the whole iteration as one CUDA graph, in which nobody can look for NaN
    "model.cuda_graph_impl": "full_iteration",
    "model.cuda_graph_modules": "[]",
    "model.use_te_rng_tracker": "true",
    "ddp.check_for_nan_in_grad": "false",
    "rerun_state_machine.check_for_nan_in_loss": "false",
}
GRAPH_RUN = ", ".join(f"overrides.{name}: {value}" for name, value in GRAPH.items())
# So that fp32 means fp32: without it both libraries multiply in TF32.
MORE = """\
launch: {environment: {NVIDIA_TF32_OVERRIDE: "0"}}
resources: {cpus_per_rank: 2}
export: {runs: [PROVED]}
"""
STEPS = 20
RUN_SECONDS = 200.0  # at most, of a run that is hit by something: about 75 s on two H100s
# Largest difference of a step's loss: from the CPU's in fp32, and in bf16.
FP32, BF16 = 1e-3, 5e-2


def experiment(
    workspace, name, runs, *, device="cuda", model="model_type: qwen3,", init="pretrained", seq_length=128, proved=()
):
    more = MORE.replace("PROVED", ", ".join(proved))
    config = workspace.experiment(name, runs, steps=STEPS, save_interval=10, more=more)
    edit(config, "device: cpu", f"device: {device}")
    edit(config, "model_type: qwen3,", model)
    edit(config, "init: pretrained", f"init: {init}")
    edit(config, ", precision: fp32", "")
    edit(config, "seq_length: 64", f"seq_length: {seq_length}")
    return config


def start(workspace, config, *targets):
    return workspace.start(*targets, "--keep-going", "--cores", "all", "--configfile", config)


def done(workspace, config, *targets):
    """Whatever fails, the others are looked at: every test asks for its own run."""
    process = start(workspace, config, *targets)
    try:
        print(process.communicate(timeout=1200)[0])
    finally:
        kill_group(process)


def hit_each(workspace, config, name, runs, after, hit, *, saved=0):
    """Train these runs, which take turns as each has both GPUs, and do that to each once it is past that step, and has
    saved one.
    """
    process = start(workspace, config, "pretrain")
    waiting, deadline = set(runs), time.monotonic() + RUN_SECONDS * len(runs)
    while waiting and process.poll() is None and time.monotonic() < deadline:
        for run in sorted(waiting):
            if not workspace.results(name, "runs", run, "attempts.jsonl").exists():
                continue
            last = max((step for step, *_ in workspace.steps(name, run)), default=0)
            if last > after and latest(workspace.store(name, run) / "checkpoints") >= saved:
                hit(run)
                waiting.remove(run)
        time.sleep(0.2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        print(process.communicate(timeout=RUN_SECONDS)[0])
    kill_group(process)


def losses(workspace, name, run):
    return {step: float.fromhex(loss) for step, loss, _ in workspace.steps(name, run)}


def assert_same_losses(found, expected, bound):
    assert list(found) == list(range(1, STEPS + 1))
    assert max(abs(found[step] - expected[step]) for step in found) <= bound


def assert_conversions_are_proved(workspace, name, exported):
    """Logits included: Megatron's on the GPU beside those of transformers on the CPU."""
    proof = workspace.json(name, "models", "dense", "proof.json")
    assert proof["state"] == "PASS" and "logits" in {check["name"] for check in proof["checks"]}
    for run in exported:
        proof = workspace.json(name, "runs", run, "proof.json")
        assert proof["state"] == "PASS" and "read back" in {check["name"] for check in proof["checks"]}
