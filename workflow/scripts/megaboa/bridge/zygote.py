"""Forks processes that need Megatron-Bridge from one that has imported it, because the import takes ten seconds of CPU
time.

A command calls `hand_over()` before it imports anything heavy. If MEGABOA_ZYGOTE is `cpu` or `cuda` (the workflow sets
it for an experiment on this machine), a child of the zygote then does the work, with the same arguments, environment,
folder and streams, from the first line of the script or of `megaboa`. The calling process only passes on signals and
the exit code. If anything prevents that, hand_over() returns, and the command imports for itself.

The first process that needs the zygote starts it. It serves one user and one state of everything that an import depends
on (`_key`), and ends after half a minute without requests. If a scheduler starts one task per node, that task starts
the zygote (`keep`) before its ranks, and it ends with the task.

A process that has touched CUDA can't be forked, because the driver's state doesn't survive that. So the zygote only
imports, and children are the first to open a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import inspect
import json
import multiprocessing.process
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

from megaboa.bridge import process
from megaboa.run import gpus
from megaboa.scheduler.local import FORKED, HELD, KEEPER, die_with_parent, may_be_forked

IDLE_SECONDS = 30.0
REFUSING_SECONDS = 600.0  # for so long, a zygote that can't fork answers with the reason, and no other one starts
POLL_SECONDS = 0.2
START_SECONDS = 120.0  # for the import of Bridge, on a busy machine
CONNECT_SECONDS = 20.0  # until it listens, which precedes the imports
STARTS = 3  # per process
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Modules imported by commands that hand over, with everything that these import.
IMPORTED = ("train", "convert", "proof", "source", "corpus_samples", "index", "preflight")
# Variables that differ between processes, and that no import reads. All others are part of the key.
OWN_PREFIXES = ("MEGABOA_", "WANDB_", "PYTEST_", "SNAKEMAKE_")
OWN_PREFIXES += ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "FI_")  # only read when ranks connect
OWN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PWD", "OLDPWD", "SHLVL", "_", "TERM"}
OWN |= {"PYTHONUNBUFFERED", "COLUMNS", "LINES"}
OWN |= {"CUDA_DEVICE_MAX_CONNECTIONS"}  # only read when a process opens its GPU
OWN |= {"GOTO_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # 1 in the zygote; a child sets its own number
TITLE_BYTES = 4096
MOST_STREAMS = 5
_LENGTH = struct.Struct("!Q")
_REFUSED = 0  # sent instead of the child's number, and followed by the reason
_BEGIN = b"."  # sent by the caller, which has the child's number: the child may begin


def hand_over(device: str | None = None) -> None:
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


def warm() -> None:
    """Start a zygote's imports before its first child is needed."""
    if may_be_forked(os.environ):
        with contextlib.suppress(OSError, ValueError):
            _connect(os.environ[FORKED]).close()


def keep() -> NoReturn:
    """Become the zygote of a node's ranks, for the life of the process that started this one."""
    die_with_parent(int(os.environ[KEEPER]))  # it may have ended already
    device = os.environ[FORKED]
    words = _words(_key(device), device)
    os.chdir(Path(__file__).parents[2])
    os.execve(words[0], words, _environment() | {KEEPER: os.environ[KEEPER]})


class RefusedError(OSError):
    """The zygote refuses to fork, and says why."""


@dataclass(frozen=True)
class Request:
    """What a child of the zygote has to become."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    umask: int
    processors: list[int]
    ignored: list[int]  # ignored signals

    @classmethod
    def of_this_process(cls) -> Request:
        umask = os.umask(0o077)
        os.umask(umask)
        environment = {name: value for name, value in os.environ.items() if name != FORKED}
        ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
        return cls(sys.argv, str(Path.cwd()), environment, umask, sorted(os.sched_getaffinity(0)), ignored)


def _key(device: str) -> str:
    """Digest of everything that an import depends on, and of what a child can't take over from the caller."""
    library = Path(__file__).parents[1]
    sources = [(str(path), path.stat().st_mtime_ns) for path in sorted(library.rglob("*.py"))]
    packages = [(path, Path(path).stat().st_mtime_ns) for path in sys.path if path.endswith("site-packages")]
    environment = sorted(_environment().items())
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    places = [str(path.readlink()) for path in [*sorted(Path("/proc/self/ns").iterdir()), Path("/proc/self/root")]]
    rights = [os.getresuid(), os.getresgid(), os.getgroups(), os.getpriority(os.PRIO_PROCESS, 0)]
    places.append(Path("/proc/self/cgroup").read_text())
    interpreter = [sys.executable, sys.version, sys.path[1:], subprocess._args_from_interpreter_flags()]
    parts = [interpreter, sources, packages, environment, limits, places, rights, device, os.environ.get(KEEPER)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _environment() -> dict[str, str]:
    """The zygote's environment."""
    own = {name for name in os.environ if name in OWN or name.startswith(OWN_PREFIXES)}
    return {name: value for name, value in os.environ.items() if name not in own} | dict.fromkeys(THREADS, "1")


def _words(key: str, device: str) -> list[str]:
    """The zygote's command line, with room for its children's."""
    flags = subprocess._args_from_interpreter_flags()
    return [sys.executable, *flags, "-m", "megaboa.bridge.zygote", key, device, " " * TITLE_BYTES]


def _address(key: str) -> str:
    return f"\0megaboa-zygote-{key}"  # abstract, so that no file is ever left


def _peers_user(connection: socket.socket) -> int:
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


def _show(words: list[str]) -> None:
    """Show these words in `ps` and `pgrep`, as far as there is room."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        start, end = int(fields[45]), int(fields[46])  # proc(5): arg_start, arg_end
        room = end - start
        ctypes.memmove(start, b"\0".join(map(os.fsencode, words))[: room - 1].ljust(room, b"\0"), room)


# --- the calling process --------------------------------------------------------------------------------------------


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
    key = _key(device)
    deadline, started, starts = time.monotonic() + CONNECT_SECONDS, None, 0
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(_address(key))
        except ConnectionRefusedError:
            connection.close()
        else:
            if _peers_user(connection) != os.geteuid():
                connection.close()
                raise PermissionError("another user's")
            connection.settimeout(START_SECONDS)
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
        _words(key, device),
        env=_environment(),
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _ask(connection: socket.socket) -> int:
    """Send the request for a child; return the child's process number."""
    content = json.dumps(asdict(Request.of_this_process())).encode()
    held = map(int, os.environ.get(HELD, "").split())
    socket.send_fds(connection, [_LENGTH.pack(len(content))], [0, 1, 2, *held])
    connection.sendall(content)
    (child,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if child == _REFUSED:
        raise RefusedError(_receive(connection, *_LENGTH.unpack(_receive(connection, _LENGTH.size))).decode())
    connection.sendall(_BEGIN)
    return child


def _accompany(connection: socket.socket, child: int) -> NoReturn:
    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    _show([f"megaboa: what process {child} does is done for this one"])
    # Polls, because a signal that arrives just before a blocking call would only be passed on after it.
    while not select.select([connection], [], [], POLL_SECONDS)[0]:
        pass
    try:
        code = struct.unpack("!i", _receive(connection, 4))[0]
    except OSError:
        code = -signal.SIGKILL  # the zygote was killed, and so were its children
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code
    os._exit(code)


def _receive(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        if not (more := connection.recv(size - len(content))):
            raise ConnectionResetError("the other side has ended")
        content += more
    return content


# --- the zygote -----------------------------------------------------------------------------------------------------


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

    def serve(self) -> Request | None:
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

    def _accept(self) -> Request | None:
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
                connection.sendall(_LENGTH.pack(_REFUSED) + _LENGTH.pack(len(reason)) + reason)
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
            connection.sendall(_LENGTH.pack(pid))
        return None

    def _begin(self, request: Request, connection: socket.socket, streams: list[int]) -> Request:
        """Set up a child. It must close the connections of other children, because an open copy would hide from their
        callers that the zygote closed its end."""
        die_with_parent(self.pid)
        self.listener.close()
        for child in self.children:
            os.close(child.end)
            child.connection.close()
        try:
            connection.settimeout(START_SECONDS)
            _receive(connection, len(_BEGIN))
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
                child.connection.sendall(struct.pack("!i", code))
            child.connection.close()


def _sources() -> dict[str, int]:
    """The files of all imported modules, with their modification times."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    found = {}
    for path in filter(None, files):
        with contextlib.suppress(OSError):
            found[path] = Path(path).stat().st_mtime_ns
    return found


def _read(connection: socket.socket, streams: list[int]) -> Request:
    """Read a request; the streams sent with it are added to `streams`."""
    if _peers_user(connection) != os.geteuid():
        raise PermissionError("another user's")
    connection.settimeout(10)
    size, received, _, _ = socket.recv_fds(connection, _LENGTH.size, MOST_STREAMS)
    streams += received
    return Request(**json.loads(_receive(connection, *_LENGTH.unpack(size))))


def _kill(child: Child) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child.pid, signal.SIGKILL)


def _become(request: Request, imported: Mapping[str, str]) -> None:
    """Run the caller's script in this child, as if Python had been started with it.

    `imported`: variables set by imports.
    """
    os.setsid()
    os.chdir(request.folder)
    multiprocessing.process.ORIGINAL_DIR = request.folder  # where spawned processes look for the script
    os.umask(request.umask)
    os.sched_setaffinity(0, request.processors)
    for number in PASSED_ON:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request.ignored else usual)
    os.environ.clear()
    os.environ.update({**request.environment, **imported})
    _show([sys.executable, *request.words])
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
    sys.modules["torch"].set_num_threads(int(os.environ.get(THREADS[0]) or len(request.processors)))
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
    if (threads := _threads()) > 1:
        return f"{threads - 1} threads were started by an import, so that no process can be forked"
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


def _threads() -> int:
    """Number of threads, except that of pyarrow's allocator, which handles forks itself."""
    return sum((task / "comm").read_text() != "jemalloc_bg_thd\n" for task in Path("/proc/self/task").iterdir())


@contextlib.contextmanager
def _without_opening_cuda(device: str) -> Iterator[None]:
    """Answer torch.cuda's questions about GPUs from nvidia-smi during imports.

    Megatron and ModelOpt ask for GPUs and their capability when they are imported. PyTorch would ask CUDA or NVML,
    which both start a driver thread.
    """
    known = gpus.capabilities(os.environ.get("CUDA_VISIBLE_DEVICES")) if device == "cuda" else None
    if not known:
        yield
        return
    import torch

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: len(known),
        "get_device_capability": lambda device=None: known[0],
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
        for number in PASSED_ON:  # a scheduler signals all processes of a step; ranks get the signal themselves
            signal.signal(number, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(_address(key))
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return  # another process was faster, or the kernel is too old
        listener.listen(128)  # callers wait here until the imports are done
        before = dict(os.environ)
        signal.alarm(int(START_SECONDS))  # a hanging import must not keep callers waiting
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
