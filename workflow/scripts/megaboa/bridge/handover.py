"""Hands a command's work to a fork of a process that has already imported Megatron-Bridge, which takes ten seconds of
CPU time.

A command calls `to_zygote()` before it imports anything heavy. If MEGABOA_ZYGOTE is `cpu` or `cuda` (the workflow sets
it for an experiment on this machine), a child of the zygote then does the work, with the same arguments, environment,
folder and streams, from the first line of the script or of `megaboa`. The calling process only passes on signals and
the exit code. If anything prevents that, to_zygote() returns, and the command imports for itself.

The first process that needs the zygote starts it. If a scheduler starts one task per node, that task starts the zygote
(`become_zygote`) before its ranks, and the zygote ends with the task.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from megaboa.bridge import zygote_protocol as protocol
from megaboa.scheduler.local import die_with_parent
from megaboa.scheduler.ranks import FORKED, HELD, KEEPER
from megaboa.scheduler.registry import may_be_forked

POLL_SECONDS = 0.2
CONNECT_SECONDS = 20.0  # until the zygote listens, which precedes its imports
STARTS = 3  # per process


def to_zygote(device: str | None = None) -> None:
    """Let a child of the zygote do this process's work, and exit like the child. Returns in the child, or if there is
    no zygote.

    `device`: `cpu` for work that never opens a GPU; default: the experiment's device.
    """
    if not may_be_forked(os.environ):
        return
    if HELD in os.environ:  # a rank, which must not outlive its starter
        die_with_parent()
    try:
        connection, child = _forked_child(device or os.environ[FORKED])
    except RefusedError as reason:
        print(f"megaboa: imports for itself: {reason}", file=sys.stderr, flush=True)
        return
    except (OSError, ValueError):
        return
    _accompany(connection, child)


def start_zygote() -> None:
    """Start a zygote's imports before its first child is needed."""
    if may_be_forked(os.environ):
        with contextlib.suppress(OSError, ValueError):
            _connect(os.environ[FORKED]).close()


def become_zygote() -> NoReturn:
    """Become the zygote of a node's ranks, for the life of the process that started this one."""
    die_with_parent(int(os.environ[KEEPER]))  # it may have ended already
    device = os.environ[FORKED]
    words = protocol.command(protocol.key_of(device), device)
    os.chdir(Path(__file__).parents[2])
    os.execve(words[0], words, protocol.zygote_environment() | {KEEPER: os.environ[KEEPER]})


class RefusedError(OSError):
    """The zygote refuses to fork, and says why."""


def _forked_child(device: str) -> tuple[socket.socket, int]:
    """A connection to the zygote, and a new child; raises OSError if there is none."""
    connection = _connect(device)
    try:
        return connection, _ask(connection)
    except (ConnectionResetError, BrokenPipeError):  # it was idle, or its sources have changed: use the next one
        connection.close()
    connection = _connect(device)
    return connection, _ask(connection)


def _connect(device: str) -> socket.socket:
    """A connection to the zygote for this device, started if there is none; raises OSError if that fails."""
    key = protocol.key_of(device)
    deadline, started, starts = time.monotonic() + CONNECT_SECONDS, None, 0
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(protocol.address(key))
        except ConnectionRefusedError:
            connection.close()
        else:
            if protocol.peers_user(connection) != os.geteuid():
                connection.close()
                raise PermissionError("another user's")
            connection.settimeout(protocol.START_SECONDS)
            return connection
        # There is no zygote, or another process has just started one. A keeper's zygote starts by itself.
        if KEEPER not in os.environ and (started is None or started.poll() is not None):
            if starts == STARTS:
                break
            started, starts = _start(key, device), starts + 1
        time.sleep(0.05)
    raise ConnectionRefusedError("no zygote")


def _start(key: str, device: str) -> subprocess.Popen:
    return subprocess.Popen(
        protocol.command(key, device),
        env=protocol.zygote_environment(),
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _ask(connection: socket.socket) -> int:
    """Send the request for a child; return the child's process number."""
    content = json.dumps(asdict(protocol.Request.of_this_process())).encode()
    held = map(int, os.environ.get(HELD, "").split())
    socket.send_fds(connection, [protocol.LENGTH.pack(len(content))], [0, 1, 2, *held])
    connection.sendall(content)
    child = protocol.receive_number(connection, protocol.LENGTH)
    if child == protocol.REFUSED:
        size = protocol.receive_number(connection, protocol.LENGTH)
        raise RefusedError(protocol.receive(connection, size).decode())
    connection.sendall(protocol.BEGIN)
    return child


def _accompany(connection: socket.socket, child: int) -> NoReturn:
    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in protocol.PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    protocol.show([f"megaboa: what process {child} does is done for this one"])
    # Polls, because a signal that arrives just before a blocking call would only be passed on after it.
    while not select.select([connection], [], [], POLL_SECONDS)[0]:
        pass
    try:
        code = protocol.receive_number(connection, protocol.EXIT_CODE)
    except OSError:
        code = -signal.SIGKILL  # the zygote was killed, and so were its children
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code
    os._exit(code)
