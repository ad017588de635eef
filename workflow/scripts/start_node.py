"""Start the ranks of one node, as the only task there (`launch.tasks: node`).

`python start_node.py --ranks=8 --logs=FOLDER --fork=cuda -- COMMAND...`; the scheduler says which node this is. With
--wait=FILE nothing is started until that file says what: for the attempt after this one, should there be one. With
--fork Bridge is imported once, by a process from which the ranks are then forked: eight ranks that import for
themselves read the same thousands of small files eight times.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Set
from pathlib import Path

from megaboa.records import StandbyOrder, parse
from megaboa.run import cores
from megaboa.scheduler.local import DEVICES, POLL_SECONDS, LocalRanks
from megaboa.scheduler.ranks import FORKED, KEEPER, STACKS_SIGNAL, STARTS
from megaboa.scheduler.registry import cluster


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="ranks of this node")
    parser.add_argument("--logs", type=Path, required=True, help="folder of the ranks' logs")
    parser.add_argument("--fork", choices=DEVICES, help="fork the ranks from one process, made fit for this device")
    parser.add_argument("--wait", type=Path, help="an empty file, until it says what every rank runs, where, and how")
    parser.add_argument("--bind", action="store_true", help="bind each rank to its share of the task's processors")
    parser.add_argument("command", nargs="+", help="what every rank runs")
    arguments = parser.parse_args()
    here = cluster().task(os.environ)
    if here is None:
        sys.exit("not started by a scheduler, so the number of this node is unknown: set launch.tasks to rank")
    environment = dict(os.environ)
    keeper = None
    if arguments.fork:
        environment |= {FORKED: arguments.fork, KEEPER: str(os.getpid())}
        with (arguments.logs / f"keeper-{here.node}.log").open("ab") as log:
            keeper = subprocess.Popen(
                [*arguments.command[:2], "--keep"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    try:
        command, logs, processors = arguments.command, arguments.logs, []
        if arguments.bind:  # after the keeper, which imports meanwhile
            processors = cores.of_ranks(arguments.ranks, here.processors, environment)
            told = " | ".join(map(listed, processors)) or "those of the task"
            print(f"processors of each rank: {told}", file=sys.stderr, flush=True)
        if arguments.wait:
            order = order_in(arguments.wait)
            command, logs = order.command, Path(order.logs)
            environment = {**environment, **order.environment}
        first = here.node * arguments.ranks
        print(f"{STARTS}{first} to {first + arguments.ranks - 1}", file=sys.stderr, flush=True)
        return supervise(
            LocalRanks(
                command,
                here.nodes * arguments.ranks,
                logs,
                environment,
                first=first,
                count=arguments.ranks,
                processors=processors,
            )
        )
    finally:
        if keeper:
            keeper.kill()
            keeper.wait()


def listed(processors: Set[int]) -> str:
    return ",".join(map(str, sorted(processors)))


def order_in(path: Path) -> StandbyOrder:
    """Read again and again: an open sees on every host what another has written."""
    while not (text := path.read_text()).endswith("\n"):
        time.sleep(POLL_SECONDS)
    return parse(StandbyOrder, json.loads(text), path)


def supervise(ranks: LocalRanks) -> int:
    """Until they have ended: in the same way."""
    # A step's signal reaches all processes of the step, so the ranks have it already; this one waits for them.
    for number in (signal.SIGTERM, STACKS_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    while (ended := ranks.poll()) is None:
        time.sleep(POLL_SECONDS)
    print(ended, file=sys.stderr)
    if ended.killed:  # end in the same way, so that the launcher can tell
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-ended.returncode, signal.SIG_DFL)
        sys.stderr.flush()
        os.kill(os.getpid(), -ended.returncode)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
