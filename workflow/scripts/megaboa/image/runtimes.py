"""How a command is started inside an image: one function for each runtime, from what is asked for to argv.

`env` are names only. Values travel in the environment of the process that is started: no secret stands on a command
line, where everybody on the machine reads it, or in a log. What `pyxis` gives goes between srun's own options and the
command; what the others give is a command itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

# They tell of Python and libraries of this machine: in an image they lead to nothing, or to the wrong ones.
_OF_THIS_MACHINE = re.compile(r"PYTHONPATH|PYTHONHOME|VIRTUAL_ENV(_PROMPT)?|CONDA_\w+|_CE_\w+|LD_LIBRARY_PATH")

Runtime = Callable[[str, Sequence[str], Sequence[str], str, Sequence[str]], list[str]]


def without_pythons(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment as an image can take it."""
    return {name: value for name, value in environment.items() if not _OF_THIS_MACHINE.fullmatch(name)}


def pyxis(image: str, mounts: Sequence[str], env: Sequence[str], workdir: str, command: Sequence[str]) -> list[str]:
    """Options of srun, and the command. Without `--container-env` a variable of the image goes before ours."""
    return [
        f"--container-image={image}",
        *([f"--container-mounts={','.join(mounts)}"] if mounts else []),
        *([f"--container-env={','.join(env)}"] if env else []),
        f"--container-workdir={workdir}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        *command,
    ]


def apptainer(image: str, mounts: Sequence[str], env: Sequence[str], workdir: str, command: Sequence[str]) -> list[str]:
    """The environment is inherited, `env` with it; `--nv` brings the driver, and only warns where there is
    none."""
    return [
        *("apptainer", "exec", "--nv", "--no-home", "--pwd", workdir),
        *(word for mount in mounts for word in ("--bind", mount)),
        image,
        *command,
    ]


def none(image: str, mounts: Sequence[str], env: Sequence[str], workdir: str, command: Sequence[str]) -> list[str]:
    """The command as it is: image, mounts and folder are those of this machine."""
    return list(command)


RUNTIMES: dict[str, Runtime] = {"pyxis": pyxis, "apptainer": apptainer, "none": none}
