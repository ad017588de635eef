"""Hangs of known causes, made on the spot, and what `megaboa.run.flight` makes of them: precision and recall.

Besides hangs, ranks that are well: some that are slow, and some that have come to their end. No hang should be seen.

Ranks are processes on this machine, with gloo. Groups are those of a small layout: tensor pairs (0,1), (2,3), ... and
data groups (0,2,...), (1,3,...). Each case picks ranks, the collective and its place at random; the seed is printed.
`python benchmarks/flight.py [--cases 10] [--ranks 4] [--seed 0] [--keep FOLDER]` prints a table. `--recorded FOLDER`
judges NCCL's dumps that others have recorded and labelled: `tests/attribution/unit/fr_traces` of nvidia-resiliency-ext.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

import torch
import torch.distributed as dist

from megaboa.bridge import flight as recorder
from megaboa.run import flight
from megaboa.scheduler.ranks import STACKS_SIGNAL

ANSWER_SECONDS = 30.0
CONNECT_SECONDS = 120.0
CLONE_NEWNET = 0x40000000


class Case:
    """A fault in some ranks after some rounds, and the expected verdict."""

    def __init__(self, kind: str, ranks: int, chance: random.Random):
        self.kind, self.size = kind, ranks
        self.rounds = chance.randrange(1, 6)
        self.place = chance.choice(("tensor", "data", "world"))
        count = 1 if kind in ("mismatch", "joined", "deadlock") else chance.choice((1, 1, 2))
        self.bad = sorted(chance.sample(range(ranks), count))
        if kind == "mismatch":  # if only two differ, the wrong one can't be determined
            self.place = "world"
        self.pause, self.asked_after = chance.uniform(0.3, 2), chance.uniform(1, 4)

    def rank(self, rank: int, ready: Callable[[], None]) -> None:
        groups = self._groups()
        mine = {name: next(group for ranks, group in made if rank in ranks) for name, made in groups.items()}
        data = torch.ones(8)
        for _ in range(self.rounds):
            for group in mine.values():
                dist.all_reduce(data, group=group)
        ready()
        if self.kind == "ended":  # some ranks have left already
            os._exit(0) if rank in self.bad else time.sleep(60)
        while self.kind == "slow":
            for name, group in mine.items():
                if rank in self.bad and name == self.place:
                    time.sleep(self.pause)
                dist.all_reduce(data, group=group)
        if self.kind == "joined":
            for _ in range(10_000):
                dist.all_reduce(torch.ones(1 << 20))
        if self.kind == "deadlock":  # each rank waits for one in its other group
            for name in ("data", "tensor") if rank % 4 in (0, 3) else ("tensor", "data"):
                dist.all_reduce(data, group=mine[name])
        for name in ("tensor", "data", "world"):
            if rank in self.bad and name == self.place:
                self._misbehave(data, mine[name])
            else:
                dist.all_reduce(data, group=mine[name])

    def _misbehave(self, data: torch.Tensor, group: dist.ProcessGroup) -> None:
        if self.kind == "mismatch":
            dist.broadcast(data, src=self.bad[0], group=group)  # the source of a broadcast leaves at once
        elif self.kind == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            reads_for_ever()

    def _groups(self) -> dict[str, list[tuple[list[int], dist.ProcessGroup]]]:
        pairs = [[rank, rank + 1] for rank in range(0, self.size, 2)]
        across = [list(range(first, self.size, 2)) for first in (0, 1)]
        named = {"tensor": pairs, "data": across, "world": [list(range(self.size))]}
        return {name: [(ranks, dist.new_group(ranks)) for ranks in lists] for name, lists in named.items()}


def reads_for_ever() -> None:
    while True:
        time.sleep(5)


def wait_until_still(pids: list[int]) -> None:
    """Wait until all ranks are stuck: for 1.5 seconds none has used the processor, or waited for it.

    Gloo's own loops don't count: they poll for ever, and some kernels charge them for it.
    """
    used, since, deadline = {}, time.monotonic(), time.monotonic() + CONNECT_SECONDS
    while time.monotonic() - since < 1.5 and time.monotonic() < deadline:
        threads = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
        stats = {task: thread_stat(task) for task in threads}
        now = {task: stat[11:13] for task, (name, stat) in stats.items() if name != "gloo_tcp_loop"}
        if now != used or any(stats[task][1][0] in "RD" for task in now):
            used, since = now, time.monotonic()
        time.sleep(0.05)


def thread_stat(task: Path) -> tuple[str, list[str]]:
    """A thread's name, and what follows it in /proc. One that has ended since it was listed has moved."""
    try:
        text = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "ended", ["R"]
    name, rest = text.split("(", 1)[1].rsplit(")", 1)
    return name, rest.split()


def is_written(dump: Path) -> bool:
    """Whether a dump contains the result of the second look."""
    return '"moved"' in dump.read_text()


def run(case: Case, folder: Path) -> flight.Verdict | None:
    """Start the ranks, wait until they are stuck, dump their states, and judge."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own_network = case.kind == "joined"
    leader = os.fork()
    if leader:
        os.waitpid(leader, 0)
        return flight.judge(flight.read(str(folder / "flight-rank-"), case.size), case.size)
    code = 1
    try:
        if own_network:  # a network of its own, which can be disconnected
            assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0, "needs root"
            os.system("ip link set lo up")
        pids = [start(case, rank, port, folder) for rank in range(case.size)]
        deadline = time.monotonic() + CONNECT_SECONDS
        while len(list(folder.glob("ready-*"))) < case.size and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        if own_network:
            os.system("ip link set lo down")
        if case.kind == "slow":
            time.sleep(case.asked_after)
        else:
            wait_until_still(pids)
        for pid in pids:
            os.kill(pid, STACKS_SIGNAL)
        answers = case.size - (len(case.bad) if case.kind in ("frozen", "ended") else 0)
        deadline = time.monotonic() + ANSWER_SECONDS
        while sum(map(is_written, folder.glob("flight-rank-*.json"))) < answers and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        code = 0
    finally:
        os._exit(code)


def start(case: Case, rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), recorder.PREFIX: str(folder / "flight-rank-"), "TORCH_FR_BUFFER_SIZE": "2000"}
    recorder.on_signal()
    try:
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=600), world_size=case.size, rank=rank
        )
        case.rank(rank, (folder / f"ready-{rank}").touch)
        time.sleep(60)
    finally:
        os._exit(1)


KINDS = ("frozen", "missing", "mismatch", "joined", "deadlock")
BENIGN = {"slow": "slow", "ended": "nothing"}  # expected verdicts on ranks that don't hang


def judge_recorded(folder: Path) -> None:
    """Judge recorded cases: folders with `_dump_<rank>` of every rank, and a log of the injected faults and their
    ranks."""
    print("| case | what was done | to ranks | said | of ranks | sentence |\n|---|---|---|---|---|---|")
    for log in sorted(folder.glob("*/fault_injection.log")):
        text = log.read_text()
        done = ", ".join(sorted(set(re.findall(r"fault_type: (\w+)", text))))
        ranks = re.findall(r"^Rank (\d+), fault_type", text, re.MULTILINE)
        size = len(list(log.parent.glob("_dump_*")))
        verdict = flight.judge(flight.read(f"{log.parent}/_dump_", size), size)
        said = (verdict.kind, ", ".join(map(str, verdict.ranks))) if verdict else ("nothing", "")
        print(f"| {log.parent.name} | {done} | {', '.join(ranks)} | {' | '.join(said)} | {verdict} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10, help="of each kind")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="leave the dumps and their labels there")
    parser.add_argument("--recorded", type=Path, metavar="FOLDER", help="judge these, and make none")
    args = parser.parse_args()
    if args.recorded:
        judge_recorded(args.recorded)
        return
    torch.set_num_threads(1)
    chance = random.Random(args.seed)
    came: Counter[tuple[str, str]] = Counter()
    right: Counter[str] = Counter()
    for kind in (*KINDS, *BENIGN):
        for number in range(args.cases):
            case = Case(kind, args.ranks, chance)
            with tempfile.TemporaryDirectory() as name:
                verdict = run(case, Path(name))
                if args.keep:
                    shutil.copytree(name, args.keep / f"{kind}-{number}", dirs_exist_ok=True)
            said, wanted = verdict.kind if verdict else "nothing", BENIGN.get(kind, kind)
            came[kind, said] += 1
            named = verdict is not None and verdict.ranks == tuple(case.bad)
            exact = said == wanted and (named or kind in ("joined", "deadlock", *BENIGN))
            right[kind] += exact
            if not exact:
                print(f"{kind} {case.bad} in {case.place}: {verdict}", file=sys.stderr)
    print(f"{args.ranks} ranks, {args.cases} cases of each kind, seed {args.seed}, torch {torch.__version__}\n")
    print("| what was done | cases | said so | said something else | precision | recall | with exactly these ranks |")
    print("|---|---:|---:|---|---:|---:|---:|")
    for kind in KINDS:
        cases, named = args.cases, sum(count for (_, said), count in came.items() if said == kind)
        hits = came[kind, kind]
        others = ", ".join(f"{said} {n}" for (real, said), n in came.items() if real == kind and said != kind) or "–"
        precision = f"{hits / named:.0%}" if named else "–"
        print(f"| {kind} | {cases} | {hits} | {others} | {precision} | {hits / cases:.0%} | {right[kind]} |")
    print("\n| what went on | cases | no hang | taken for a hang |\n|---|---:|---:|---|")
    for kind, wanted in BENIGN.items():
        others = ", ".join(f"{said} {n}" for (real, said), n in came.items() if real == kind and said != wanted)
        print(f"| {kind} | {args.cases} | {came[kind, wanted]} | {others or '–'} |")


if __name__ == "__main__":
    main()
