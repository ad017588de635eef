"""The command line: `megaboa COMMAND`, or `python workflow/scripts/megaboa COMMAND` where nothing is installed.

Commands are imported when they are called, as hosts of a cluster have the standard library only.
"""

import sys
from pathlib import Path

if not __package__:  # started as a folder: its files aren't modules of their own (`secrets` would hide Python's)
    sys.path[0] = str(Path(sys.path[0]).absolute().parent)

import importlib
import os

GROUPS = {
    "An experiment": {
        "advise": "which layouts fit, and which should be fastest",
        "status": "how far its runs have come, whether Snakemake runs or not",
        "doctor": "why runs failed, and what to do",
        "interim": "report on what is there, while other runs still train or have failed",
    },
    "One run": {
        "pretrain": "train it here: to debug it, in an interactive allocation",
        "stop": "let it save and end; the next call of Snakemake resumes it",
    },
    "A cluster": {
        "site": "its partitions, what of the scheduler's settings matters, what the profile takes",
    },
    "Files from anywhere": {
        "read-log": "what a training's log says: losses, speed, memory",
        "analyze-profile": "what the steps of a profile went into",
        "reproduce": "make the figures and runs of a bundle again, and compare",
    },
}


def main(words: list[str]) -> int:
    try:
        code = call(words)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as behind `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def call(words: list[str]) -> int:
    names = [name for group in GROUPS.values() for name in group]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, *arguments = words
    if name not in names:
        print(f"megaboa: there is no command {name!r}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(f"megaboa.commands.{name.replace('-', '_')}").main(arguments) or 0
    except ModuleNotFoundError as missing:
        if (missing.name or "megaboa").startswith("megaboa"):
            raise
        lacks = f"needs {missing.name}, which {sys.executable} lacks: `.venv/bin/megaboa` has it"
        print(f"megaboa {name} {lacks}", file=sys.stderr)
        return 1


def usage() -> str:
    lines = ["megaboa COMMAND [...]; `megaboa COMMAND --help` says more. Experiments are run by `snakemake`."]
    for title, commands in GROUPS.items():
        lines += ["", title, *(f"  {name:<16} {what}" for name, what in commands.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
