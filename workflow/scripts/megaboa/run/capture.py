"""A short run of its own under a profiler: the trained run, its checkpoints and its speed are left alone."""

from __future__ import annotations

import time
from typing import Any

from megaboa import files, store
from megaboa.launch.ranks import Ended
from megaboa.results import AttemptFolder, RunFolder, RunStore
from megaboa.run import site as sites
from megaboa.run.announce import explain
from megaboa.run.command import RANK_SCRIPT, rank_environment
from megaboa.run.identity import identity_of
from megaboa.run.inputs import UnusableInputError, check_data, check_nodes
from megaboa.run.supervisor import TrainingFailed
from megaboa.run.watch import POLL_SECONDS

TRACES = "torch_profile"  # Bridge's name for the folder beside TensorBoard's


def capture(folder: RunFolder) -> dict[str, Any]:
    """Profile the run's first steps as profile.json says, once for each identity and settings; return the manifest."""
    site = sites.here(folder.launch, folder.run["device"])
    check_nodes(folder, site.nodes)
    check_data(folder)
    check_ranks(folder)
    identity = identity_of(folder)
    captured = {"run": identity, "profile": folder.profile}
    final = store.folder(folder.launch["store"], "profiles", f"{folder.experiment}/{folder.name}", captured)
    with store.building(final) as partial:
        if partial:
            _profile(folder, site, identity, AttemptFolder(partial))
    traces = sorted((final / TRACES).iterdir())
    return {"run": folder.name, "path": str(final / TRACES), **folder.profile, "traces": [path.name for path in traces]}


def check_ranks(folder: RunFolder) -> None:
    world_size = folder.run["world_size"]
    beyond = [rank for rank in folder.profile["ranks"] if rank >= world_size]
    if beyond:
        raise UnusableInputError(
            f"run {folder.name}: profile.ranks names rank {beyond[0]}, "
            f"but its ranks are 0 to {world_size - 1}: name one of these."
        )


def _profile(folder: RunFolder, site: sites.Site, identity: dict[str, Any], target: AttemptFolder) -> None:
    files.write_json(RunStore(target.path).identity, identity)
    command = [sites.python_of(folder.launch), str(RANK_SCRIPT), "--capture"]
    command += [f"--run={folder.path}", f"--store={target.path}", f"--attempt={target.path}"]
    ended = _run(site, command, folder, target)
    wanted = [target.path / TRACES / f"rank-{rank}.json.gz" for rank in folder.profile["ranks"]]
    missing = [path.name for path in wanted if not path.exists()]
    if not ended.ok or missing:
        detail = str(ended) if not ended.ok else f"no trace {', '.join(missing)} was written"
        raise TrainingFailed(explain(folder, target, ended, detail, "The log is not kept; nothing else was touched."))


def _run(site: sites.Site, command: list[str], folder: RunFolder, target: AttemptFolder) -> Ended:
    ranks = site.start(command, folder.run["world_size"], target.path, rank_environment(folder))
    try:
        while (ended := ranks.poll()) is None:
            time.sleep(POLL_SECONDS)
        return ended
    finally:
        ranks.kill()
