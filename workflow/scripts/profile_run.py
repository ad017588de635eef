"""Capture a profile of a run's first steps: `profile_run.py results/<experiment>/runs/<run>/run.json --out FILE`."""

import argparse
import sys
from pathlib import Path

from megaboa import files
from megaboa.records import RecordError
from megaboa.run.call import TrainingFailed
from megaboa.run.capture import capture
from megaboa.run.inputs import UnusableInputError
from megaboa.run.submitted import folder_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's run.json")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        manifest = capture(folder_of(arguments.run.parent))
    except (TrainingFailed, UnusableInputError, RecordError) as failure:
        print(failure, file=sys.stderr)
        return 1
    files.write_json(arguments.out, manifest)
    print(f"run {manifest['run']}: {len(manifest['traces'])} trace(s) in {manifest['path']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
