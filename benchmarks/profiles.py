"""How fast profiles are analysed, in how much memory, and whether the numbers are those of other tools.

    .venv/bin/python benchmarks/profiles.py size [GB ...]          default: 0.25 1 2
    .venv/bin/python benchmarks/profiles.py kineto TRACE [TRACE ...] --hta PYTHON
    .venv/bin/python benchmarks/profiles.py nsys CAPTURE [CAPTURE ...] --nsys-ai PROGRAM

`size` makes exports of Nsight Systems of these sizes (schema 3.7, made-up kernels, calls and ranges) in a temporary
folder. `kineto` and `nsys` compare with HolisticTraceAnalysis and nsys-ai, each in an environment of its own, on the
same files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
MEGABOA = REPOSITORY / "workflow" / "scripts" / "megaboa"
SCHEMA = REPOSITORY / "tests" / "observe" / "traces" / "nsys-3.7.sql"
sys.path.insert(0, str(REPOSITORY / "workflow" / "scripts"))

import numpy as np

from megaboa.observe.traces import intervals, read
from megaboa.observe.traces.budget import Timeline, budget
from megaboa.observe.traces.step_windows import Steps

KERNELS = [
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
    "void layer_norm::ln_fwd_kernel<layer_norm::Kernel_traits<__nv_bfloat16>>(Params)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
    "flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "void multi_tensor_apply_kernel<AdamFunctorMaster<float>>(int)",
]
COLLECTIVE, OPTIMIZER = 4, 5
PER_STEP = 20_000
BYTES_PER_KERNEL = 93  # measured: of the export, with the kernel's call and its share of ranges
HTA = """
import json, sys, time
from hta.trace_analysis import TraceAnalysis
before = time.perf_counter()
found = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/", include_last_profiler_step=True)
times = found.get_temporal_breakdown(visualize=False).iloc[0]
overlap = found.get_comm_comp_overlap(visualize=False).iloc[0]
print("RESULT", json.dumps({"compute": float(times["compute_time(us)"]), "idle": float(times["idle_time(us)"]),
    "wall": float(times["kernel_time(us)"]), "overlap": float(overlap["comp_comm_overlap_pctg"]) / 100,
    "seconds": time.perf_counter() - before}))
"""


def make_export(path: Path, gigabytes: float) -> int:
    """Write an export of about the given size; returns its number of kernels."""
    kernels = int(gigabytes * 1e9 / BYTES_PER_KERNEL)
    connection = sqlite3.connect(path)
    connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + SCHEMA.read_text())
    strings = [*KERNELS, "cudaLaunchKernel", "train_step", "forward_step", "backward_step", "optimizer_step"]
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(strings))
    connection.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1700000000000000000, '', '')")
    marks = ", ".join("?" * 28)
    kernel_rows, call_rows, ranges = [], [], []
    rng = random.Random(0)
    now, begun, thread = 10_000, 5_000, 1 << 24 | 1
    for number in range(kernels):
        place = number % PER_STEP
        kind = rng.randrange(4)
        if place % 40 == 39:
            kind = COLLECTIVE
        if place > PER_STEP - 200:
            kind = OPTIMIZER
        took, gap = rng.randrange(5_000, 90_000), rng.choice((500, 800, 3_000))
        stream = 20 if kind == COLLECTIVE else 7
        begin = now - 30_000 if kind == COLLECTIVE and place > 40 else now
        fixed = (None, None, None, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, None, None, None)
        kernel_rows.append((begin, begin + took, 0, 1, None, stream, number, 1 << 24, kind, kind, *fixed))
        call_rows.append((begin - 8_000, begin - 4_000, 0, thread, number, len(KERNELS), 0, None))
        now = max(now, begin + took) + gap
        if place == PER_STEP - 1:
            third = (now - begun) // 3
            spans = ((7, begun, now), (8, begun, begun + third), (9, begun + third, now - 1_000_000))
            ranges += [(first, last, 59, thread, len(KERNELS) + 1 + text - 7) for text, first, last in spans]
            begun = now
        if len(kernel_rows) == 100_000:
            _flush(connection, marks, kernel_rows, call_rows)
    _flush(connection, marks, kernel_rows, call_rows)
    connection.executemany(
        'INSERT INTO NVTX_EVENTS (start, "end", eventType, globalTid, textId) VALUES (?, ?, ?, ?, ?)', ranges
    )
    connection.commit()
    connection.close()
    return kernels


def _flush(connection: sqlite3.Connection, marks: str, kernels: list, calls: list) -> None:
    connection.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({marks})", kernels)
    connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?, ?)", calls)
    kernels.clear()
    calls.clear()


def measured(command: list[str]) -> tuple[float, float, float, str]:
    """Wall seconds, CPU seconds, peak memory (GB) and output of a command."""
    before, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate()
    seconds = time.perf_counter() - before
    if process.returncode:
        sys.exit(errors)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return seconds, cpu, after.ru_maxrss * 1024 / 1e9, output


def sizes(gigabytes: list[float]) -> None:
    print(f"{'GB':>6}  {'kernels':>12}  {'seconds':>8}  {'CPU s':>7}  {'CPU s/GB':>8}  {'peak memory':>11}")
    for size in sorted(gigabytes):  # in ascending order, as only the largest peak of all children is kept
        folder = Path(tempfile.mkdtemp())
        try:
            path = folder / "rank-0.sqlite"
            kernels = make_export(path, size)
            actual = path.stat().st_size / 1e9
            seconds, cpu, memory, _ = measured(
                [sys.executable, str(MEGABOA), "analyze-profile", str(path), "--out", str(folder / "a.json")]
            )
        finally:
            shutil.rmtree(folder)
        times = f"{seconds:>8.1f}  {cpu:>7.1f}  {cpu / actual:>8.1f}"
        print(f"{actual:>6.2f}  {kernels:>12,}  {times}  {memory:>8.2f} GB", flush=True)


def ours(path: Path) -> dict[str, float]:
    """Our results for a whole capture, in microseconds, in the same terms as the other tools."""
    before = time.perf_counter()
    found, findings = read.read(path)
    if not found:
        sys.exit(str(findings[0]))
    timeline = Timeline(found[0])
    window = np.array([[timeline.busy[0, 0], timeline.busy[-1, 1]]])
    known = budget(timeline, Steps("", [0], window, [])).items()
    numbers = {name: float(values[0]) / 1e3 for name, values in known if values is not None}
    shared = intervals.length(intervals.intersect(timeline.communication, timeline.compute)) / 1e3
    communication = numbers["communication"]
    overlap = shared / communication if communication else float("nan")
    return {**numbers, "overlap": overlap, "seconds": time.perf_counter() - before}


def kineto(paths: list[Path], python: str) -> None:
    print(f"{'trace':<44} {'tool':<8} {'wall ms':>9} {'compute':>9} {'idle':>9} {'overlap':>8} {'seconds':>8}")
    for path in paths:
        own = ours(path)
        _, _, _, output = measured([python, "-c", HTA, str(path.absolute())])
        theirs = json.loads(output.split("RESULT", 1)[1])
        for tool, row in (("megaboa", own), ("HTA", theirs)):
            numbers = [row[name] / 1e3 for name in ("wall", "compute", "idle")]
            text = " ".join(f"{number:>9.3f}" for number in numbers)
            print(f"{path.name[:44]:<44} {tool:<8} {text} {row['overlap']:>8.2%} {row['seconds']:>8.2f}", flush=True)


def nsys(paths: list[Path], program: str) -> None:
    """Compare with nsys-ai. It reports compute without overlapped communication, so ours is computed likewise."""
    print(f"{'capture':<24} {'tool':<8} {'wall ms':>9} {'compute':>9} {'only comm':>9} {'both':>9} {'idle':>9}")
    for path in paths:
        copy = Path(tempfile.mkdtemp()) / path.name  # a copy, because nsys-ai writes next to its input
        shutil.copy(path, copy)
        try:
            own = ours(path)
            command = [program, "skill", "run", "overlap_breakdown", str(copy), "--format", "json"]
            _, _, _, output = measured(command)
        finally:
            shutil.rmtree(copy.parent)
        theirs = json.loads(output[output.index("[") :])[0]
        both = own["overlap"] * own["communication"] if own["communication"] else 0.0
        row = (own["wall"], own["compute"] - both, own["communication"] - both, both, own["idle"])
        _print_nsys(path.name, "megaboa", [number / 1e3 for number in row])
        names = ("total_ms", "compute_only_ms", "nccl_only_ms", "overlap_ms", "idle_ms")
        _print_nsys(path.name, "nsys-ai", [theirs[name] for name in names])


def _print_nsys(name: str, tool: str, numbers: list[float]) -> None:
    print(f"{name[:24]:<24} {tool:<8} " + " ".join(f"{number:>9.3f}" for number in numbers), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["size", "kineto", "nsys"])
    parser.add_argument("given", nargs="*", help="gigabytes, or files")
    parser.add_argument("--hta", default="python3", help="a Python that has HolisticTraceAnalysis")
    parser.add_argument("--nsys-ai", default="nsys-ai", help="the program nsys-ai")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    if arguments.what == "size":
        sizes([float(size) for size in arguments.given] or [0.25, 1, 2])
    elif arguments.what == "kineto":
        kineto([Path(path) for path in arguments.given], arguments.hta)
    else:
        nsys([Path(path) for path in arguments.given], arguments.nsys_ai)


if __name__ == "__main__":
    main()
