"""Does the image keep its promises? Runs the training entrypoint's self-test inside it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from megaboa.errors import InputError
from megaboa.image import rootfs, runtimes, tools
from megaboa.records import Contract, ImageOrder, PreflightInImage, read
from megaboa.scheduler.registry import cluster

ENTRYPOINT = Path(__file__).parents[2] / "train_rank.py"
ROOT = "root file system"
KILLED = (-9, -15, 137, 143)


class KilledError(InputError):
    """The test was killed from outside, which isn't the image's fault."""


def test(wanted: ImageOrder, image: Path, results: Path) -> Contract:
    """The entrypoint's report, and how it was obtained; NOT_RUN if nothing here can start the image."""
    return ask(Contract, wanted, image, results, lambda report: self_test(wanted, report))


def ask[Answer: (Contract, PreflightInImage)](
    kind: type[Answer], wanted: ImageOrder, image: Path, results: Path, command: Callable[[Path], list[str]]
) -> Answer:
    """The answer that a command in the image writes to the file that it is given; NOT_RUN as for `test`."""
    how = way(wanted.runtime, image, wanted.srun)
    if how is None:
        return kind(state="NOT_RUN", why=f"nothing here can start {image.name}: {missing(wanted.runtime)}")
    if how != "pyxis" and (other := wanted.architecture or platform.machine()) != platform.machine():
        return kind(state="NOT_RUN", why=f"{image.name} is for {other}, and this machine is {platform.machine()}")
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".contract-", dir=results) as folder:
        report = Path(folder).absolute() / "report.json"
        seen = replace(wanted, mounts=(*wanted.mounts, f"{report.parent}:{report.parent}:rw"))
        argv = command(report)
        done = _start(how, seen, image, argv)
        refused = cluster().refusal(done.stderr) if how == "pyxis" and not report.exists() else None
        if refused:  # this isn't the image's fault
            if not without_gpu(image, wanted):
                return kind(state="NOT_RUN", why=refused)
            print(f"{refused}: tried here, without a GPU", file=sys.stderr)
            how, done = ROOT, _start(ROOT, seen, image, argv)
        if not report.exists():
            if done.returncode in KILLED:
                raise KilledError(f"{_name(argv)} was killed in {image} ({how}): too little memory, or time?")
            told = tools.plain(done.stderr or done.stdout)
            said = [line.strip() for line in told.splitlines() if line.strip()]
            why = tools.why_not_started(told) or (said[-1] if said else f"exit code {done.returncode}")
            raise InputError(f"{_name(argv)} can't be started in {image} ({how}): {why}")
        return replace(read(kind, report), how=how)


def _name(argv: list[str]) -> str:
    program = Path(argv[1]).name
    return f"{program} {argv[2]}" if program == "megaboa" else program


def self_test(wanted: ImageOrder, report: Path) -> list[str]:
    strict = ["--strict"] if wanted.build and wanted.build.pinned and not wanted.bridge_source else []
    return [
        wanted.python,
        str(ENTRYPOINT),
        "--self-test",
        f"--device={wanted.device}",
        f"--out={report}",
        *strict,
    ]


def way(runtime: str, image: Path, launcher: str | None = None) -> str | None:
    """How the image is started here: by its runtime or, for a .sqsh, from the bare root file system; None if neither
    works."""
    if runtime == "apptainer" and shutil.which("apptainer"):
        return "apptainer"
    if runtime == "pyxis" and cluster().starts_images(launcher):
        return "pyxis"
    return ROOT if can_unpack(image) else None


def without_gpu(image: Path, wanted: ImageOrder) -> bool:
    """Whether the image can be tried on this machine, which may have no GPU."""
    return can_unpack(image) and (wanted.architecture or platform.machine()) == platform.machine()


def can_unpack(image: Path) -> bool:
    return image.suffix == ".sqsh" and bool(shutil.which("unsquashfs")) and can_unshare()


def can_unshare() -> bool:
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return subprocess.run(["unshare", "--mount", *user, "true"], capture_output=True).returncode == 0


def missing(runtime: str) -> str:
    if runtime == "apptainer":
        return "there is no apptainer"
    return f"there is no {cluster().image_plugin}, and no unsquashfs with the right to make namespaces"


def _start(how: str, wanted: ImageOrder, image: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    names = [*wanted.env, *wanted.variables]  # ours take precedence over the image's
    arguments = wanted.mounts, names, wanted.workdir, command
    variables = {**runtimes.without_pythons(os.environ), **wanted.variables}
    if how == ROOT:
        with rootfs.unpacked(image, Path(wanted.store)) as root:
            rootfs.prepare(root, wanted.mounts)
            variables = rootfs.environment(root, names, variables)
            return _run(rootfs.enter(str(root), *arguments), variables)
    argv = runtimes.RUNTIMES[wanted.runtime](str(image.absolute()), *arguments)
    if how == "pyxis":  # a job of its own, where the runs' jobs go; a step if this is a job already
        gpus = int(wanted.device == "cuda")
        argv = [*cluster().process(wanted, os.environ, step=False, gpus=gpus), *argv]
    return _run(argv, variables)


def _run(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(done.stdout + done.stderr, end="", file=sys.stderr)
    return done
