"""Real GPUs: every layout trains, gives the CPU's losses, comes back after a death, and is exported and proved.

`make test-gpu`, on a machine with two GPUs whose Python has Transformer Engine beside what envs/ lists.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time

import pytest
from clone import edit, kill_group

from megaboa.files import read_jsonl


def gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


pytestmark = [pytest.mark.slow, pytest.mark.skipif(gpus() < 2, reason=f"two GPUs are needed, and {gpus()} found")]

TWO = "resources.gpus_per_node: 2"
FP32_RUN, BF16_RUN = "training.precision: fp32", "training.precision: bf16_mixed"
GRAPH = {  # the whole iteration as one CUDA graph, in which nobody can look for NaN
    "model.cuda_graph_impl": "full_iteration",
    "model.cuda_graph_modules": "[]",
    "model.use_te_rng_tracker": "true",
    "ddp.check_for_nan_in_grad": "false",
    "rerun_state_machine.check_for_nan_in_loss": "false",
}
DENSE = {
    "one": f"{{{FP32_RUN}}}",
    "dp2": f"{{{FP32_RUN}, {TWO}}}",
    "tp2": f"{{{FP32_RUN}, {TWO}, parallel.tp: 2}}",
    "tp2-sp": f"{{{FP32_RUN}, {TWO}, parallel.tp: 2, parallel.sp: true}}",
    "pp2": f"{{{FP32_RUN}, {TWO}, parallel.pp: 2}}",
    "bf16": f"{{{BF16_RUN}}}",
    "cp2": f"{{{BF16_RUN}, {TWO}, parallel.cp: 2}}",  # no attention in fp32 can be cut along the sequence
    "graph": f"{{{BF16_RUN}, {', '.join(f'overrides.{name}: {value}' for name, value in GRAPH.items())}}}",
}
EXPERTS = {"ep1": f"{{{FP32_RUN}}}", "ep2": f"{{{FP32_RUN}, {TWO}, parallel.ep: 2}}"}
EXPERT_MODEL = "model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32,"
SHARDINGS = {"fsdp-1": "optim", "fsdp-2": "optim_grads", "fsdp-3": "optim_grads_params"}  # no_shard can't be saved
LONG = {
    "dp2": f"{{{TWO}}}",
    **{run: f"{{{TWO}, parallel.fsdp: megatron, parallel.fsdp_sharding: {kind}}}" for run, kind in SHARDINGS.items()},
}
# So that fp32 means fp32: without it both libraries multiply in TF32.
MORE = """\
launch: {environment: {NVIDIA_TF32_OVERRIDE: "0"}}
resources: {cpus_per_rank: 2}
export: {runs: [PROVED]}
"""
PROVED = {"dense": ("one", "tp2-sp", "pp2"), "experts": ("ep2",)}
STEPS = 20
ALL_CORES = ("--keep-going", "--cores", "all", "--configfile")
# Largest difference of a step's loss from the CPU's in fp32.
FP32, BF16 = 1e-3, 5e-2


def on_gpus(config):
    edit(config, "device: cpu", "device: cuda")
    return config


def losses(workspace, experiment, run):
    return {step: float.fromhex(loss) for step, loss, _ in workspace.steps(experiment, run)}


def done(workspace, *arguments):
    """Whatever fails, the others are looked at: every test asks for its own run."""
    process = workspace.start(*arguments)
    print(process.communicate(timeout=1200)[0])


def experiment(workspace, name, runs, model="model_type: qwen3,"):
    proved = [run for run in runs if run in PROVED.get(name, ())]
    more = MORE.replace("[PROVED]", f"[{', '.join(proved)}]")
    config = workspace.experiment(name, runs, steps=STEPS, save_interval=10, more=more)
    edit(config, "model_type: qwen3,", model)
    edit(config, ", precision: fp32", "")
    return config


@pytest.fixture(scope="module")
def dense(workspace):
    """Every layout of the dense model on GPUs, and one run of it on the CPU."""
    done(workspace, "pretrain", *ALL_CORES, experiment(workspace, "reference", {"one": DENSE["one"]}))
    done(workspace, "pretrain", "export", *ALL_CORES, on_gpus(experiment(workspace, "dense", DENSE)))
    return losses(workspace, "reference", "one")


@pytest.fixture(scope="module")
def experts(workspace):
    config = experiment(workspace, "experts-reference", {"ep1": EXPERTS["ep1"]}, EXPERT_MODEL)
    done(workspace, "pretrain", *ALL_CORES, config)
    config = on_gpus(experiment(workspace, "experts", EXPERTS, EXPERT_MODEL))
    done(workspace, "pretrain", "export", *ALL_CORES, config)
    return losses(workspace, "experts-reference", "ep1")


@pytest.mark.parametrize("run", DENSE)
def test_a_layout_gives_the_losses_of_the_cpu(workspace, dense, run):
    found = losses(workspace, "dense", run)
    bound = BF16 if run in ("bf16", "cp2", "graph") else FP32
    assert list(found) == list(range(1, STEPS + 1))
    assert max(abs(found[step] - dense[step]) for step in found) <= bound


@pytest.mark.parametrize("run", EXPERTS)
def test_experts_give_the_losses_of_the_cpu(workspace, experts, run):
    found = losses(workspace, "experts", run)
    assert list(found) == list(range(1, STEPS + 1))
    assert max(abs(found[step] - experts[step]) for step in found) <= FP32


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_what_goes_in_and_comes_out_is_proved(workspace, request, name):
    """Logits included: Megatron's on the GPU beside those of transformers on the CPU."""
    request.getfixturevalue(name)
    imported = workspace.json(name, "models", "dense", "proof.json")
    assert imported["state"] == "PASS" and "logits" in {check["name"] for check in imported["checks"]}
    for run in PROVED[name]:
        exported = workspace.json(name, "runs", run, "proof.json")
        assert exported["state"] == "PASS" and "read back" in {check["name"] for check in exported["checks"]}


@pytest.fixture(scope="module")
def interrupted(workspace):
    """Runs that save (`dp2` in the background), one rank of each killed between two saves."""
    config = workspace.experiment("long", LONG, steps=600, save_interval=200, more=MORE.replace("PROVED", ""))
    edit(config, "init: pretrained", "init: scratch")
    edit(config, "precision: fp32", "precision: bf16_mixed")
    process = workspace.start("pretrain", *ALL_CORES, on_gpus(config))
    waiting, deadline = set(LONG), time.monotonic() + 240
    while waiting and process.poll() is None and time.monotonic() < deadline:
        for run in sorted(waiting):
            link = workspace.results("long", "runs", run, "attempts.jsonl")
            if link.exists() and max((step for step, *_ in workspace.steps("long", run)), default=0) >= 250:
                os.kill(workspace.rank_processes("long", run)[-1], signal.SIGKILL)
                waiting.remove(run)
        time.sleep(0.2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        print(process.communicate(timeout=300)[0])
    kill_group(process)
    return workspace


@pytest.mark.parametrize("run", LONG)
def test_a_killed_run_goes_on_from_its_last_save(interrupted, run):
    store = interrupted.store("long", run)
    found = []
    for attempt in ("01", "02"):
        events = read_jsonl(store / "attempts" / attempt / "steps.jsonl")
        found.append({event["step"]: event["loss"] for event in events if event["event"] == "step"})
    assert min(found[1]) in (201, 401) and max(found[1]) == 600
    again = sorted(found[0].keys() & found[1].keys())[:20]
    assert all(abs(found[0][step] - found[1][step]) <= BF16 for step in again)
    assert interrupted.json("long", "runs", run, "train.json")["iteration"] == 600
