"""Fork processes that need Megatron-Bridge from one that has imported it: an import costs ten seconds of a processor.

A script calls `hand_over()` before it imports anything heavy. Where MEGABOA_ZYGOTE=1 (the workflow sets it for an
experiment on this machine's CPU) the script's work is then done by a child of the zygote, with the script's arguments,
environment, folder and streams, and the process that called only passes on signals and the exit code. If anything is
in the way, hand_over() returns, and the script imports for itself.

The zygote is started by whoever needs it first. It serves one user and one state of everything that an import depends
on (`_key`), and ends when nobody has needed it for half a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import multiprocessing.process
import os
import resource
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import types
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from megaboa.bridge import process
from megaboa.launch.local import HELD

VARIABLE = "MEGABOA_ZYGOTE"
IDLE_SECONDS = 30.0
POLL_SECONDS = 0.2
START_SECONDS = 120.0  # from the start of a zygote until it has imported Bridge, on a busy machine
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# What scripts that hand over import, with all that these import.
IMPORTED = ("train", "convert", "proof", "source", "dataset", "index", "preflight")
# What differs from process to process, and no import reads. Everything else is part of the key.
OWN_PREFIXES = ("MEGABOA_", "WANDB_", "PYTEST_", "SNAKEMAKE_", "GOTO_", "OPENBLAS_", "VECLIB_", "NUMEXPR_")
OWN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PWD", "OLDPWD", "SHLVL", "_", "TERM"}
OWN |= {"PYTHONUNBUFFERED", "COLUMNS", "LINES"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # the zygote has one; a child, its own number
TITLE_BYTES = 4096
_LENGTH = struct.Struct("!Q")


def hand_over() -> None:
    """Let a child of the zygote do this script's work, and end as it ends. In that child, and without one: return."""
    if HELD in os.environ:
        with contextlib.suppress(OSError):
            os.set_inheritable(int(os.environ[HELD]), False)
    if os.environ.get(VARIABLE) != "1" or not sys.platform.startswith("linux") or "SLURM_JOB_ID" in os.environ:
        return
    if (connection := _connect(_key())) is None:
        return
    try:
        child = _ask(connection)
    except (OSError, ValueError):
        return
    _accompany(connection, child)


@dataclass(frozen=True)
class Request:
    """What a child of the zygote becomes."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    umask: int
    processors: list[int]
    ignored: list[int]  # signals

    @classmethod
    def of_this_process(cls) -> Request:
        umask = os.umask(0o077)
        os.umask(umask)
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
        return cls(sys.argv, str(Path.cwd()), environment, umask, sorted(os.sched_getaffinity(0)), ignored)


def _key() -> str:
    """A digest of all that an import depends on, and of what a child can't take over from the one that asked."""
    library = Path(__file__).parents[1]
    sources = [(str(path), path.stat().st_mtime_ns) for path in sorted(library.rglob("*.py"))]
    packages = [(path, Path(path).stat().st_mtime_ns) for path in sys.path if path.endswith("site-packages")]
    environment = sorted(_environment().items())
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    places = [str(path.readlink()) for path in [*sorted(Path("/proc/self/ns").iterdir()), Path("/proc/self/root")]]
    rights = [os.getresuid(), os.getresgid(), os.getgroups(), os.getpriority(os.PRIO_PROCESS, 0)]
    interpreter = [sys.executable, sys.version, sys.path[1:], subprocess._args_from_interpreter_flags()]
    parts = [interpreter, sources, packages, environment, limits, places, rights]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _environment() -> dict[str, str]:
    """The zygote's."""
    own = {name for name in os.environ if name in OWN or name.startswith(OWN_PREFIXES)}
    return {name: value for name, value in os.environ.items() if name not in own} | dict.fromkeys(THREADS, "1")


def _address(key: str) -> str:
    return f"\0megaboa-zygote-{key}"  # abstract: no file is left, whatever happens


def _peers_user(connection: socket.socket) -> int:
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


def _show(words: list[str]) -> None:
    """Be seen by `ps` and `pgrep` with these words, as far as there is room."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        start, end = int(fields[45]), int(fields[46])  # proc(5): arg_start, arg_end
        room = end - start
        ctypes.memmove(start, b"\0".join(map(os.fsencode, words))[: room - 1].ljust(room, b"\0"), room)


# --- the process that asks ------------------------------------------------------------------------------------------


def _connect(key: str) -> socket.socket | None:
    """A connection to the zygote of this key, which is started where there is none."""
    deadline, started = time.monotonic() + START_SECONDS, None
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(_address(key))
            if _peers_user(connection) == os.geteuid():
                connection.settimeout(START_SECONDS)
                return connection
            connection.close()
            return None
        except OSError:
            connection.close()
        if started is None or started.poll() is not None:  # it was idle, or another was faster
            started = _start(key)
        time.sleep(0.05)
    return None


def _start(key: str) -> subprocess.Popen:
    flags = subprocess._args_from_interpreter_flags()
    return subprocess.Popen(
        [sys.executable, *flags, "-m", "megaboa.bridge.zygote", key, " " * TITLE_BYTES],
        env=_environment(),
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _ask(connection: socket.socket) -> int:
    """Send what the child is to become; return its process number."""
    content = json.dumps(asdict(Request.of_this_process())).encode()
    held = [int(os.environ[HELD])] if HELD in os.environ else []
    socket.send_fds(connection, [_LENGTH.pack(len(content))], [0, 1, 2, *held])
    connection.sendall(content)
    (child,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return child


def _accompany(connection: socket.socket, child: int) -> NoReturn:
    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    _show([f"megaboa: what process {child} does is done for this one"])
    # Not for ever at a time: a signal that comes just before that would be passed on when it ends.
    while not select.select([connection], [], [], POLL_SECONDS)[0]:
        pass
    try:
        code = struct.unpack("!i", _receive(connection, 4))[0]
    except OSError:
        code = -signal.SIGKILL  # the zygote was killed, and its children with it
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
    end: int  # readable when it has ended
    connection: socket.socket


class Zygote:
    """Accepts requests, forks, and tells how children have ended."""

    def __init__(self, listener: socket.socket):
        self.listener = listener
        self.children: set[Child] = set()
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Until nobody needs it any more; in a child: what this process is to become."""
        while True:
            events = self.selector.select(None if self.children else IDLE_SECONDS)
            if not events and not self.children:
                return None
            for key, _ in events:
                if key.data is None:
                    if request := self._accept():
                        return request
                elif key.fileobj is key.data.connection:
                    self._left_alone(key.data)
                else:
                    self._ended(key.data)

    def _accept(self) -> Request | None:
        connection, _ = self.listener.accept()
        try:
            request, streams = _read(connection)
        except (OSError, ValueError, TypeError, struct.error):
            connection.close()
            return None
        if not (pid := os.fork()):
            self._forget_all()
            connection.close()
            for number, stream in enumerate(streams[:3]):
                os.dup2(stream, number)
                os.close(stream)
            return request
        for stream in streams:
            os.close(stream)
        child = Child(pid, os.pidfd_open(pid), connection)
        self.children.add(child)
        self.selector.register(child.end, selectors.EVENT_READ, child)
        self.selector.register(connection, selectors.EVENT_READ, child)
        with contextlib.suppress(OSError):  # it has gone: the selector says so
            connection.sendall(_LENGTH.pack(pid))
        return None

    def _left_alone(self, child: Child) -> None:
        """The process that asked was killed: nothing that it started may live on."""
        self.selector.unregister(child.connection)
        child.connection.close()
        _kill(child)

    def _ended(self, child: Child) -> None:
        status = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if status.si_code != os.CLD_EXITED or status.si_status:
            _kill(child)  # what it started, before its number can be another process's
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        self.children.remove(child)
        self.selector.unregister(child.end)
        os.close(child.end)
        if child.connection.fileno() >= 0:
            self.selector.unregister(child.connection)
            with contextlib.suppress(OSError):
                child.connection.sendall(struct.pack("!i", code))
            child.connection.close()

    def _forget_all(self) -> None:
        """In a child: a connection held open here would hide that its other end was closed."""
        self.selector.close()
        self.listener.close()
        for child in self.children:
            os.close(child.end)
            child.connection.close()


def _read(connection: socket.socket) -> tuple[Request, list[int]]:
    """What is asked for, and the streams that came with it."""
    if _peers_user(connection) != os.geteuid():
        raise PermissionError("another user's")
    connection.settimeout(10)
    size, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 4)
    try:
        return Request(**json.loads(_receive(connection, *_LENGTH.unpack(size)))), streams
    except BaseException:
        for stream in streams:
            os.close(stream)
        raise


def _kill(child: Child) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child.pid, signal.SIGKILL)


def _become(request: Request) -> None:
    """Do the script's work in this child, as if Python had been started with it."""
    os.setsid()
    process.die_with_parent()
    os.chdir(request.folder)
    multiprocessing.process.ORIGINAL_DIR = request.folder  # where processes that are spawned look for the script
    os.umask(request.umask)
    os.sched_setaffinity(0, request.processors)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request.environment)
    _show([sys.executable, *request.words])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(
            line_buffering=stream is sys.stderr or stream.isatty(),
            write_through=bool(os.environ.get("PYTHONUNBUFFERED")),
        )
    sys.argv = request.words
    script = str(Path(request.words[0]).absolute())
    sys.path[0] = str(Path(script).resolve().parent)
    sys.modules["numpy"].random.seed()  # Python's own generator is seeded again by the fork
    sys.modules["torch"].set_num_threads(int(os.environ.get(THREADS[0]) or len(request.processors)))
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))


def _threads() -> int:
    """Of this process; pyarrow's allocator looks after its own when a process forks."""
    return sum((task / "comm").read_text() != "jemalloc_bg_thd\n" for task in Path("/proc/self/task").iterdir())


def main() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(_address(sys.argv[1]))
        except OSError:
            return  # another was faster
        listener.listen(128)  # who asks now waits until all is imported
        process.prepare("cpu")
        for name in IMPORTED:
            importlib.import_module(f"megaboa.bridge.{name}")
        gc.freeze()
        if _threads() > 1:
            return  # a child would lack the others, and might wait for a lock that one of them holds
        request = Zygote(listener).serve()
    if request:
        _become(request)


if __name__ == "__main__":
    main()
