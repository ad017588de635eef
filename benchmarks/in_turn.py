"""All runs of an experiment, some steps of each, in turn: a table in a fraction of the time that whole runs take.

    snakemake data import --configfile my.yaml     # its data and models
    python benchmarks/in_turn.py my.yaml --steps 12 --out my.json
    python benchmarks/in_turn.py my.yaml --predict # what is predicted, in a second

Ranks are those of a run, forked from processes that have imported everything (as in `snakemake tune`), so that a run
takes its own setup and steps alone. They train from random weights with the run's own settings, data and learning
rates, and save nothing. The table has measured step times, memory and losses next to what is predicted. A run that
fails or runs out of memory is a row with the reason. An interrupted call resumes: lines of --out's .jsonl are kept,
as far as the runs are still the same.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa import files
from megaboa.check import flops, memory, speed
from megaboa.check.facts import Facts
from megaboa.check.memory import GIB
from megaboa.config import load
from megaboa.paths import RunFolder
from megaboa.plan import make_plan
from megaboa.plan.run_facts import known_facts
from megaboa.records import Setting, Trial, TuneSpec, line, parse
from megaboa.run import trials

WARMUP = 5
MINUTES = 10.0  # time limit of a trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="the experiment's YAML files, as for --configfile")
    parser.add_argument("--runs", nargs="+", help="default: all, in the order of the file")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps before these; fewer where each takes long")
    parser.add_argument("--rounds", type=int, default=1, help="how often each is measured, every time in another order")
    parser.add_argument("--out", type=Path, default=Path("in_turn.json"))
    parser.add_argument("--predict", action="store_true", help="print what is predicted, and run nothing")
    asked = parser.parse_args()
    plan = make_plan(load(asked.files))
    names = asked.runs or [run.name for run in plan.runs]
    if unknown := [name for name in names if name not in {run.name for run in plan.runs}]:
        known = ", ".join(run.name for run in plan.runs)
        parser.error(f"--runs: {', '.join(unknown)} is none of the runs of {asked.files[0]}: {known}")
    folders = {name: plan[name].folder("results", plan.experiment.experiment) for name in names}
    facts = {name: known_facts(plan[name], folders[name].experiment_folder) or plan[name].facts for name in names}
    if asked.predict:
        print("\n".join(predictions([Row(name, one) for name, one in facts.items()])))
        return
    refuse_without_inputs(folders.values(), asked.files)
    lines = asked.out.with_suffix(".jsonl")
    made = measured(folders, asked.steps, asked.rounds, lines, asked.warmup)
    rows = [Row(name, one, tuple(t for t in made if t.setting == name)) for name, one in facts.items()]
    files.write_json(asked.out, [row.document for row in rows])
    print("\n".join(table(rows)))


def refuse_without_inputs(runs: Iterable[RunFolder], experiment: Sequence[Path]) -> None:
    """Exit if data or models are missing. A recipe has no model to make, but maybe a tokenizer to train."""
    wanted = {
        path
        for run in runs
        for path in (*run.corpus_manifests.values(), run.model_manifest, run.tokenizer_manifest)
        if path and not path.exists()
    }
    if wanted:
        files_asked = " ".join(map(str, experiment))
        sys.exit(f"{min(map(str, wanted))} is missing: call `snakemake data import --configfile {files_asked}` first")


def measured(
    folders: Mapping[str, RunFolder], steps: int, rounds: int, lines: Path, warmup: int = WARMUP
) -> list[Trial]:
    """Measure the given number of steps of each run in every round.

    The first round has the given order, every other one a random order of its own.
    """
    names = list(folders)
    spec = TuneSpec(
        own=names[0],
        settings=tuple(Setting(name=name, values={}) for name in names),
        steps=steps,
        warmup=warmup,
        tolerance=0.0,
        confidence=1.0,
        minutes=MINUTES,
        trial_minutes=MINUTES,
    )
    runs = {name: _so_long(run, spec) for name, run in folders.items()}
    identities = {name: files.digest(run.documents) for name, run in runs.items()}
    done = [one for one in _read(lines) if identities.get(one.setting) == one.identity]  # the rest: of an edited file
    with trials.trials_here(runs[spec.own], spec) as here:
        for run in runs.values():
            here.importers.environment(run)  # all environments, while the first run trains
        for number in range(1, rounds + 1):
            order = names if number == 1 else random.Random(1000 + number).sample(names, len(names))
            for name in order:
                if not any((trial.round, trial.setting) == (number, name) for trial in done):
                    done.append(here.measure(runs[name], identities[name], number))
                    files.append_line(lines, line(done[-1]))
                    print(trials.told(done[-1]), file=sys.stderr, flush=True)
    return done


def _read(lines: Path) -> list[Trial]:
    return [parse(Trial, one, lines) for one in files.read_jsonl(lines)]


def _so_long(run: RunFolder, spec: TuneSpec) -> RunFolder:
    """The run with the wanted number of steps, and without a profiler."""
    profile = {**run.documents["profile"], "tool": "none", "steps": [spec.warmup + 1, spec.warmup + spec.steps]}
    return RunFolder(run.path, {**run.documents, "profile": profile})


@dataclass(frozen=True)
class Row:
    """A run, its predictions and its trials."""

    name: str
    facts: Facts
    trials: tuple[Trial, ...] = ()

    @property
    def worked(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.steps]

    @property
    def seconds(self) -> float | None:
        """The median over trials of the median of their steps."""
        found = [statistics.median(trial.steps) for trial in self.worked]
        return statistics.median(found) if found else None

    @property
    def predicted(self) -> float | None:
        known = speed.is_known(self.facts) and memory.is_known(self.facts)
        return speed.of_step(self.facts).seconds if known else None

    @property
    def tensors(self) -> float | None:
        return max((trial.tensors_gib or 0.0 for trial in self.worked), default=0.0) or None

    @property
    def predicted_tensors(self) -> float | None:
        return memory.peak(self.facts).tensors / GIB if memory.is_known(self.facts) else None

    def tokens(self, seconds: float | None) -> float | None:
        """Tokens per second and GPU."""
        training, ranks = self.facts.training, self.facts.layout.world_size or 1
        known = seconds and training.gbs and training.seq_length  # unknown for a recipe until preflight
        return training.gbs * training.seq_length / seconds / ranks if known else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s per GPU, without recomputation."""
        ranks = self.facts.layout.world_size or 1
        operations = flops.of_step(self.facts)  # none are known of a recipe until preflight
        return operations / self.seconds / ranks / 1e12 if self.seconds and operations else None

    @property
    def document(self) -> dict[str, object]:
        keys = ("seconds", "predicted", "tensors", "predicted_tensors", "tflops")
        values = {key: getattr(self, key) for key in keys}
        rates = {"tokens": self.tokens(self.seconds), "predicted_tokens": self.tokens(self.predicted)}
        made = [{**vars(trial), "steps": list(trial.steps), "losses": list(trial.losses)} for trial in self.trials]
        return {"run": self.name, **values, **rates, "trials": made}


def predictions(rows: Sequence[Row]) -> list[str]:
    """A table of predictions for docs/benchmarks/predictions.md, made before the run."""
    lines = ["| run | ms a step | tokens/s/GPU | GiB of tensors | of the step |", "|---|---:|---:|---:|---|"]
    for row in rows:
        if row.predicted is None or row.predicted_tensors is None:
            lines.append(f"| `{row.name}` | - | - | - | a recipe that preflight has not read, or no calibration |")
            continue
        numbers = f"{row.predicted * 1000:,.0f} | {row.tokens(row.predicted):,.0f} | {row.predicted_tensors:.1f}"
        lines.append(f"| `{row.name}` | {numbers} | {speed.of_step(row.facts).shares()} |")
    return lines


HEAD = [
    "| run | ms a step (lowest, highest) | predicted | tokens/s/GPU | predicted | TFLOP/s/GPU | GiB of tensors"
    " | predicted | reserved | loss, first and last | trials |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|",
]


def table(rows: Sequence[Row]) -> list[str]:
    return [*HEAD, *map(_line, rows), *_reasons(rows)]


def _line(row: Row) -> str:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    steps = [seconds for trial in row.worked for seconds in trial.steps]
    spread = f" ({min(steps) * 1000:,.0f} to {max(steps) * 1000:,.0f})" if steps else ""
    losses = row.worked[-1].losses if row.worked else ()
    cells = (
        f"`{row.name}`",
        shown(row.seconds and row.seconds * 1000, ",.0f") + spread,
        shown(row.predicted and row.predicted * 1000, ",.0f"),
        shown(row.tokens(row.seconds), ",.0f"),
        shown(row.tokens(row.predicted), ",.0f"),
        shown(row.tflops, ".0f"),
        shown(row.tensors, ".1f"),
        shown(row.predicted_tensors, ".1f"),
        shown(max((trial.gib or 0.0 for trial in row.worked), default=0.0) or None, ".1f"),
        f"{losses[0]:.3f}, {losses[-1]:.3f}" if losses else "-",
        str(len(row.worked)),
    )
    return f"| {' | '.join(cells)} |"


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        for trial in row.trials:
            if not trial.steps:
                yield f"\n{row.name}: {trial.state}: {trial.why}"


if __name__ == "__main__":
    main()
