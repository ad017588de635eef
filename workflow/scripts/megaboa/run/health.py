"""Is this node fit to train? One task per node answers within seconds, before any rank starts.

The task itself uses only the standard library and can't hang in torch, CUDA or NCCL: these run in separate processes
(megaboa.run.health_rank), one per GPU, which it ends when time is up. It writes its result twice: with `stage: local`
once everything is known that the node can find out alone, and with `stage: done` after the all-reduce over the nodes.
`verdict` decides later who is to blame, from the results of all nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaboa.formats import counted
from megaboa.records import BetweenNodes, NodeHealth, read, write
from megaboa.run import gpu_watch
from megaboa.run import gpus as driver
from megaboa.run.gpu_watch import Watch
from megaboa.scheduler.ranks import ReservedPort, rank_environment
from megaboa.scheduler.registry import cluster

SECONDS = 30.0
MARGIN_SECONDS = 3.0  # between the end of the ranks and the end of the check
BETWEEN_NODES = "the all-reduce over the nodes"
SILENT_SHARE = 0.1  # share of the nodes; if more are silent, it isn't their fault
LATE_SHARE = 0.5  # of the check's time: a node that starts so much later than the first may innocently miss the others
OCCUPIED_PATIENCE_SECONDS = 5.0  # ranks of the previous attempt may still be exiting
TEST_BYTES = 1 << 20
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Task:
    """The number of this node in the job, and the address where all nodes meet."""

    number: int
    nodes: int
    address: str
    port: int


@dataclass
class Result:
    node: str
    number: int
    problems: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    stage: str = "local"
    doing: str = "its first steps"
    reached: bool = False  # whether it reached the first node, where all nodes meet
    missing: list[int] = field(default_factory=list)  # numbers of the nodes that didn't arrive
    error: str | None = None  # what went wrong between the nodes

    def write(self, out: Path) -> NodeHealth:
        ok = self.stage == "done" and not self.problems and self.error is None
        result = NodeHealth(
            node=self.node,
            number=self.number,
            ok=ok,
            problems=tuple(self.problems),
            stage=self.stage,
            collective=BetweenNodes(reached=self.reached, missing=tuple(self.missing), error=self.error),
            measured=self.measured,
        )
        write(out / f"{self.node}.json", result)
        return result


def check(
    out: Path, gpus: int, memory_gib: float | None, folder: Path | None, seconds: float, wait: Path | None = None
) -> NodeHealth:
    """Test this node, then its connection to the others; write and return the result.

    `wait`: a file; while it is empty, the check only imports what it needs.
    """
    task = this_task()
    with importing(task, gpus) as workers:
        while wait and not wait.read_text():
            time.sleep(POLL_SECONDS)
        return _check(out, gpus, memory_gib, folder, seconds, task, workers)


def _check(
    out: Path,
    gpus: int,
    memory_gib: float | None,
    folder: Path | None,
    seconds: float,
    task: Task,
    workers: Workers,
) -> NodeHealth:
    start = time.monotonic()
    deadline = start + seconds
    result = Result(node_name(), task.number)
    with contextlib.suppress(OSError):  # the folder is tested below
        mark_of(out, result.node).touch()
    watchdog = threading.Timer(seconds, _give_up, (result, out, seconds))
    watchdog.daemon = True
    watchdog.start()
    if folder is not None:
        result.doing = f"the write to {folder}"
        result.measured["folder"] = measure_folder(folder, result.problems)
    complete = True
    if gpus:
        result.doing = "nvidia-smi"
        complete = check_gpus(gpus, memory_gib, result)
    if complete:  # otherwise the ranks would only wait for the missing GPUs
        result.doing = "the test on each GPU" if gpus else "the test of the processors"
        run_ranks(workers, task, gpus, deadline - MARGIN_SECONDS, result, out)
    result.stage = "done"
    result.measured["seconds"] = round(time.monotonic() - start, 2)
    watchdog.cancel()
    return result.write(out)


def mark_of(folder: Path, node: str) -> Path:
    """The file whose time stamp says when a node began."""
    return folder / f"{node}.begun"


def verdict(
    folder: Path, nodes: list[str], seconds: float = SECONDS, waited: float | None = None
) -> dict[str, list[str]]:
    """The problems of each node; a node without problems is fit. `waited`: seconds that were spent waiting for answers.

    One dead node makes the all-reduce fail on all others, so a failed all-reduce alone is no reason to blame a node. If
    nodes are certainly bad, only they are blamed: nodes without a result, with a problem of their own, or that stopped
    answering after their own tests. Otherwise the blame goes to nodes that the others timed out waiting for, or that
    couldn't reach the first node, or to the first node if none could reach it, but only if they are fewer than half. If
    no node can be singled out, all nodes carry the error: the cause is then the network or its settings, and excluding
    nodes won't help.

    The same applies to silence: one node, or a small share, is blamed for it; if many are silent, the file system or
    the start is slow. A node that started long after the first may miss the others for that reason alone.

    `folder` must only hold results of this check: an older result could hide that a node is dead.
    """
    results = {node: _read(folder / f"{node}.json") for node in nodes}
    found = {node: list(result.problems) if result else [] for node, result in results.items()}
    silent = [node for node, result in results.items() if result is None]
    within = f"within {seconds if waited is None else waited:.0f} s"
    if len(silent) <= max(1, SILENT_SHARE * len(nodes)):
        found |= {node: [f"no answer {within}"] for node in silent}
    if any(found.values()):
        return found
    if silent:
        return {node: [f"{len(silent)} of {len(nodes)} nodes gave no answer {within}"] for node in nodes}
    known = {node: result for node, result in results.items() if result is not None}
    failed = {node: result.collective.error for node, result in known.items() if result.collective.error}
    unfinished = [node for node, result in known.items() if result.stage != "done"]
    if unfinished and len(unfinished) < len(nodes):
        return found | {node: ["stopped answering in the all-reduce over the nodes"] for node in unfinished}
    if unfinished:
        return {node: ["the check was ended during the all-reduce over the nodes"] for node in nodes}
    if not failed:
        return found
    suspects, reason = _suspects(known)
    if suspects and not _late(folder, nodes, seconds).intersection(suspects):
        return found | {node: [reason] for node in suspects}
    return found | {node: [f"{error} (no single node is to blame)"] for node, error in failed.items()}


def results_of(folder: Path, nodes: list[str]) -> dict[str, NodeHealth]:
    """The results of those nodes that have written one."""
    found = {node: _read(folder / f"{node}.json") for node in nodes}
    return {node: result for node, result in found.items() if result}


def results_in(folder: Path) -> list[NodeHealth]:
    """All results in a folder."""
    return list(filter(None, map(_read, sorted(folder.glob("*.json")))))


def _late(folder: Path, nodes: list[str], seconds: float) -> set[str]:
    """Nodes that started long after the first."""
    begun = {node: mark_of(folder, node).stat().st_mtime for node in nodes if mark_of(folder, node).exists()}
    return {node for node, moment in begun.items() if moment - min(begun.values()) > LATE_SHARE * seconds}


def _suspects(results: dict[str, NodeHealth]) -> tuple[list[str], str]:
    """The minority of nodes that made the all-reduce fail for the others, and why."""
    missed = {number for result in results.values() for number in result.collective.missing}
    missing = [node for node, result in results.items() if result.number in missed]
    cut_off = [node for node, result in results.items() if not result.collective.reached]
    for suspects, reason in (
        (missing, "the other nodes timed out waiting for it"),
        (cut_off, "can't reach the first node"),
    ):
        if suspects and 2 * len(suspects) < len(results):
            return suspects, reason
    if len(cut_off) == len(results) - 1 > 1:
        return [node for node in results if node not in cut_off], "no other node can reach it"
    return [], ""


def this_task() -> Task:
    """This task, if the scheduler started one per node; otherwise the only task."""
    told = cluster().task(os.environ)
    if told is None or told.count == 1:
        return Task(0, 1, "127.0.0.1", 0)
    return Task(told.rank, told.count, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def node_name() -> str:
    """The scheduler's name of this node, by which it can be excluded."""
    return cluster().node_name(os.environ) or socket.gethostname()


def check_gpus(gpus: int, memory_gib: float | None, result: Result) -> bool:
    """Check the GPUs with nvidia-smi; returns False if not all ranks could start."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = driver.query()
        patience = time.monotonic() + OCCUPIED_PATIENCE_SECONDS
        while any(map(driver.occupied_gib, driver.visible(listed, chosen))) and time.monotonic() < patience:
            time.sleep(1)
            listed = driver.query()
    except FileNotFoundError:
        result.problems.append("nvidia-smi isn't there: no driver, or the container was started without one")
        return False
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        result.problems.append(f"nvidia-smi fails: {error}")
        return False
    result.measured["gpus"] = found = driver.visible(listed, chosen)
    result.problems += [problem for gpu in found for problem in driver.problems(gpu, memory_gib)]
    xids = driver.read_xids()
    result.measured["xids"] = xids if xids is None else [str(xid) for xid in xids]
    result.problems += driver.xid_problems(xids or [], found)
    if (count := driver.count(listed, chosen)) != gpus:
        result.problems.append(f"{counted(count, 'GPU')} instead of {gpus}")
    return count == gpus


def measure_folder(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Write a file, read it back, and measure the free space. If the file system hangs, the watchdog ends the check."""
    probe = folder / f".health.{node_name()}.{os.getpid()}"
    data = os.urandom(TEST_BYTES)
    measured: dict[str, Any] = {"path": str(folder)}
    try:
        start = time.monotonic()
        with probe.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        same = probe.read_bytes() == data
        measured["seconds"] = round(time.monotonic() - start, 3)
        measured["free_bytes"] = shutil.disk_usage(folder).free
        if not same:
            problems.append(f"{folder}: a file doesn't read as it was written")
    except OSError as error:
        problems.append(f"{folder}: can't write there: {error.strerror or error}")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return measured


@dataclass(frozen=True)
class Workers:
    """One process per GPU, or one for the CPUs, that imports torch and then waits for the test's plan with its
    deadline."""

    processes: list[subprocess.Popen]
    logs: list[Path]


@contextlib.contextmanager
def importing(task: Task, gpus: int) -> Iterator[Workers]:
    with tempfile.TemporaryDirectory(prefix="megaboa-health-") as name:
        logs = [Path(name, f"{rank}.log") for rank in range(max(1, gpus))]
        workers = Workers(_start(task, logs), logs)
        try:
            yield workers
        finally:
            for process in workers.processes:
                process.kill()
                process.wait()
                with contextlib.suppress(OSError):  # if it has ended
                    process.stdin.close()


def run_ranks(workers: Workers, task: Task, gpus: int, deadline: float, result: Result, out: Path) -> None:
    """Run the test in the workers, follow their output, and write the first result once the node's tests are done."""
    logs = workers.logs
    port = ReservedPort()  # rendezvous of this node's ranks
    plan = {"gpu": gpus > 0, "gpus": gpus, "deadline": deadline, "node_port": port.number}
    for process in workers.processes:
        with contextlib.suppress(OSError):  # the process has ended, and its log says why
            process.stdin.write(json.dumps(plan).encode() + b"\n")
            process.stdin.flush()
    watch = Watch({gpu["uuid"] for gpu in result.measured.get("gpus", [])})
    local = False
    while any(process.poll() is None for process in workers.processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        watch.look()
        if not local and all(_knows_node(said(log), gpus) for log in logs):
            local = True
            judge_node([said(log) for log in logs], logs, gpus, result, watch)
            result.doing = BETWEEN_NODES
            result.write(out)
    port.close()
    if not local:
        judge_node([said(log) for log in logs], logs, gpus, result, watch)
    judge_nodes([said(log) for log in logs], task, result)


def _start(task: Task, logs: list[Path]) -> list[subprocess.Popen]:
    ranks = len(logs)
    library = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (library, os.environ.get("PYTHONPATH"))))
    workers = []
    for local, log in enumerate(logs):
        rank = task.number * ranks + local
        environment = rank_environment(rank, local, task.nodes * ranks, task.address, task.port)
        with log.open("wb") as stream:
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "megaboa.run.health_rank", str(os.getpid())],
                    env={**os.environ, **environment, "PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
            )
    return workers


def said(log: Path) -> dict[str, dict[str, Any]]:
    """A rank's findings so far, by step; lines of other origin in its log are ignored."""
    found = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and "said" in entry:
                found[entry["said"]] = entry
    return found


def _knows_node(steps: dict[str, Any], gpus: int) -> bool:
    return ("node" if gpus > 1 else "multiply") in steps


def judge_node(ranks: list[dict[str, Any]], logs: list[Path], gpus: int, result: Result, watch: Watch) -> None:
    """Judge the findings that only this node can be to blame for."""
    names = [f"GPU {number}" for number in range(gpus)] or ["processors"]
    silent = False
    for name, steps, log in zip(names, ranks, logs, strict=True):
        if "multiply" not in steps:
            silent = True
            doing = "multiplying matrices" if "started" in steps else "importing torch"
            result.problems.append(f"{name}: no result of {doing}: {_last_words(steps, log)}")
        elif steps["multiply"]["wrong"]:
            result.problems.append(f"{name}: {steps['multiply']['wrong']} wrong numbers in a product of matrices")
    result.measured["tflops"] = _of_each("tflops", ranks)
    if gpus:
        for name in ("host_gb_per_second", "memory_gb_per_second"):
            result.measured[name] = _of_each(name, ranks)
        watched = watch.found()
        result.measured["watched"] = [asdict(gpu) for gpu in watched]
        result.measured["sm_mhz"] = [gpu.sm_mhz for gpu in watched]
        result.problems += gpu_watch.problems(watched)
    if gpus > 1 and not silent:  # a silent GPU, reported above, makes its neighbours wait
        for name, steps, log in zip(names, ranks, logs, strict=True):
            if "node" not in steps:
                result.problems.append(f"{name}: all-reduce over the GPUs of the node: {_last_words(steps, log)}")
            elif steps["node"]["wrong"]:
                result.problems.append(f"{name}: {steps['node']['wrong']} wrong numbers after a collective")
        result.measured |= _slowest("node", [steps["node"] for steps in ranks if "node" in steps])


def judge_nodes(ranks: list[dict[str, Any]], task: Task, result: Result) -> None:
    """Note how far this node got with the others, without saying whose fault it is."""
    result.reached = task.nodes == 1 or all("reached" in steps for steps in ranks)
    result.missing = sorted({node for steps in ranks for node in steps.get("missing", {}).get("nodes", [])})
    done = [steps["world"] for steps in ranks if "world" in steps]
    if task.nodes > 1:
        result.measured |= _slowest("nodes", done)
    if result.problems:
        return
    failed = [steps["failed"]["error"] for steps in ranks if "failed" in steps]
    if not result.reached:
        result.error = f"can't reach the first node at {task.address}:{task.port}: {(failed or ['no answer'])[0]}"
    elif result.missing:
        result.error = f"waited for {len(result.missing)} of {task.nodes} nodes until the time-out"
    elif len(done) < len(ranks):
        result.error = f"the all-reduce over {task.nodes} nodes failed: {(failed or ['not done in time'])[0]}"
    elif wrong := sum(step.get("wrong", 0) for step in done):
        result.error = f"{wrong} wrong numbers after a collective over {task.nodes} nodes"


def _of_each(name: str, ranks: list[dict[str, Any]]) -> list[float | None]:
    """A value that each rank measured on its own GPU."""
    found = (steps.get("multiply", {}).get(name) for steps in ranks)
    return [None if rate is None else round(rate, 3) for rate in found]


def _slowest(where: str, done: list[dict[str, Any]]) -> dict[str, float]:
    """The lowest rate of each collective, over the node's GPUs or over the nodes."""
    names = ("gb_per_second", "all_to_all_gb_per_second")
    rates = {name: [step[name] for step in done if name in step] for name in names}
    return {f"{where}_{name}": round(min(found), 3) for name, found in rates.items() if found}


def _last_words(steps: dict[str, Any], log: Path) -> str:
    if "failed" in steps:
        return steps["failed"]["error"]
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    noise = [line for line in lines if not line.startswith('{"said"')]
    return noise[-1].strip() if noise else "no answer in time"


def _give_up(result: Result, out: Path, seconds: float) -> None:
    """Report and exit because something hangs that can't be interrupted, such as a file system or the driver."""
    text = f"not done within {seconds:g} s: it hangs in {result.doing}"
    if result.doing == BETWEEN_NODES:
        result.error = text  # possibly another node's fault
    else:
        result.problems.append(text)
    result.stage = "done"
    result.write(out)
    os._exit(0)


def _read(path: Path) -> NodeHealth | None:
    try:
        return read(NodeHealth, path)
    except (OSError, ValueError):
        return None
