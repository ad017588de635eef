"""How ranks, and commands of our own, are started inside an image: for each runtime, a function that makes argv.

`env` contains only names. Values are passed in the environment of the started process, so that no secret is on a
command line, where everybody on the machine can read it, or in a log. The words from `pyxis` go between the launcher's
own options and the command; the other functions return a complete command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megaboa.records import ImageStart
from megaboa.scheduler.registry import cluster

# Variables about Python, libraries and locales of this machine, which would be wrong in an image.
_OF_THIS_MACHINE = re.compile(
    r"PYTHONPATH|PYTHONHOME|VIRTUAL_ENV(_PROMPT)?|CONDA_\w+|_CE_\w+|LD_LIBRARY_PATH|LANG|LANGUAGE|LC_\w+"
)
# Executed by the image's shell before the command. HOME is the user's on the host, which isn't mounted or can't be
# written, although libraries keep caches there and Python looks for packages. /tmp may be the host's, where another
# user may have created the folder first. Downloads stay where they are mounted.
_PREPARE = """\
LANG=${LANG:-C.UTF-8}; export LANG
if ! [ -w "$HOME" ]; then
  [ -z "$HOME" ] || HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}; export HF_HOME
  HOME=/tmp/home-$(id -u); export HOME; mkdir -p -m 700 "$HOME"
  if [ -L "$HOME" ] || ! [ -O "$HOME" ]; then HOME=$(mktemp -d /tmp/home-XXXXXX); fi
fi
exec "$@"
"""
# enroot starts a login shell, and Debian's resets PATH, so that the image's Python isn't found. The image's own
# variables are where enroot reads them.
_PATH_OF_IMAGE = """\
if [ -r /etc/environment ]; then
  while IFS= read -r line; do
    case $line in PATH=*) PATH=${line#PATH=}; PATH=${PATH#'"'}; PATH=${PATH%'"'} ;; esac
  done < /etc/environment
  export PATH
fi
"""
# Our variables replace the image's variables of the same names, without their values on the command line.
_BEFORE_THE_IMAGES = """\
for name in $1; do eval "[ -z \\"\\${$name+x}\\" ] || export APPTAINERENV_$name=\\"\\$$name\\""; done
shift; exec "$@"
"""

Runtime = Callable[[str, Sequence[str], Sequence[str], str, Sequence[str]], list[str]]


@dataclass(frozen=True)
class Container:
    """Wraps a command to run it in an image; without an image, it leaves the command unchanged."""

    runtime: str = "none"
    image: str = ""
    mounts: Sequence[str] = ()
    secrets: Sequence[str] = ()
    workdir: str = ""
    name: str = ""  # name under which the unpacked image is kept for other steps

    def around(self, command: Sequence[str], environment: Iterable[str]) -> list[str]:
        """argv of the command in the image. Variables are passed by name only: the given ones, and those secrets that
        are set."""
        names = sorted({*environment, *(name for name in self.secrets if name in os.environ)})
        argv = RUNTIMES[self.runtime](self.image, self.mounts, names, self.workdir, command)
        # Each step has its own namespaces, so that it doesn't join those of one that is being killed.
        return [f"--container-name={self.name}:no_exec", *argv] if self.name else argv

    def named(self, name: str) -> Container:
        return replace(self, name=name)

    def inherited(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """The part of this process's (or the given) environment that the command inherits."""
        ours = os.environ if environment is None else environment
        return dict(ours) if self.runtime == "none" else without_pythons(ours)


NO_CONTAINER = Container()


def python_command(wanted: ImageStart, image: str, words: Sequence[str]) -> list[str]:
    """argv that runs the image's Python with these words; its environment must contain `wanted.variables`.

    This is how our own commands run in the ranks' image: conversions need the same kernels as training.
    """
    container = Container(wanted.runtime, image, wanted.mounts, wanted.env, wanted.workdir)
    inner = container.around([wanted.python, *words], wanted.variables)
    if wanted.runtime != "pyxis":
        return inner
    return [*cluster().process(wanted, os.environ, step=True), *inner]


def without_pythons(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without variables that don't suit an image."""
    return {name: value for name, value in environment.items() if not _OF_THIS_MACHINE.fullmatch(name)}


def pyxis(image: str, mounts: Sequence[str], env: Sequence[str], workdir: str, command: Sequence[str]) -> list[str]:
    """Options for the plugin, and the command.

    With `--container-env`, our variables take precedence over the image's.
    """
    prepare = _PREPARE if "PATH" in env else _PATH_OF_IMAGE + _PREPARE
    return [
        f"--container-image={image}",
        *([f"--container-mounts={','.join(mounts)}"] if mounts else []),
        *([f"--container-env={','.join(env)}"] if env else []),
        f"--container-workdir={workdir}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        *("/bin/sh", "-c", prepare, "sh"),
        *command,
    ]


def apptainer(image: str, mounts: Sequence[str], env: Sequence[str], workdir: str, command: Sequence[str]) -> list[str]:
    """apptainer's command. The environment is inherited, and `env` takes precedence over the image's. `--nv` adds the
    driver, and only warns if there is none."""
    return [
        *("/bin/sh", "-c", _BEFORE_THE_IMAGES, "sh", " ".join(env)),
        *("apptainer", "exec", "--nv", "--no-home", "--pwd", workdir),
        *(word for mount in mounts for word in ("--bind", mount)),
        image,
        *("/bin/sh", "-c", _PREPARE, "sh"),
        *command,
    ]


def none(image: str, mounts: Sequence[str], env: Sequence[str], workdir: str, command: Sequence[str]) -> list[str]:
    """The unchanged command: image, mounts and folder are this machine's."""
    return list(command)


RUNTIMES: dict[str, Runtime] = {"pyxis": pyxis, "apptainer": apptainer, "none": none}
