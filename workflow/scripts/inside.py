"""Run a command of ours in the image that the experiment's ranks run in.

inside.py SPECS/inside.json results/<experiment>/image.json workflow/scripts/megaboa COMMAND [ARGUMENT ...]
"""

import argparse
import os
from pathlib import Path

from megaboa.errors import InputError, one_sentence
from megaboa.image import image_file
from megaboa.image.runtimes import python_command, without_pythons
from megaboa.records import Image, InsideAsked, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    wanted, image = read(InsideAsked, arguments.spec).container, read(Image, arguments.image)
    if problem := image_file.changed(image):
        raise InputError(problem)
    argv = python_command(wanted, str(Path(image.path).absolute()), arguments.words)
    try:
        os.execvpe(argv[0], argv, {**without_pythons(os.environ), **wanted.variables})
    except FileNotFoundError:
        raise InputError(
            f"image.runtime is {wanted.runtime}, and there is no {argv[0]} here: call this stage where there is, or "
            "set image.runtime to none"
        ) from None


if __name__ == "__main__":
    with one_sentence():
        main()
