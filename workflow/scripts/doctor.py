"""Explain every run that isn't PASS: `python workflow/scripts/doctor.py results/<experiment>`."""

import argparse
from pathlib import Path

from megaboa.doctor import examine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    lines = examine.experiment(parser.parse_args().results)
    print("\n".join(lines) if lines else "every run that has ended is PASS")


if __name__ == "__main__":
    main()
