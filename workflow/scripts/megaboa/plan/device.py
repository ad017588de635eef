"""`device: auto`: the device that an experiment trains on, determined when it is planned, once for all its jobs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from megaboa import files
from megaboa.config import Experiment, LoadedExperiment
from megaboa.formats import counted
from megaboa.run import gpus, submitted
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.registry import cluster

AUTO = "auto"
NO_GPU = "this machine has no GPU"
KERNELS = "transformer_engine"  # models for GPUs are built from its modules
DRIVER = Path("/dev/nvidiactl")
ASK_SECONDS = 120  # for torch to be imported and look for GPUs
SETUP = "`make setup DEVICE=cuda` installs it"
DRIVERS = {"12": 525, "13": 580}  # oldest driver for a CUDA, unless cuda-compat provides libraries for older ones
# Read from its file, as importing torch takes seconds.
CUDA_OF_TORCH = """import importlib.util, pathlib, runpy
origin = importlib.util.find_spec("torch").origin
print(runpy.run_path(str(pathlib.Path(origin).with_name("version.py")))["cuda"])"""
OPENS_CUDA = "import torch; print(torch.cuda.is_available())"


@dataclass(frozen=True)
class Found:
    device: str
    why: str
    gpus: int | None = None  # number of GPUs of this machine; None if jobs run elsewhere


def settle(
    loaded: LoadedExperiment, partition: str | None = None, config_file: Path | None = None, looks: bool = False
) -> LoadedExperiment:
    """The experiment with `auto` replaced by `cpu` or `cuda`.

    `partition`: the cluster's, for training; None: ranks start on this machine. In a job, `config_file` is the copy of
    the call that submitted it, and that call's device is used, because the job may be on a different kind of machine.
    `looks`: the call runs no job (`snakemake -n`), so it doesn't ask `launch.python`, which may be any program.
    """
    if loaded.experiment.device != AUTO:
        return loaded if partition or config_file else _doubted(loaded, looks)
    found = _of_call(config_file) or find(loaded.experiment, partition, looks)
    return replace(
        loaded,
        experiment=loaded.experiment.model_copy(update={"device": found.device}),
        raw={**loaded.raw, "device": found.device},
        notes=(f"device: auto is {found.device}: {found.why}", *loaded.notes),
        device_found=True,
        machine_gpus=found.gpus,
    )


def unfit(experiment: Experiment) -> str | None:
    """The reason why ranks that start here can't have the experiment's GPUs; None if they can.

    In a job they start on its nodes, about which this machine says nothing. Where there is a driver there may be GPUs
    that can't be counted here.
    """
    if experiment.device != "cuda" or cluster().in_job(os.environ) or DRIVER.exists() or gpus_here():
        return None
    return NO_GPU


def _doubted(loaded: LoadedExperiment, looks: bool) -> LoadedExperiment:
    """Note a machine without GPUs, or a driver that is too old.

    That is no error, because a call may only look at the plan here, or make a report.
    """
    experiment = loaded.experiment
    why = unfit(experiment) or (_old_driver(_asked(experiment, looks)) if experiment.device == "cuda" else None)
    note = f"warning: device: cuda can't be used here: {why}"
    return replace(loaded, notes=(note, *loaded.notes)) if why else loaded


def _of_call(config_file: Path | None) -> Found | None:
    device = submitted.device_of(config_file) if config_file else None
    return Found(device, "as the call found that submitted this job") if device else None


def find(experiment: Experiment, partition: str | None, looks: bool = False) -> Found:
    here = gpus_here() if partition is None else None
    python = _asked(experiment, looks)
    if here == 0:
        return Found("cpu", NO_GPU)
    if python is None and (device := _recorded(experiment)):
        return Found(device, "as an earlier call found", here if device == "cuda" else None)
    if why := _without_kernels(python):
        return Found("cpu", f"this machine has {counted(here, 'GPU')}, but {why}" if here else why)
    if here is None:
        return _on_cluster(str(partition))
    if why := _old_driver(python):
        return Found("cpu", why)
    name = _named(python, experiment)
    return Found("cuda", f"this machine has {counted(here, 'GPU')}, and {name} has Transformer Engine", here)


def _on_cluster(partition: str) -> Found:
    """The device on a cluster. The login node's own GPUs say nothing about it."""
    name = cluster().name
    try:
        count = cluster().gpus_of_a_node(partition)
    except UnreachableError as error:
        return Found("cpu", f"{name} can't be asked about GPUs ({error}); where it has some, name the device")
    if not count:
        return Found("cpu", f"{name} shows no GPU in partition {partition}; where it has some, name the device")
    return Found("cuda", f"nodes of partition {partition} have {counted(count, 'GPU')}")


def _asked(experiment: Experiment, looks: bool) -> str | None:
    """The Python of the ranks that is asked what it can do; None if only their image knows, or if it isn't started."""
    if experiment.image.runtime != "none" or (looks and experiment.launch.python):
        return None
    return experiment.launch.python or sys.executable


def _recorded(experiment: Experiment) -> str | None:
    """The device of a call that ran jobs, in the plans of its runs."""
    plans = sorted(Path("results", experiment.experiment, "runs").glob("*/run.json"))
    return files.read_json(plans[0])["device"] if plans and experiment.image.runtime == "none" else None


def _named(python: str | None, experiment: Experiment) -> str:
    if python is None:
        return f"by assumption {'the image' if experiment.image.runtime != 'none' else 'launch.python'}"
    return "this Python" if python == sys.executable else python


def _without_kernels(python: str | None) -> str | None:
    """The reason why the ranks' Python can't train on a GPU; None if it can, or if it isn't asked."""
    if python == sys.executable and importlib.util.find_spec(KERNELS) is None:
        return f"this Python has no Transformer Engine ({SETUP})"
    if python not in (None, sys.executable):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({KERNELS!r}) is None)"
        try:
            if subprocess.run([python, "-c", code], capture_output=True, timeout=ASK_SECONDS).returncode:
                return f"{python} has no Transformer Engine"
        except OSError as error:
            return f"launch.python can't be started: {error}"
        except subprocess.TimeoutExpired:
            return f"launch.python, {python}, doesn't answer within {ASK_SECONDS} s"
    return None


def _old_driver(python: str | None) -> str | None:
    """The reason why the ranks' torch can't use this machine's driver; None if it can, or if it isn't asked."""
    driver = gpus.driver() if python else None
    number = (driver or "").split(".")[0]
    if not python or not number.isdigit():
        return None
    cuda = _said(python, CUDA_OF_TORCH)
    needed = DRIVERS.get(cuda.split(".")[0], 0)
    if int(number) >= needed or _said(python, OPENS_CUDA) == "True":
        return None
    return f"this machine's driver {driver} is too old for torch's CUDA {cuda}, which needs {needed} or newer"


def _said(python: str, code: str) -> str:
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def gpus_here() -> int:
    """Number of GPUs that CUDA shows to this process. Asks torch if there is no nvidia-smi, as in some containers."""
    try:
        return gpus.count(gpus.query(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except FileNotFoundError:
        if not DRIVER.exists():
            return 0
    except (ValueError, OSError, subprocess.SubprocessError):
        pass
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
    except subprocess.TimeoutExpired:  # the driver hangs, and perhaps nvidia-smi did too
        return 0
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else 0
