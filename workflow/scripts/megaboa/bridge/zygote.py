"""Fork processes that need Megatron-Bridge from one that has imported it: an import costs ten seconds of a processor.

A command calls `hand_over()` before it imports anything heavy. Where MEGABOA_ZYGOTE is `cpu` or `cuda` (the workflow
sets it for an experiment on this machine) its work is then done by a child of the zygote, with the same arguments,
environment, folder and streams, from the first line of the script or of `megaboa`; and the process that called only
passes on signals and the exit code. If anything is in the way, hand_over() returns, and the command imports for itself.

The first process that needs the zygote starts it. It serves one user and one state of everything that an import depends
on (`_key`), and ends after half a minute without requests. Where a scheduler starts one task per node, that task starts
it (`keep`), before its ranks, and it ends with that task.

A process that has touched CUDA can't be forked: the driver's state doesn't survive it. So the zygote only imports, and
children are the first to open a GPU.
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
REFUSING_SECONDS = 600.0  # for so long a zygote that can't fork answers with the reason, and no other one is started
POLL_SECONDS = 0.2
START_SECONDS = 120.0  # from the start of a zygote until it has imported Bridge, on a busy machine
CONNECT_SECONDS = 20.0  # until it listens, which it does before it imports anything
STARTS = 3  # by one process
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# What commands that hand over import, with all that these import.
IMPORTED = ("train", "convert", "proof", "source", "corpus_samples", "index", "preflight")
# What differs from process to process, and no import reads. Everything else is part of the key.
OWN_PREFIXES = ("MEGABOA_", "WANDB_", "PYTEST_", "SNAKEMAKE_")
OWN_PREFIXES += ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "FI_")  # read when ranks connect
OWN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PWD", "OLDPWD", "SHLVL", "_", "TERM"}
OWN |= {"PYTHONUNBUFFERED", "COLUMNS", "LINES"}
OWN |= {"CUDA_DEVICE_MAX_CONNECTIONS"}  # read when a process opens its GPU
OWN |= {"GOTO_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # the zygote has one; a child, its own number
TITLE_BYTES = 4096
MOST_STREAMS = 5
_LENGTH = struct.Struct("!Q")
_REFUSED = 0  # instead of the child's number; the reason follows
_BEGIN = b"."  # whoever asked is still there, and has the child's number: now it may begin


def hand_over(device: str | None = None) -> None:
    """Let a child of the zygote do this process's work, and end as it ends. In that child, and without one: return.

    `device`: `cpu` for work that opens no GPU in any experiment; default: the experiment's.
    """
    if not may_be_forked(os.environ):
        return
    if HELD in os.environ:  # a rank, which no starter may leave behind
        die_with_parent()
    try:
        connection, child = _begun(device or os.environ[FORKED])
    except RefusedError as reason:
        print(f"megaboa: imports for itself: {reason}", file=sys.stderr, flush=True)
        return
    except (OSError, ValueError):
        return
    _accompany(connection, child)


def warm() -> None:
    """Have a zygote import while its first child is not needed yet."""
    if may_be_forked(os.environ):
        with contextlib.suppress(OSError, ValueError):
            _connect(os.environ[FORKED]).close()


def keep() -> NoReturn:
    """Be the zygote of a node's ranks, for as long as the process lives that has started this one."""
    die_with_parent(int(os.environ[KEEPER]))  # which may have ended while this one began
    device = os.environ[FORKED]
    words = _words(_key(device), device)
    os.chdir(Path(__file__).parents[2])
    os.execve(words[0], words, _environment() | {KEEPER: os.environ[KEEPER]})


class RefusedError(OSError):
    """The zygote can't be forked, and has said why."""


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
        environment = {name: value for name, value in os.environ.items() if name != FORKED}
        ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
        return cls(sys.argv, str(Path.cwd()), environment, umask, sorted(os.sched_getaffinity(0)), ignored)


def _key(device: str) -> str:
    """A digest of all that an import depends on, and of what a child can't take over from the one that asked."""
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
    """The zygote's."""
    own = {name for name in os.environ if name in OWN or name.startswith(OWN_PREFIXES)}
    return {name: value for name, value in os.environ.items() if name not in own} | dict.fromkeys(THREADS, "1")


def _words(key: str, device: str) -> list[str]:
    """Of its command line, with room for those of its children."""
    flags = subprocess._args_from_interpreter_flags()
    return [sys.executable, *flags, "-m", "megaboa.bridge.zygote", key, device, " " * TITLE_BYTES]


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


def _begun(device: str) -> tuple[socket.socket, int]:
    """The connection to the zygote, and its child; OSError if there is none."""
    connection = _connect(device)
    try:
        return connection, _ask(connection)
    except (ConnectionResetError, BrokenPipeError):  # it was idle, or what it has imported was changed: take the next
        connection.close()
    connection = _connect(device)
    return connection, _ask(connection)


def _connect(device: str) -> socket.socket:
    """A connection to the zygote for this device, which is started where there is none; OSError if that can't be."""
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
        # The last one was idle, or another one was faster. A keeper's is on its way.
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
    """Send what the child is to become; return its process number."""
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

    def __init__(self, listener: socket.socket, refusal: str | None = None):
        self.listener, self.refusal = listener, refusal
        self.pid = os.getpid()
        self.sources = _sources()
        self.children: list[Child] = []
        self.poll = select.poll()
        self.poll.register(listener, select.POLLIN)

    def serve(self) -> Request | None:
        """Serve until idle. Returns in a child only, with what it is to run."""
        idle = REFUSING_SECONDS if self.refusal else IDLE_SECONDS
        while self.children or self.listener.fileno() >= 0:
            waits = self.children or KEEPER in os.environ  # whose ranks may be started late
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
        if self.sources != _sources():  # what was imported isn't what is there now
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
        except OSError:  # too many open files: it can't be looked after, and hasn't begun
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            connection.close()
            return None
        self.children.append(child)
        self.poll.register(child.end, select.POLLIN)
        self.poll.register(connection, select.POLLRDHUP)
        with contextlib.suppress(OSError):  # it has gone: the next poll says so
            connection.sendall(_LENGTH.pack(pid))
        return None

    def _begin(self, request: Request, connection: socket.socket, streams: list[int]) -> Request:
        """In a child. A connection of another one held open here would hide that its other end was closed."""
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
        """The process that asked was killed: nothing that it started may live on."""
        self.poll.unregister(child.connection)
        child.connection.close()
        _kill(child)

    def _ended(self, child: Child) -> None:
        status = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if status.si_code != os.CLD_EXITED or status.si_status:
            _kill(child)  # what it started, before its number can be another process's
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
    """The files of all that is imported, with the times of their last change."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    found = {}
    for path in filter(None, files):
        with contextlib.suppress(OSError):
            found[path] = Path(path).stat().st_mtime_ns
    return found


def _read(connection: socket.socket, streams: list[int]) -> Request:
    """What is asked for; the streams that come with it are added to the given ones."""
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
    """Do the script's work in this child, as if Python had been started with it.

    `imported`: the variables that imports have set.
    """
    os.setsid()
    os.chdir(request.folder)
    multiprocessing.process.ORIGINAL_DIR = request.folder  # where processes that are spawned look for the script
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
    sys.modules["numpy"].random.seed()  # Python's own generator is seeded again by the fork
    sys.modules["torch"].set_num_threads(int(os.environ.get(THREADS[0]) or len(request.processors)))
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    if named.is_dir():
        main.__spec__ = ModuleSpec("__main__", None)  # as Python has it: what is spawned doesn't import it again
    sys.modules["__main__"] = main
    exec(compile(script.read_bytes(), script, "exec"), vars(main))


def _why_not_forked() -> str | None:
    """A child would lack other threads, and might wait for a lock that one of them holds; and CUDA fails in it."""
    if (threads := _threads()) > 1:
        return f"{threads - 1} threads were started by an import, so that no process can be forked"
    if _has_opened_cuda():
        return "an import has opened CUDA, so that no process can be forked"
    return None


def _has_opened_cuda() -> bool:
    """The driver's memory manager is opened with it, also by NVML."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("/dev/nvidia-uvm"):
                return True
    return False


def _threads() -> int:
    """Of this process; pyarrow's allocator looks after its own when a process forks."""
    return sum((task / "comm").read_text() != "jemalloc_bg_thd\n" for task in Path("/proc/self/task").iterdir())


@contextlib.contextmanager
def _without_opening_cuda(device: str) -> Iterator[None]:
    """Megatron and ModelOpt ask for GPUs and their capability when they are imported. PyTorch would ask CUDA or NVML,
    and both start a thread of the driver's."""
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
        for number in PASSED_ON:  # a scheduler's signal reaches all processes of a step; ranks hear it themselves
            signal.signal(number, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(_address(key))
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return  # another was faster, or the kernel is too old
        listener.listen(128)  # who asks now waits until all is imported
        before = dict(os.environ)
        signal.alarm(int(START_SECONDS))  # an import that hangs must not keep what was sent meanwhile
        with _without_opening_cuda(device):
            process.prepare(device)
            for name in IMPORTED:
                importlib.import_module(f"megaboa.bridge.{name}")
        # Fills its table of files: for that every folder above every module is looked at, 36,000 times in each child.
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
