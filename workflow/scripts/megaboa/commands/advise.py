"""Legal layouts that fit, fastest first by prediction, and a sweep over them to paste into the experiment.

Model, batch, sequence length, precision, nodes and GPUs come from the experiment; its layout and sweep don't matter.
"""

import argparse
import dataclasses
import re
import sys

from megaboa import commands, peaks
from megaboa.check import adviser, calibration
from megaboa.config import load
from megaboa.config.problems import nearest
from megaboa.plan.run_facts import alone

EXAMPLES = tuple(one.example for one in peaks.GPUS)


def main(words: list[str]) -> int:
    parser = commands.parser("advise", __doc__)
    parser.add_argument("experiment", nargs="+", help="the experiment's files")
    parser.add_argument("--model", help="default: the experiment's")
    parser.add_argument("--nodes", type=_at_least_one, help="default: resources.nodes")
    parser.add_argument("--gpu", help="such as h100-80g; default: resources.gpu")
    parser.add_argument("--top", type=_at_least_one, default=8, help="how many layouts are listed")
    arguments = parser.parse_args(words)
    try:
        experiment = load(arguments.experiment).experiment
        own = alone(experiment, arguments.model, arguments.nodes)
        known = calibration.of(arguments.gpu or own.cluster.gpu)
    except LookupError as error:
        print(f"{' '.join(arguments.experiment)}: {error}", file=sys.stderr)
        return 1
    cluster = own.cluster
    wanted = {"nodes": arguments.nodes or cluster.nodes, "gpu": arguments.gpu or cluster.gpu, "device": "cuda"}
    facts = dataclasses.replace(own, cluster=dataclasses.replace(cluster, **wanted))
    if known is None or peaks.memory_gib(wanted["gpu"]) is None:
        print(_problem(wanted["gpu"]), file=sys.stderr)
        return 1
    found = adviser.advise(facts, arguments.top)
    if not found:
        print(adviser.why_none(facts), file=sys.stderr)
        return 1
    sweep = adviser.yaml(found, own, arguments.model if arguments.model != experiment.model else None)
    by = calibration.told(wanted["gpu"], wanted["nodes"], facts.training.precision)
    print(f"{adviser.text(found)}\ntimes by {by}\n\n{sweep}")
    return 0


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _problem(gpu: str | None) -> str:
    """Why there is no prediction for a GPU, and what to write instead."""
    known = peaks.of(gpu)
    example = known.example if known else nearest((gpu or "").lower(), EXAMPLES) or peaks.BY_KIND["h100"].example
    if gpu is None:
        return f"--gpu is missing: for example --gpu {example}"
    text = f"--gpu: {gpu!r} is not one of {', '.join(peaks.KINDS)} with its memory: for example --gpu {example}"
    return f"{text}; or measure it with `megaboa calibrate`" if re.match(peaks.NAME, gpu) else text
