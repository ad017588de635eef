"""A short separate run under a profiler, which leaves the trained run, its checkpoints and its speed alone."""

from __future__ import annotations

from pathlib import Path

from megaboa import files, store
from megaboa.errors import InputError
from megaboa.launch.nsys import nsys_arguments, wrapped
from megaboa.paths import RunFolder
from megaboa.records import Identity, Trace, plain, write
from megaboa.run import recipe_code
from megaboa.run import site as sites
from megaboa.run.announce import explain
from megaboa.run.command import RANK_SCRIPT, environment_digest, rank_environment
from megaboa.run.identity import identity_of
from megaboa.run.inputs import check_data, check_image, check_nodes
from megaboa.scheduler import local
from megaboa.scheduler.protocol import Place
from megaboa.scheduler.ranks import FORKED, Ended
from megaboa.store_paths import AttemptFolder, RunStore

NSYS_SCRIPT = Path(__file__).parents[2] / "profile_rank.py"


def capture(folder: RunFolder) -> Trace:
    """Profile the run's first steps as profile.json says; return the manifest.

    One capture per identity and settings.
    """
    if folder.profile.tool == "none":
        raise InputError(
            f"run {folder.name} has no profiler: set profile.tool, for all runs or in its entry of sweep.runs, to "
            "pytorch or, on GPUs, nsys"
        )
    site = sites.here(folder.launch, folder.run.device, container=sites.container_of(folder.launch, folder.image))
    check_nodes(folder, site.nodes)
    check_image(folder)
    check_data(folder)
    recipe_code.check(folder)
    identity = identity_of(folder)
    captured = {"run": plain(identity), "profile": folder.documents["profile"]}  # as its file has it
    final = store.folder(folder.launch.store, "profiles", f"{folder.experiment}/{folder.name}", captured)
    with store.building(final) as partial:
        if partial:
            _profile(folder, site, identity, AttemptFolder(partial))
    path = AttemptFolder(final).traces(folder.profile.tool)
    return Trace(
        **vars(folder.profile),
        run=folder.name,
        path=str(path),
        step_log=str(AttemptFolder(final).steps),
        traces=tuple(trace.name for trace in sorted(path.iterdir())),
    )


def _profile(folder: RunFolder, site: Place, identity: Identity, target: AttemptFolder) -> None:
    write(RunStore(target.path).identity, identity)
    command = [sites.python_of(folder.launch), str(RANK_SCRIPT), "--capture"]
    files.write_json(target.asked, folder.documents)
    command += [f"--run={folder.path}", f"--store={target.path}", f"--attempt={target.path}"]
    traces = target.traces(folder.profile.tool)
    if folder.profile.tool == "nsys":
        files.make_folder(traces)
        nsys = nsys_arguments(folder.profile.domains, folder.profile.arguments)
        out = traces / f"{folder.experiment}.{folder.name}"
        command = wrapped(command, NSYS_SCRIPT, folder.profile.ranks, out, nsys, folder.launch.start.network)
    ended = _run(site, command, folder, target)
    missing = [rank for rank in folder.profile.ranks if not list(traces.glob(f"*rank-{rank}.*"))]
    if not ended.ok or missing:
        detail = str(ended) if not ended.ok else f"no trace of rank {', '.join(map(str, missing))} was written"
        raise InputError(explain(folder, target, ended, detail, "The log is not kept; nothing else was touched."))


def _run(site: Place, command: list[str], folder: RunFolder, target: AttemptFolder) -> Ended:
    # A profiler only sees processes that it has started itself, so ranks must not be forked by another process.
    environment = {**rank_environment(folder, environment=environment_digest(folder)), FORKED: "0"}
    with sites.image_shared(site, target.image):
        ranks = site.start(command, folder.run.world_size, target.path, environment)
        try:
            return local.wait(ranks)
        finally:
            ranks.kill()
