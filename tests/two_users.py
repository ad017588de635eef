"""Two ordinary users and a group of theirs, for root: what they do happens in a process that each one owns."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

ALICE, BOB, GROUP = 65001, 65002, 65003  # of nobody
SHARED = 0o2770


@contextlib.contextmanager
def folder_for_all():
    """A folder that all users reach, unlike pytest's own; skips where users can't be changed."""
    if os.geteuid() != 0:
        pytest.skip("only root can become two users")
    folder = Path(tempfile.mkdtemp(prefix="megaboa-tests-", dir="/tmp"))
    try:
        folder.chmod(0o777)
        yield folder
    finally:
        shutil.rmtree(folder)


def shared_folder(path):
    """As `docs/how-to/slurm.md` makes the store of a group."""
    path.mkdir()
    os.chown(path, ALICE, GROUP)
    path.chmod(SHARED)
    return path


def own_folder(path, user):
    path.mkdir()
    os.chown(path, user, user)
    return path


def does(user, work, umask=0o077):
    """Let a user do something, with this umask; return what they were told if it failed, else None.

    `work` may raise anything: its traceback is the answer. A process of its own, because root can't be root again.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 0
        try:
            os.close(reader)
            _reach_python()
            os.setgroups([GROUP])
            os.setgid(user)
            os.setuid(user)
            os.umask(umask)
            os.environ["HOME"] = "/nonexistent"
            work()
        except BaseException:
            code = 1
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said or (f"ended with {code}" if code else None)


def _reach_python():
    """Where Python or the clone are in a folder that only root may enter, put an open one over it, for this process."""
    needed = [Path(sys.base_prefix).resolve(), Path(__file__).resolve().parents[1]]
    outer = {
        path: next((one for one in reversed(path.parents) if not one.stat().st_mode & 0o001), None) for path in needed
    }
    inside = {path: cover for path, cover in outer.items() if cover}
    if not inside:
        return
    aside = {path: f"/mnt/{number}" for number, path in enumerate(inside)}
    lines = ["set -e", "mount --make-rprivate /", "mount -t tmpfs tmpfs /mnt"]
    lines += [f"mkdir '{at}'; mount --rbind '{path}' '{at}'" for path, at in aside.items()]
    lines += [f"mount -t tmpfs -o mode=755 tmpfs '{cover}'" for cover in dict.fromkeys(inside.values())]
    lines += [f"mkdir -p '{path}'; mount --move '{at}' '{path}'" for path, at in aside.items()]
    os.unshare(os.CLONE_NEWNS)
    subprocess.run(["sh", "-c", "\n".join(lines)], check=True)
