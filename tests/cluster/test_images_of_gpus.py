"""An image on hosts with real GPUs (`make test-gpu`): its ranks are forked inside it by one task a host, and one dies.

Apptainer runs a plain Debian with a Python of its own, which finds this machine's packages. Two hosts share a GPU where
the machine has one: NCCL takes them for different machines, and so do we. MEGABOA_REHEARSAL=1 does the same on
processors. `MEGABOA_IMAGE_TREE` names a tree that was made before, where none can be made.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from clone import edit
from faults import AT_ONCE, NAME, TWO_HOSTS, Faults
from image import machine
from lab import UID, Lab
from rehearsal import REHEARSAL, devices, usable
from site_clone import SiteClone

from megaboa.records import read_gpu_events
from megaboa.store_paths import AttemptFolder

FOUND = usable(2)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOUND, reason="this machine has no GPU"),
    pytest.mark.skipif(not shutil.which("apptainer"), reason="there is no apptainer (.ci/install_apptainer)"),
]

STEPS, SAVE_INTERVAL = (40, 10) if REHEARSAL else (300, 100)  # on GPUs a save lasts as long as dozens of steps
BF16 = 5e-2  # largest difference of a step's loss: a mean of bf16's own order on other ranks
NOT_COMPILED = "launch.environment: {TORCH_COMPILE_DISABLE: '1'}"  # a plain Debian has no C compiler for Triton
# A save in the background may not be complete before the last of these steps.
RUN = f"training.train_iters: {STEPS}, checkpoint.async_save: false, launch.tasks: node, {NOT_COMPILED}, {AT_ONCE}"
PACKAGES = [path for path in sys.path if any(Path(path).glob("*.dist-info"))]


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab], tmp_path_factory: pytest.TempPathFactory) -> Faults:
    if not os.environ.get(machine.TREE):
        machine.require()
    owned = [(device,) for device in devices(FOUND)]
    lab = make_lab(nodes=2, cpus=4, memory_mb=32000, accounting=False, real_gpus=owned)
    found = Faults(lab, SiteClone(lab), {"inside": RUN}, hosts=TWO_HOSTS, save_interval=SAVE_INTERVAL)
    if not REHEARSAL:
        found.use_gpus()
    outside = found.clone.path / "outside.yaml"
    outside.write_text((found.clone.path / found.config).read_text())
    edit(outside, f"experiment: {NAME}", "experiment: outside")
    image, python = (found.clone.path / name for name in ("debian.sif", "python-of-the-image"))
    machine.sif(image, tmp_path_factory.mktemp("image") / "debian")
    # Transformer Engine looks for NVIDIA's wheels next to the image's own packages, where they aren't.
    wheels = next(path for path in (Path(folder) / "nvidia" for folder in PACKAGES) if path.is_dir())
    libraries = ":".join(["$LD_LIBRARY_PATH", *map(str, sorted(wheels.glob("*/lib")))])
    exported = f'PYTHONPATH={":".join(PACKAGES)} CUDNN_HOME={wheels} CUDA_HOME={wheels} LD_LIBRARY_PATH="{libraries}"'
    python.write_text(f'#!/bin/sh\nexport {exported}\nexec /usr/local/bin/python3 "$@"\n')
    python.chmod(0o755)
    for path in (image, python):
        os.chown(path, UID, UID)
    mounts = [f"{folder}:{folder}:ro" for folder in (*PACKAGES, found.clone.path)]
    with (found.clone.path / found.config).open("a") as file:
        file.write(f"image: {{runtime: apptainer, path: {image}, mounts: {mounts}}}\nlaunch: {{python: {python}}}\n")
    for config in (found.config, outside.name):
        found.clone.before_training(config)
    return found


def test_a_rank_that_dies_in_an_image_is_forked_there_again(faults):
    process = faults.start("inside")
    hit = faults.kill_parked_rank(faults.park_until_others_stand_by("inside"))
    faults.finish("inside", process)
    faults.tell_phases("inside", hit)
    assert faults.clone.json(NAME, "image.json")["contract"]["how"] == "apptainer"
    first, again = faults.clone.starts(NAME, "inside")
    assert len(first["nodes"]) == 2 and first["job"] == again["job"]
    assert [end["cause"] for end in faults.ends("inside")] == ["killed", None]


def test_its_losses_are_those_of_ranks_without_an_image(faults):
    faults.clone.snakemake("pretrain", "--configfile", "outside.yaml")
    inside, outside = faults.clone.curve(NAME, "inside"), faults.clone.curve("outside", "inside")
    assert [step for step, *_ in inside] == [step for step, *_ in outside] == list(range(1, STEPS + 1))
    pairs = zip(inside, outside, strict=True)
    difference = max(abs(float.fromhex(one) - float.fromhex(other)) for (_, one, _), (_, other, _) in pairs)
    print(f"largest difference of a step's loss: {difference:.2g}")
    assert difference <= (0 if REHEARSAL else BF16)


@pytest.mark.skipif(REHEARSAL, reason="processors have no driver")
def test_its_hosts_sample_their_gpus(faults):
    sampled = [read_gpu_events(path) for path in AttemptFolder(faults.store("inside") / "attempts" / "01").sampled]
    assert [len(found[0].gpus) for found in sampled] == [1, 1]
