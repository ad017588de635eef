"""Print the summary of a training's log as JSON: Megatron-LM's, Bridge's, NeMo's, torchtitan's, TensorBoard's.

Several LOGs are several ranks or attempts of one run, in the order in which they ran. `-` is the standard input; of a
folder, TensorBoard's event files are read.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

from megaboa import commands
from megaboa.observe.logs.log_summary import LogSummary
from megaboa.observe.logs.reader import read_events
from megaboa.observe.logs.tensorboard import event_files, is_event_file, read_event_file
from megaboa.records import plain


def main(words: list[str]) -> None:
    parser = commands.parser("read-log", __doc__)
    parser.add_argument(
        "logs", nargs="+", metavar="LOG", help="a log (also .gz), an event file, a folder of them, or -"
    )
    parser.add_argument("--seq-length", type=int, help="tokens per sample, if the log doesn't say")
    parser.add_argument("--peak-tflops", type=float, help="peak TFLOP/s of a GPU, for the MFU")
    args = parser.parse_args(words)

    summary = LogSummary()
    for log in args.logs:
        try:
            read(log, summary)
        except OSError as error:
            sys.exit(f"{log}: {error.strerror or error}")
    print(json.dumps(plain(summary.summarize(args.seq_length, args.peak_tflops)), indent=1))


def read(log: str, summary: LogSummary) -> None:
    path = Path(log)
    if log == "-":
        summary.read(read_events(sys.stdin.buffer, summary.count))
    elif path.is_dir():
        for file in event_files(path):
            summary.read(read_event_file(file))
    elif is_event_file(path):
        summary.read(read_event_file(path))
    else:
        rank = re.search(r"rank-(\d+)\.log", path.name)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            summary.read(read_events(stream, summary.count), rank and rank[1])
