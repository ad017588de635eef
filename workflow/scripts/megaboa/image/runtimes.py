"""How a command is started inside an image, of ranks or of our own: for each runtime one function that makes argv.

`env` are names only. Values travel in the environment of the process that is started: no secret stands on a command
line, where everybody on the machine reads it, or in a log. What `pyxis` gives goes between the launcher's own options
and the command; what the others give is a command itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megaboa.records import ImageStart
from megaboa.scheduler.registry import cluster

# They tell of Python, libraries and locales of this machine: in an image they lead to nothing, or to the wrong ones.
_OF_THIS_MACHINE = re.compile(
    r"PYTHONPATH|PYTHONHOME|VIRTUAL_ENV(_PROMPT)?|CONDA_\w+|_CE_\w+|LD_LIBRARY_PATH|LANG|LANGUAGE|LC_\w+"
)
# What is done in the image before the command; the image's shell reads it. HOME is the user's on the host, which isn't
# mounted, and can't be written: libraries keep caches there, and Python looks for packages. /tmp may be the host's,
# where another user can have made that folder first. What is downloaded stays where it is mounted.
_PREPARE = """\
LANG=${LANG:-C.UTF-8}; export LANG
if ! [ -w "$HOME" ]; then
  [ -z "$HOME" ] || HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}; export HF_HOME
  HOME=/tmp/home-$(id -u); export HOME; mkdir -p -m 700 "$HOME"
  if [ -L "$HOME" ] || ! [ -O "$HOME" ]; then HOME=$(mktemp -d /tmp/home-XXXXXX); fi
fi
exec "$@"
"""
# enroot starts a login shell, and that of Debian sets PATH as for any machine: the image's Python isn't found. What the
# image says itself stands where enroot reads it.
_PATH_OF_IMAGE = """\
if [ -r /etc/environment ]; then
  while IFS= read -r line; do
    case $line in PATH=*) PATH=${line#PATH=}; PATH=${PATH#'"'}; PATH=${PATH%'"'} ;; esac
  done < /etc/environment
  export PATH
fi
"""
# Variables of ours go before those of the image with the same names. Their values stay off the command line.
_BEFORE_THE_IMAGES = """\
for name in $1; do eval "[ -z \\"\\${$name+x}\\" ] || export APPTAINERENV_$name=\\"\\$$name\\""; done
shift; exec "$@"
"""

Runtime = Callable[[str, Sequence[str], Sequence[str], str, Sequence[str]], list[str]]


@dataclass(frozen=True)
class Container:
    """Puts a command into an image; without one, leaves it as it is."""

    runtime: str = "none"
    image: str = ""
    mounts: Sequence[str] = ()
    secrets: Sequence[str] = ()
    workdir: str = ""
    name: str = ""  # under which the unpacked image is kept for other steps

    def around(self, command: Sequence[str], environment: Iterable[str]) -> list[str]:
        """argv of the command in the image. Of variables only names are told: those given, and secrets that are set."""
        names = sorted({*environment, *(name for name in self.secrets if name in os.environ)})
        argv = RUNTIMES[self.runtime](self.image, self.mounts, names, self.workdir, command)
        # Each step has namespaces of its own: it must not join those of one that is being killed.
        return [f"--container-name={self.name}:no_exec", *argv] if self.name else argv

    def named(self, name: str) -> Container:
        return replace(self, name=name)

    def inherited(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """What the command gets of this process's environment, or of the one given."""
        ours = os.environ if environment is None else environment
        return dict(ours) if self.runtime == "none" else without_pythons(ours)


NO_CONTAINER = Container()


def python_command(wanted: ImageStart, image: str, words: Sequence[str]) -> list[str]:
    """argv that runs the image's Python with these words; its environment must hold `wanted.variables`.

    So commands of ours run in the image that ranks run in: conversions need the same kernels as training.
    """
    container = Container(wanted.runtime, image, wanted.mounts, wanted.env, wanted.workdir)
    inner = container.around([wanted.python, *words], wanted.variables)
    if wanted.runtime != "pyxis":
        return inner
    return [*cluster().process(wanted, os.environ, step=True), *inner]


def without_pythons(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment as an image can take it."""
    return {name: value for name, value in environment.items() if not _OF_THIS_MACHINE.fullmatch(name)}


def pyxis(image: str, mounts: Sequence[str], env: Sequence[str], workdir: str, command: Sequence[str]) -> list[str]:
    """Options of the plugin, and the command. Without `--container-env` a variable of the image goes before ours."""
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
    """The environment is inherited, and `env` goes before the image's; `--nv` brings the driver, and only warns where
    there is none."""
    return [
        *("/bin/sh", "-c", _BEFORE_THE_IMAGES, "sh", " ".join(env)),
        *("apptainer", "exec", "--nv", "--no-home", "--pwd", workdir),
        *(word for mount in mounts for word in ("--bind", mount)),
        image,
        *("/bin/sh", "-c", _PREPARE, "sh"),
        *command,
    ]


def none(image: str, mounts: Sequence[str], env: Sequence[str], workdir: str, command: Sequence[str]) -> list[str]:
    """The command as it is: image, mounts and folder are those of this machine."""
    return list(command)


RUNTIMES: dict[str, Runtime] = {"pyxis": pyxis, "apptainer": apptainer, "none": none}
