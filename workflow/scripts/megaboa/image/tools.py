"""Runs other programs: their output goes to the log immediately, and a failure becomes one sentence."""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megaboa.errors import InputError
from megaboa.image.references import registry_of
from megaboa.scheduler.local import die_with_parent

KEPT_LINES = 40
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PLUGIN = re.compile(r"\berror: pyxis: ?(.*)$", re.MULTILINE)
# The plugin's lines that report an error without its cause. enroot's lines follow, indented.
_EMPTY_WORDS = re.compile(r"child \d+ (?:failed|terminated)|printing enroot log file|container was not started success")
_ENROOT_SAYS = re.compile(r"\[ERROR\]\s*(.+)|(FATAL ERROR: .+|create_inode: .+|enroot-\w+: .+|.*[Ee]rror: .+)")
_UNREACHABLE = re.compile(
    r"dial tcp|no such host|connection refused|i/o timeout|network is unreachable|TLS handshake timeout"
    r"|failure in name resolution|proxyconnect",
    re.IGNORECASE,
)
# Messages of tools, and their meaning for the user; the first match counts.
_MEANINGS = (
    (re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE), "the disk is full: free some space"),
    (
        re.compile(r"exec format error|no match for platform|no image found in manifest list", re.IGNORECASE),
        "the image is for another architecture than this machine: build or fetch it for this one",
    ),
    (
        re.compile(r"manifest unknown|not found: manifest|repository does not exist|name unknown", re.IGNORECASE),
        "the registry has no such image: check its name and digest",
    ),
    (
        re.compile(r"unauthorized|authentication required|access.*denied|403 forbidden", re.IGNORECASE),
        "the registry refuses: log in with the engine's `login`, and accept the image's licence there",
    ),
    (
        re.compile(r"permission denied", re.IGNORECASE),
        "something can't be read or written: check permissions (the last lines of the log name it)",
    ),
)


def plain(text: str) -> str:
    """Text without colour codes."""
    return _COLOUR.sub("", text)


def why_not_started(said: str) -> str | None:
    """Why an image could not be started, from all output of its plugin and enroot; None if there is none."""
    lines = _PLUGIN.findall(plain(said))
    own = [line for line in lines if line.strip() and not line.startswith(" ") and not _EMPTY_WORDS.match(line)]
    enroots = [match for line in lines if line.startswith(" ") and (match := _ENROOT_SAYS.match(line.strip()))]
    why = (enroots[0][1] or enroots[0][2]) if enroots else ""
    return ": ".join([*own[:1], *([why] if why else [])]) or None


def require(program: str, remedy: str) -> None:
    if shutil.which(program) is None:
        raise InputError(f"{program} isn't here: {remedy}")


def call(
    command: Sequence[str],
    what: str,
    image: str = "",
    feed: subprocess.Popen | None = None,
    environment: Mapping[str, str] | None = None,
    explain: Callable[[str, str], str | None] | None = None,
) -> str:
    """Run a program to its end and return its last lines; `feed`: another program whose output it reads.

    `explain` turns the output of a failure into a sentence; the default is `meaning`, which knows tools for images.
    """
    process = subprocess.Popen(
        command,
        stdin=feed.stdout if feed else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        preexec_fn=die_with_parent,  # if this process is killed, no child keeps writing
    )
    last: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
    assert process.stdout
    for line in process.stdout:
        last.append(line.rstrip("\n"))
        print(line, end="", file=sys.stderr, flush=True)
    said, code = "\n".join(last), process.wait()
    if code:
        raise InputError(f"{what} failed: {(explain or meaning)(said, image) or _end_of(said, command[0], code)}")
    return said


def start(command: Sequence[str]) -> subprocess.Popen:
    """Start a program whose output another one reads."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sys.stderr, preexec_fn=die_with_parent
    )


def output(command: Sequence[str]) -> str:
    """The output of a short command."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise InputError(f"`{' '.join(command[:3])}` failed: {_end_of(done.stderr, command[0], done.returncode)}")
    return done.stdout


def meaning(said: str, image: str = "") -> str | None:
    """The meaning of a tool's message; None if it isn't known."""
    if _UNREACHABLE.search(said):
        where = f"the registry {registry_of(image)}" if image else "a server"
        return f"{where} can't be reached from here: check network and proxy, or give an image file (image.path)"
    return next((text for pattern, text in _MEANINGS if pattern.search(said)), None)


def _end_of(said: str, program: str, code: int) -> str:
    lines = [line.strip() for line in plain(said).splitlines() if line.strip()]
    told = [line for line in lines if "[ERROR]" in line]
    return (told or lines)[-1] if lines else f"{Path(program).name} ended with exit code {code}"
