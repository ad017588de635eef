"""What a zygote and its callers share: which zygote serves whom, its address and command line, a request's form."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megaboa.scheduler.ranks import FORKED, KEEPER

START_SECONDS = 120.0  # for the import of Bridge, on a busy machine
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Variables that differ between processes, and that no import reads. All others are part of the key.
OWN_PREFIXES = ("MEGABOA_", "WANDB_", "PYTEST_", "SNAKEMAKE_")
OWN_PREFIXES += ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "FI_")  # only read when ranks connect
OWN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PWD", "OLDPWD", "SHLVL", "_", "TERM"}
OWN |= {"PYTHONUNBUFFERED", "COLUMNS", "LINES"}
OWN |= {"CUDA_DEVICE_MAX_CONNECTIONS"}  # only read when a process opens its GPU
OWN |= {"GOTO_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # 1 in the zygote; a child sets its own number
TITLE_BYTES = 4096
MOST_STREAMS = 5  # passed to a child: standard ones, and what a rank holds
LENGTH = struct.Struct("!Q")
EXIT_CODE = struct.Struct("!i")
REFUSED = 0  # sent instead of the child's number, and followed by the reason
BEGIN = b"."  # sent by the caller, which has the child's number: the child may begin


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


def key_of(device: str) -> str:
    """Digest of everything that an import depends on, and of what a child can't take over from the caller."""
    library = Path(__file__).parents[1]
    sources = [(str(path), path.stat().st_mtime_ns) for path in sorted(library.rglob("*.py"))]
    packages = [(path, Path(path).stat().st_mtime_ns) for path in sys.path if path.endswith("site-packages")]
    environment = sorted(zygote_environment().items())
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    places = [str(path.readlink()) for path in [*sorted(Path("/proc/self/ns").iterdir()), Path("/proc/self/root")]]
    rights = [os.getresuid(), os.getresgid(), os.getgroups(), os.getpriority(os.PRIO_PROCESS, 0)]
    places.append(Path("/proc/self/cgroup").read_text())
    interpreter = [sys.executable, sys.version, sys.path[1:], subprocess._args_from_interpreter_flags()]
    parts = [interpreter, sources, packages, environment, limits, places, rights, device, os.environ.get(KEEPER)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def zygote_environment() -> dict[str, str]:
    """This process's variables without those that no import reads; with one thread."""
    own = {name for name in os.environ if name in OWN or name.startswith(OWN_PREFIXES)}
    return {name: value for name, value in os.environ.items() if name not in own} | dict.fromkeys(THREADS, "1")


def command(key: str, device: str) -> list[str]:
    """The zygote's command line, with room for its children's."""
    flags = subprocess._args_from_interpreter_flags()
    return [sys.executable, *flags, "-m", "megaboa.bridge.zygote", key, device, " " * TITLE_BYTES]


def address(key: str) -> str:
    return f"\0megaboa-zygote-{key}"  # abstract, so that no file is ever left


def peers_user(connection: socket.socket) -> int:
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


def receive(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        if not (more := connection.recv(size - len(content))):
            raise ConnectionResetError("the other side has ended")
        content += more
    return content


def receive_number(connection: socket.socket, form: struct.Struct) -> int:
    return form.unpack(receive(connection, form.size))[0]


def show(words: list[str]) -> None:
    """Show these words in `ps` and `pgrep`, as far as there is room."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        start, end = int(fields[45]), int(fields[46])  # proc(5): arg_start, arg_end
        room = end - start
        ctypes.memmove(start, b"\0".join(map(os.fsencode, words))[: room - 1].ljust(room, b"\0"), room)
