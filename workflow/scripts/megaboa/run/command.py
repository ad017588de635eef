"""How a rank is started: its command, its environment, and the software that it will find."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaboa import files, store_paths
from megaboa.check.fact_sources import with_overrides
from megaboa.check.facts import Facts
from megaboa.launch import networks
from megaboa.layout import Layout
from megaboa.paths import RunFolder
from megaboa.records import Code, RanOn, Tree
from megaboa.run import progress, trusted_copies
from megaboa.run.gpus import name as gpu_name
from megaboa.run.identity import identity_of
from megaboa.run.resume import Beginning
from megaboa.run.site import python_of
from megaboa.scheduler.ranks import layered, threads_environment
from megaboa.scheduler.registry import may_be_forked
from megaboa.store_paths import AttemptFolder, RunStore

FLIGHT_RECORDER = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
FLIGHT_CALLS = "2000"  # calls that each rank's recorder keeps; the same as NCCL's own variable in networks.toml
SCRIPTS = Path(__file__).parents[2]
RANK_SCRIPT = SCRIPTS / "train_rank.py"
ASK_SECONDS = 20  # limit for an answer of git or the ranks' Python
SHOWN = 5  # limit for packages that differ between two attempts
BRIDGE = "megatron-bridge"
_LIST = """
import importlib.metadata, json, platform
found = {one.name.lower().replace("_", "-"): one.version for one in importlib.metadata.distributions() if one.name}
print(json.dumps({"python": platform.python_version(), "packages": found}))
"""


def rank_command(
    folder: RunFolder,
    payload: RunStore,
    target: AttemptFolder,
    claim: int,
    beginning: Beginning,
    skipped: list[list[int]],
    waits: bool = False,
) -> list[str]:
    """The command that starts a rank.

    `waits`: it waits for the word that its checkpoint is sound before it loads it.
    """
    return [
        python_of(folder.launch),
        str(RANK_SCRIPT),
        f"--run={folder.path}",
        f"--store={payload.path}",
        f"--attempt={target.path}",
        f"--claim={claim}",
        f"--resume-from={beginning.iteration}",
        *([f"--parent={beginning.parent}"] if beginning.parent else []),
        *([f"--verified={target.may_load}"] if waits else []),
        *([f"--local-copies={trusted_copies.name(payload)}"] if folder.launch.checkpoint.get("local") else []),
        *(f"--skip={first}-{last}" for first, last in skipped),
    ]


def rank_environment(
    folder: RunFolder, target: AttemptFolder | None = None, environment: str | None = None
) -> dict[str, str]:
    """The variables that every rank has in addition to the supervisor's environment. `environment`: digest of the
    packages."""
    run, start, image = folder.run, folder.launch.start, folder.launch.image
    own: dict[str, str | None] = {
        **threads_environment(folder.launch.cpus_per_rank),
        "PYTHONUNBUFFERED": "1",
        "WANDB_RUN_ID": f"{folder.experiment}-{folder.name}-{identity_of(folder).digest[:12]}",
        "WANDB_RESUME": "allow",  # one W&B run for all attempts
        **(image.variables if image else {}),
        "WANDB_RUN_GROUP": folder.experiment,
    }
    if folder.launch.trackers.get("offline"):
        own["WANDB_MODE"] = "offline"
    preset: dict[str, str | None] = {}
    if target:  # prefix for dumps of what ranks waited for, written by them or, at a time-out, by NCCL
        own |= dict.fromkeys(FLIGHT_RECORDER if run.device == "cuda" else FLIGHT_RECORDER[:1], target.flight)
        preset["TORCH_FR_BUFFER_SIZE"] = FLIGHT_CALLS
    if run.device == "cuda" or start.network:
        preset |= networks.environment(start.network)
    if run.device == "cuda":
        overrides = {**run.overrides, **folder.launch.overrides}
        built = _built(folder, overrides)
        recipe = (folder.preflight.environment or {}) if folder.preflight else {}
        connections = networks.connections(
            run.parallel,
            expert_overlap=bool(built["kernels"].get("expert_overlap")),
            blackwell=networks.is_blackwell(folder.launch.gpu or gpu_name()),
        )
        if built["layout"].get("fsdp", "none") != "none" and os.environ.get(networks.CONNECTIONS) == "1":
            own[networks.CONNECTIONS] = networks.SEVERAL  # a site sets 1 for speed; here every rank would fail
        if environment:
            preset |= compiled_kernels(folder, environment)
        preset |= networks.GROUPED_PRODUCTS
        preset |= recipe  # Bridge sets these only after the import of Transformer Engine
        preset[networks.CONNECTIONS] = connections or recipe.get(networks.CONNECTIONS)
        preset[networks.ALLOCATOR] = networks.allocator(overrides, recipe.get(networks.ALLOCATOR))
    if target and checks_network(folder, target):
        preset |= networks.NAMING
    return layered(own, preset, start.environment)


def _built(folder: RunFolder, overrides: Tree) -> Tree:
    """The run's facts from preflight, which knows a recipe's settings. A trial of `snakemake tune` has no preflight,
    only the experiment's settings."""
    if folder.preflight and folder.preflight.facts:
        return folder.preflight.facts
    said = Facts(Layout(fsdp=folder.run.parallel.get("fsdp") or "none"))
    return dataclasses.asdict(with_overrides(said, overrides))


def checks_network(folder: RunFolder, target: AttemptFolder) -> bool:
    """Whether NCCL has to log the network that it chose, in this attempt.

    It logs that before the first step, so it isn't asked again after an attempt that did a step. Attempts without a
    step may have ended before it was logged.
    """
    start, several = folder.launch.start, folder.launch.nodes > 1
    asked = folder.run.device == "cuda" and start.network_check and networks.can_check(start.network)
    before = (AttemptFolder(target.path.with_name(f"{number:02d}")) for number in range(1, target.number))
    return several and asked and not any(map(progress.has_steps, before))


def compiled_kernels(folder: RunFolder, environment: str) -> dict[str, str | None]:
    """Variables for the kernel caches of Inductor and Triton, shared by all runs in one environment or image.

    Both write files under temporary names first, and GPU and versions are part of their keys, so ranks and runs can
    share a cache. Users can't, because the cache holds code that is executed. If the folder isn't this user's alone,
    the libraries' own caches are used.
    """
    kept = store_paths.compiled_kernels(Path(folder.launch.store).absolute(), os.getuid(), environment)
    if not files.is_ours_alone(kept.parent):
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(kept / "inductor"), "TRITON_CACHE_DIR": str(kept / "triton")}


def warm_up(folder: RunFolder, environment: Mapping[str, str]) -> None:
    """Start the process that this machine's ranks will be forked from, so that it imports while the supervisor checks
    files."""
    together = {**os.environ, **environment}
    if folder.launch.image or not may_be_forked(together):
        return
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [python_of(folder.launch), str(RANK_SCRIPT), "--warm"]
    with contextlib.suppress(OSError):
        subprocess.Popen(command, env=together, start_new_session=True, **quiet)


def ran_on(folder: RunFolder, store: RunStore) -> RanOn:
    """The software of an attempt, for its line in the ledger; each list of packages is stored once.

    It is read from disk before every attempt, because ranks are new processes that import the versions present then.
    """
    found = _environment(folder)
    name = files.digest(found) if found else None
    if found and not (path := store.environment(name)).exists():
        files.write_json(path, found)
    return RanOn(environment=name, bridge=(found or {}).get("packages", {}).get(BRIDGE), code=_code())


def environment_digest(folder: RunFolder) -> str | None:
    """Digest of the packages that ranks will find; None if they can't be listed."""
    found = _environment(folder)
    return files.digest(found) if found else None


def changes(before: RanOn | None, now: RanOn, store: RunStore) -> str | None:
    """How the software of two attempts differs, in a few words; None if it doesn't, or that is unknown."""
    then, told = before or RanOn(), []
    if then.environment and now.environment and then.environment != now.environment:
        told.append(_packages_between(store, then.environment, now.environment))
    if then.code and then.code.digest != now.code.digest:
        told.append(f"code {_named(then.code)} -> {_named(now.code)}")
    return "; ".join(told) or None


def _environment(folder: RunFolder) -> dict[str, Any] | None:
    """Packages from the image's manifest, or else from the ranks' Python; None if that can't be asked."""
    if folder.image:
        image = folder.image
        return {"image": image.digest, "python": image.python, "packages": image.packages}
    environment = {
        name: value for name, value in {**os.environ, **rank_environment(folder)}.items() if value is not None
    }
    try:
        asked = [python_of(folder.launch), "-c", _LIST]
        done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):  # the ranks will report the problem
        return None


def _code() -> Code:
    """Digest of the library on disk, its commit, and whether it has uncommitted changes, if git knows."""
    sources = sorted(SCRIPTS.rglob("*.py"))
    found = {str(path.relative_to(SCRIPTS)): files.file_digest(path) for path in sources}
    commit = _git("rev-parse", "HEAD")
    changed = bool(_git("status", "--porcelain", "--", str(SCRIPTS))) if commit else None
    return Code(commit=commit, changed=changed, digest=files.digest(found))


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "--no-optional-locks", *arguments]  # the user may be running git in this clone too
        done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _named(code: Code) -> str:
    commit = (code.commit or code.digest)[:12]
    return f"{commit} with changes" if code.changed else commit


def _packages_between(store: RunStore, then: str, now: str) -> str:
    try:
        before, after = (files.read_json(store.environment(name)) for name in (then, now))
    except (OSError, ValueError):
        return f"packages {then[:12]} -> {now[:12]}"
    flat = [{"Python": one.get("python"), **(one.get("packages") or {})} for one in (before, after)]
    names = sorted(name for name in {*flat[0], *flat[1]} if flat[0].get(name) != flat[1].get(name))
    told = [f"{name} {flat[0].get(name, 'none')} -> {flat[1].get(name, 'none')}" for name in names[:SHOWN]]
    return ", ".join([*told, *([f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else [])]) or "another image"
