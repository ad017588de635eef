"""What a rank is started with: its command and its environment."""

from __future__ import annotations

from pathlib import Path

from megaboa import files
from megaboa.launch import networks
from megaboa.launch.ranks import layered, threads_environment
from megaboa.paths import AttemptFolder, RunFolder, RunStore
from megaboa.run.identity import identity_of
from megaboa.run.resume import Beginning
from megaboa.run.site import python_of

FLIGHT_RECORDER = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
RANK_SCRIPT = Path(__file__).parents[2] / "train_rank.py"


def rank_command(
    folder: RunFolder,
    payload: RunStore,
    target: AttemptFolder,
    claim: int,
    beginning: Beginning,
    skipped: list[list[int]],
) -> list[str]:
    return [
        python_of(folder.launch),
        str(RANK_SCRIPT),
        f"--run={folder.path}",
        f"--store={payload.path}",
        f"--attempt={target.path}",
        f"--claim={claim}",
        f"--resume-from={beginning.iteration}",
        *([f"--parent={beginning.parent}"] if beginning.parent else []),
        *(f"--skip={first}-{last}" for first, last in skipped),
    ]


def rank_environment(folder: RunFolder, target: AttemptFolder | None = None) -> dict[str, str]:
    """What every rank's environment has beside that of the supervisor."""
    run, start, image = folder.run, folder.launch.start, folder.launch.image
    own: dict[str, str | None] = {
        **threads_environment(folder.launch.cpus_per_rank),
        "PYTHONUNBUFFERED": "1",
        "WANDB_RUN_ID": f"{folder.experiment}-{folder.name}-{files.digest(identity_of(folder))[:12]}",
        "WANDB_RESUME": "allow",  # one W&B run for all attempts
        **(image.variables if image else {}),
        "WANDB_RUN_GROUP": folder.experiment,
    }
    if folder.launch.trackers.get("offline"):
        own["WANDB_MODE"] = "offline"
    preset: dict[str, str | None] = {}
    if run["device"] == "cuda":
        preset["CUDA_DEVICE_MAX_CONNECTIONS"] = networks.connections(run["parallel"])
        if target:  # where NCCL's flight recorder writes what it saw before a time-out
            own |= {name: str(target.path / "flight-rank-") for name in FLIGHT_RECORDER}
    if run["device"] == "cuda" or start.network:
        preset |= networks.environment(start.network, {})
    return layered(own, preset, start.environment)
