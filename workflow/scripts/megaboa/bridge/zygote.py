"""The zygote: a process that has imported Megatron-Bridge, and forks those that need it (`handover`).

It serves one user and one state of everything that an import depends on (`zygote_protocol.key_of`), and ends after half
a minute without requests. That of a node's ranks ends with the task that started it; one that can't fork, after ten
minutes.

A process that has touched CUDA can't be forked, because the driver's state doesn't survive that. So the zygote only
imports, and children are the first to open a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import multiprocessing.process
import os
import select
import signal
import socket
import struct
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from megaboa.bridge import process
from megaboa.bridge import zygote_protocol as protocol
from megaboa.run import cuda_driver
from megaboa.scheduler.local import die_with_parent
from megaboa.scheduler.ranks import KEEPER

IDLE_SECONDS = 30.0
REFUSING_SECONDS = 600.0  # for so long, a zygote that can't fork answers with the reason, and no other one starts
# Modules imported by commands that hand over, with everything that these import.
IMPORTED = ("train", "training", "convert", "proof", "source", "corpus_samples", "index", "preflight")


@dataclass(frozen=True)
class Child:
    pid: int
    end: int  # becomes readable when the child has ended
    connection: socket.socket


class Zygote:
    """Accepts requests, forks, and reports how children ended."""

    def __init__(self, listener: socket.socket, refusal: str | None = None):
        self.listener, self.refusal = listener, refusal
        self.pid = os.getpid()
        self.sources = _sources()
        self.children: list[Child] = []
        self.poll = select.poll()
        self.poll.register(listener, select.POLLIN)

    def serve(self) -> protocol.Request | None:
        """Serve until idle. Returns a request only in a child, which has to run it."""
        idle = REFUSING_SECONDS if self.refusal else IDLE_SECONDS
        while self.children or self.listener.fileno() >= 0:
            waits = self.children or KEEPER in os.environ  # a keeper's ranks may be started late
            ready = {number for number, _ in self.poll.poll(None if waits else 1000 * idle)}
            if not ready:
                return None
            for child in list(self.children):
                if child.end in ready:
                    self._ended(child)
                elif child.connection.fileno() in ready:
                    self._left_alone(child)
            if self.listener.fileno() in ready and (request := self._accept()):
                return request
        return None

    def _accept(self) -> protocol.Request | None:
        connection, _ = self.listener.accept()
        if self.sources != _sources():  # the imported sources have changed
            self.poll.unregister(self.listener)
            self.listener.close()
            connection.close()
            return None
        streams: list[int] = []
        try:
            request = _read(connection, streams)
            if self.refusal:
                reason = self.refusal.encode()
                connection.sendall(protocol.LENGTH.pack(protocol.REFUSED) + protocol.LENGTH.pack(len(reason)) + reason)
            pid = None if self.refusal else os.fork()
        except (OSError, ValueError, TypeError, struct.error):
            pid = None
        if pid == 0:
            return self._begin(request, connection, streams)
        for stream in streams:
            os.close(stream)
        if pid is None:
            connection.close()
            return None
        try:
            child = Child(pid, os.pidfd_open(pid), connection)
        except OSError:  # too many open files: the child can't be monitored, and hasn't begun
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            connection.close()
            return None
        self.children.append(child)
        self.poll.register(child.end, select.POLLIN)
        self.poll.register(connection, select.POLLRDHUP)
        with contextlib.suppress(OSError):  # the caller has ended, which the next poll reports
            connection.sendall(protocol.LENGTH.pack(pid))
        return None

    def _begin(self, request: protocol.Request, connection: socket.socket, streams: list[int]) -> protocol.Request:
        """Set up a child. It must close the connections of other children, because an open copy would hide from their
        callers that the zygote closed its end."""
        die_with_parent(self.pid)
        self.listener.close()
        for child in self.children:
            os.close(child.end)
            child.connection.close()
        try:
            connection.settimeout(protocol.START_SECONDS)
            protocol.receive(connection, len(protocol.BEGIN))
        except OSError:
            os._exit(1)
        connection.close()
        for number, stream in enumerate(streams):
            if number < 3:
                os.dup2(stream, number)
                os.close(stream)
            else:
                os.set_inheritable(stream, False)
        return request

    def _left_alone(self, child: Child) -> None:
        """Kill a child whose caller was killed, so that nothing the caller started survives it."""
        self.poll.unregister(child.connection)
        child.connection.close()
        _kill(child)

    def _ended(self, child: Child) -> None:
        status = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if status.si_code != os.CLD_EXITED or status.si_status:
            _kill(child)  # kills the child's group, before its number can be reused
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        self.children.remove(child)
        self.poll.unregister(child.end)
        os.close(child.end)
        if child.connection.fileno() >= 0:
            self.poll.unregister(child.connection)
            with contextlib.suppress(OSError):
                child.connection.sendall(protocol.EXIT_CODE.pack(code))
            child.connection.close()


def _sources() -> dict[str, int]:
    """The files of all imported modules, with their modification times."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    found = {}
    for path in filter(None, files):
        with contextlib.suppress(OSError):
            found[path] = Path(path).stat().st_mtime_ns
    return found


def _read(connection: socket.socket, streams: list[int]) -> protocol.Request:
    """Read a request; the streams sent with it are added to `streams`."""
    if protocol.peers_user(connection) != os.geteuid():
        raise PermissionError("another user's")
    connection.settimeout(10)
    size, received, _, _ = socket.recv_fds(connection, protocol.LENGTH.size, protocol.MOST_STREAMS)
    streams += received
    return protocol.Request(**json.loads(protocol.receive(connection, *protocol.LENGTH.unpack(size))))


def _kill(child: Child) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child.pid, signal.SIGKILL)


def _become(request: protocol.Request, imported: Mapping[str, str]) -> None:
    """Run the caller's script in this child, as if Python had been started with it.

    `imported`: variables set by imports.
    """
    os.setsid()
    os.chdir(request.folder)
    multiprocessing.process.ORIGINAL_DIR = request.folder  # where spawned processes look for the script
    os.umask(request.umask)
    os.sched_setaffinity(0, request.processors)
    for number in protocol.PASSED_ON:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request.ignored else usual)
    os.environ.clear()
    os.environ.update({**request.environment, **imported})
    protocol.show([sys.executable, *request.words])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(
            line_buffering=stream is sys.stderr or stream.isatty(),
            write_through=bool(os.environ.get("PYTHONUNBUFFERED")),
        )
    sys.argv = request.words
    named = Path(request.words[0]).absolute()
    script = named / "__main__.py" if named.is_dir() else named
    sys.path[0] = str(named if named.is_dir() else named.resolve().parent)
    sys.modules["numpy"].random.seed()  # Python's own generator is reseeded by the fork
    sys.modules["torch"].set_num_threads(int(os.environ.get(protocol.THREADS[0]) or len(request.processors)))
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    if named.is_dir():
        main.__spec__ = ModuleSpec("__main__", None)  # as in Python, so that spawned processes don't import it
    sys.modules["__main__"] = main
    exec(compile(script.read_bytes(), script, "exec"), vars(main))


def _why_not_forked() -> str | None:
    """The reason why this process can't be forked.

    A child lacks other threads, and might wait for a lock that one of them held. CUDA fails in a child.
    """
    if threads := _threads():
        return f"threads were started by an import ({', '.join(threads)}), so that no process can be forked"
    if _has_opened_cuda():
        return "an import has opened CUDA, so that no process can be forked"
    return None


def _has_opened_cuda() -> bool:
    """Whether CUDA, or NVML, was opened: both open the driver's memory manager."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("/dev/nvidia-uvm"):
                return True
    return False


def _threads() -> list[str]:
    """The kernel's names of other threads, except that of pyarrow's allocator, which handles forks itself."""
    tasks = (task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid())
    return sorted({name for task in tasks if (name := (task / "comm").read_text().strip()) != "jemalloc_bg_thd"})


@contextlib.contextmanager
def _without_opening_cuda(device: str) -> Iterator[None]:
    """Answer torch.cuda's questions about GPUs during imports, from what another process was told.

    Megatron and ModelOpt ask for GPUs and their capability when they are imported. PyTorch would ask CUDA or NVML,
    which both start a driver thread.
    """
    known = cuda_driver.capabilities() if device == "cuda" else None
    if not known:
        yield
        return
    import torch

    def capability(device: Any = None) -> tuple[int, int]:
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        return known[index or 0]

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: len(known),
        "get_device_capability": capability,
    }
    by_cuda = {name: getattr(torch.cuda, name) for name in answers}
    vars(torch.cuda).update(answers)
    try:
        yield
    finally:
        vars(torch.cuda).update(by_cuda)


def main() -> None:
    key, device = sys.argv[1:3]
    if KEEPER in os.environ:
        # A scheduler signals all processes of a step; ranks get the signal themselves.
        for number in protocol.PASSED_ON:
            signal.signal(number, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(protocol.address(key))
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return  # another process was faster, or the kernel is too old
        listener.listen(128)  # callers wait here until the imports are done
        before = dict(os.environ)
        signal.alarm(int(protocol.START_SECONDS))  # a hanging import must not keep callers waiting
        with _without_opening_cuda(device):
            process.prepare(device)
            for name in IMPORTED:
                importlib.import_module(f"megaboa.bridge.{name}")
        # Fills inspect's table of files, for which it looks at every folder above every module: 36,000 times in each
        # child.
        inspect.getmodule(inspect.currentframe())
        signal.alarm(0)
        gc.freeze()
        process.forked_for(device)
        imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
        request = Zygote(listener, _why_not_forked()).serve()
    if request:
        _become(request, imported)


if __name__ == "__main__":
    main()
