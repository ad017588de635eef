"""How far from the best is what `snakemake tune` found? Measures every setting of it, many times, in turns.

    python benchmarks/tune.py results/tiny-tune-dp2 --rounds 6 --out exhaustive.json

By the same trials, with more steps, in the folder where `snakemake tune` was called. In a round every setting has one
trial, in an order of its own. A setting's step time is the median over rounds of its trials', each divided by its
round's median, as a machine with other work is slower in some rounds than in others. An interrupted call resumes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from in_turn import measured

from megaboa import files
from megaboa.check import halving
from megaboa.paths import ExperimentFolder
from megaboa.records import Trial, TuneSpec, Tuning, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of the experiment that `snakemake tune` ran")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of a trial")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    folder = ExperimentFolder(asked.results)
    settings = read(TuneSpec, folder.specs.path / "tune.json").settings
    runs = {one.name: folder.run(one.name) for one in settings}
    _report(folder, measured(runs, asked.steps, asked.rounds, asked.out.with_suffix(".jsonl")), asked.out)


def _report(folder: ExperimentFolder, trials: Sequence[Trial], out: Path) -> None:
    by_round: dict[int, dict[str, float]] = {}
    for trial in trials:
        if trial.steps:
            by_round.setdefault(trial.round, {})[trial.setting] = halving.seconds_of(trial)
    usual = {number: statistics.median(found.values()) for number, found in by_round.items()}
    names = sorted({name for found in by_round.values() for name in found})
    shares = {
        name: [found[name] / usual[number] for number, found in by_round.items() if name in found] for name in names
    }
    medians = {name: statistics.median(values) for name, values in shares.items()}
    best = min(medians, key=medians.__getitem__)
    winner = read(Tuning, folder.tuning).winner
    unit = statistics.median(usual.values())
    rows = {
        name: {
            "seconds": medians[name] * unit,
            "slower": medians[name] / medians[best] - 1,
            "rounds": len(shares[name]),
        }
        for name in sorted(medians, key=medians.__getitem__)
    }
    regret = rows[winner]["slower"]
    files.write_json(out, {"best": best, "winner": winner, "regret": regret, "settings": rows})
    for name, row in rows.items():
        print(f"{name:28} {row['seconds']:.4g} s/step  {row['slower']:+.1%}")
    print(f"best of {len(rows)}: {best}; found: {winner}, {regret:.1%} slower")


if __name__ == "__main__":
    main()
