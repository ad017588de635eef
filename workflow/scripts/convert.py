"""Run a conversion, as one process or as the ranks that its model needs, in the image if there is one.

convert.py --spec SPEC [--image IMAGE --inside SPEC] --logs FOLDER workflow/scripts/megaboa COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megaboa import conversion
from megaboa.errors import InputError, one_sentence
from megaboa.image import image_file
from megaboa.records import ConversionSpec, Image, read
from megaboa.run import converters

INSIDE = Path(__file__).with_name("inside.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True, type=Path, help="specs/conversions/<model>.json of an experiment")
    parser.add_argument("--image", type=Path, help="image.json, where ranks run in an image")
    parser.add_argument("--inside", type=Path, help="specs/inside.json, where ranks run in an image")
    parser.add_argument("--logs", required=True, type=Path, help="folder for the logs of several ranks")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    wanted = read(ConversionSpec, arguments.spec)
    if conversion.layout(**wanted.layout).world_size == 1:
        wrapped = [str(INSIDE), str(arguments.inside), str(arguments.image)] if arguments.image else []
        os.execv(sys.executable, [sys.executable, *wrapped, *arguments.words])
    image = read(Image, arguments.image) if arguments.image else None
    if image and (problem := image_file.changed(image)):
        raise InputError(problem)
    print(converters.run(wanted, image, arguments.words, arguments.logs), end="")


if __name__ == "__main__":
    with one_sentence():
        main()
