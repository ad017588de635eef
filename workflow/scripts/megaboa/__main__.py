"""The command line: `megaboa COMMAND`, or `python workflow/scripts/megaboa COMMAND` where nothing is installed.

Commands are imported when they are called, as hosts of a cluster have the standard library only.
"""

import sys
from pathlib import Path

if not __package__:  # started as a folder: its files aren't modules of their own (`secrets` would hide Python's)
    sys.path[0] = str(Path(sys.path[0]).absolute().parent)

import importlib
import itertools
import os
import signal
from collections.abc import Callable

from megaboa import __version__
from megaboa.errors import one_sentence
from megaboa.formats import Printable

STRANGERS = "Files from anywhere"
# What people call: each has a module of its name.
GROUPS = {
    "An experiment": {
        "advise": "legal layouts that fit, fastest first",
        "calibrate": "measure what predicted times need, on this machine",
        "recipes": "Megatron-Bridge's recipes, by model, GPUs and precision",
        "status": "progress of its runs, with or without Snakemake",
        "doctor": "why runs failed, and what to do",
        "bisect": "the first image, commit or other value that made it worse",
        "interim": "report on the finished runs while others train or have failed",
        "fleet": "all runs of a store: effective time, what was lost to what, alerts",
        "nodes": "nodes that keep failing, with the evidence of all runs of the store",
        "site": "its cluster: partitions, relevant settings, and the profile's choices",
    },
    "One run": {
        "pretrain": "train it here, to debug or in an interactive allocation",
        "documents": "which documents of which corpus a step read",
        "stop": "let it, or all of an experiment, save and end; the next call resumes them",
    },
    STRANGERS: {
        "inspect": "a checkpoint's tensors, layout and norms, or two compared",
        "read-log": "summary of a training log: losses, speed, memory",
        "analyze-profile": "where a profiled step's time goes",
        "reproduce": "rebuild a bundle's figures and runs, and compare",
        "compare": "two bundles of one experiment: do they agree?",
    },
}
# What rules call, and what writes tables of this repository: by the module that has them as functions.
JOBS = {
    "data": ("train-tokenizer", "list-sources", "tokenize-shard", "merge-corpus", "verify-corpus", "build-index"),
    "models": ("get-model", "import-model", "prove-import", "export-model", "prove-export", "generate", "push-model"),
    "preflight": ("preflight", "check-inside"),
    "hosts": ("image", "preflight-in-image", "capture", "tune"),
    "results": ("summarize", "evaluate", "export-along", "compare-tensors", "report", "bundle"),
    "tables": ("write-schema", "write-config-keys", "list-recipes"),
}

NAMES_OF_JOBS = [name for names in JOBS.values() for name in names]


def main(words: list[str]) -> int:
    if words and words[0] in GROUPS[STRANGERS]:
        sys.stdout, sys.stderr = Printable(sys.stdout), Printable(sys.stderr)
    out = next((Path(path) for word, path in itertools.pairwise(words) if word == "--out"), None)
    try:
        with one_sentence(out):
            code = call(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as with `| head`; for a job it is an error
        if words and words[0] in NAMES_OF_JOBS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:  # needs no traceback; jobs leave no partial files
        if words and words[0] in NAMES_OF_JOBS:  # into its log, where the doctor finds it
            print(f"interrupted: {words[0]}; the same call makes it again", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


def call(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage_of_jobs() if words[1:] == ["jobs"] else usage())
        return 0
    if words[0] == "--version":
        print(f"megaboa {__version__}")
        return 0
    name, *arguments = words
    for module, names in JOBS.items():
        if name in names:
            return job(module, name)(arguments) or 0
    names = [name for group in GROUPS.values() for name in group]
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


def job(module: str, name: str) -> Callable[[list[str]], int | None]:
    return getattr(importlib.import_module(f"megaboa.commands.{module}"), name.replace("-", "_"))


def usage() -> str:
    lines = ["megaboa COMMAND [...]; `--help` says more of one, `--help jobs` lists what Snakemake's jobs call."]
    for title, commands in GROUPS.items():
        lines += [title, *(f"  {name:<16} {what}" for name, what in commands.items()), ""]
    return "\n".join(lines[:-1])


def usage_of_jobs() -> str:
    lines = ["Commands for Snakemake's jobs, then those that write this repository's tables."]
    for module, names in JOBS.items():
        lines += ["", *(f"  {name:<18} {job(module, name).__doc__.splitlines()[0]}" for name in names)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
