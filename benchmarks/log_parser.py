"""How fast logs are read: MB/s on a log of 1 GB, beside grep, reading alone, and a regular expression for every line.

    .venv/bin/python benchmarks/log_parser.py [MEGABYTES]      default: 1000

Two logs. `usual`: what a rank of Bridge prints, and labelled warnings of seven more ranks. `dense`: nothing but step
lines, as Megatron-LM prints them after every step.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SCRIPTS = REPOSITORY / "workflow" / "scripts"

STEP = (
    " [2026-11-20 10:32:01] iteration {step:8d}/ 9999999 | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): 38{digit}.2 | throughput per GPU (TFLOP/s/GPU): 416.{digit} | "
    "learning rate: 4.471412E-05 | global batch size:    32 | lm loss: 8.0{digit}4442E+00 | loss scale: 1.0 | "
    "grad norm: 0.23{digit} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
SPEED = "Step Time : 0.39s GPU utilization: 416.{digit}MODEL_TFLOP/s/GPU\n"
NOISE = (
    "{rank}: SITE/torch/distributed/c10d_logger.py:83: UserWarning: barrier(): using the device under current context. "
    "You can specify `device_id` in `init_process_group` to mute this warning.\n"
    "{rank}:   return func(*args, **kwargs)\n"
    "{rank}: [NeMo W rerun_state_machine:1263] Implicit initialization of Rerun State Machine!\n"
)

# Other parsers, each in its own process.
LOOP = """
import re, sys
from collections import defaultdict
field = re.compile(rb" ([^|:]+): +([-+0-9.eE]+) \\|")
header = re.compile(rb"iteration +(\\d+)/ *(\\d+) \\|")
found = defaultdict(list)
with open(sys.argv[1], "rb") as stream:
    for line in stream:
        if match := header.search(line):
            found["step"].append(int(match[1]))
            for name, number in field.findall(line):
                found[name].append(float(number))
print(len(found["step"]))
"""
READ = """
import sys
with open(sys.argv[1], "rb") as stream:
    while stream.read(1 << 20):
        pass
"""


def write_log(path: Path, megabytes: int, dense: bool) -> int:
    """Write a log; returns the number of steps."""
    size, step = 0, 0
    with path.open("w") as stream:
        while size < megabytes * 1_000_000:
            parts = []
            for _ in range(1000):
                step += 1
                values = {"step": step, "samples": step * 32, "digit": step % 10}
                parts.append(STEP.format(**values))
                if not dense:
                    parts += [SPEED.format(**values), NOISE.format(rank=step % 7 + 1), NOISE.format(rank=step % 3 + 1)]
            text = "".join(parts)
            stream.write(text)
            size += len(text)
    return step


def timed(command: list[str | Path]) -> tuple[float, float, float, str]:
    """Wall seconds, CPU seconds, peak memory (MB) and output of a command."""
    before = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen([str(word) for word in command], stdout=output)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            sys.exit(f"{command[0]} ended with {child.returncode}")
        seconds = time.perf_counter() - before
        output.seek(0)
        return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000, output.read()


def measure(log: Path, steps: int) -> None:
    reader = (
        "import sys; from megaboa.observe.logs.reader import read_events\n"
        "print(sum(getattr(e, 'count', 1) for e in read_events(open(sys.argv[1], 'rb'))))"
    )
    python = ["env", f"PYTHONPATH={SCRIPTS}", sys.executable]
    code: list[tuple[str, list[str | Path], Callable[[str], bool]]] = [
        ("reading alone", [sys.executable, "-c", READ, log], lambda text: True),
        ("grep -c 'lm loss'", ["grep", "-c", "lm loss", log], lambda text: int(text) == steps),
        (
            "the events only",
            [*python, "-c", reader, log],
            lambda text: int(text) >= steps,
        ),
        (
            "megaboa read-log",
            [sys.executable, SCRIPTS / "megaboa", "read-log", log],
            lambda text: f'"printed": {steps}' in text,
        ),
        ("a regular expression for every line", [sys.executable, "-c", LOOP, log], lambda text: int(text) == steps),
    ]
    megabytes = log.stat().st_size / 1e6
    for name, command, right in code:
        seconds, cpu, memory, text = timed(command)
        speeds = f"{megabytes / seconds:>6.0f} MB/s  {cpu:>6.1f} s  {megabytes / cpu:>6.0f} MB/s"
        verdict = "right" if right(text) else "WRONG"
        print(f"{log.stem:>6}  {name:<36}{seconds:>7.1f} s {speeds} {memory:>7.0f} MB  {verdict}", flush=True)


def main() -> None:
    megabytes = int(sys.argv[1]) if sys.argv[1:] else 1000
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    print(f"{model[1] if model else 'unknown processor'}, Python {sys.version.split()[0]}, {megabytes} MB")
    print(f"{'log':>6}  {'what':<36}{'by the clock':>21} {'processor':>22} {'memory':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("usual", "dense"):
            log = Path(folder) / f"{name}.log"
            steps = write_log(log, megabytes, name == "dense")
            measure(log, steps)
            log.unlink()


if __name__ == "__main__":
    main()
