"""Readers: what a capture says arrives in one schema, whoever wrote it; what can't be read is named."""

import gzip
import shutil
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic import ALL_REDUCE, GEMM, NCCL, SCHEMA, Story

from megaboa.observe.traces import kineto
from megaboa.observe.traces.captures import EMPTY, Events
from megaboa.observe.traces.read import find, read, read_all

HOST_RANGES = Path(__file__).parent / "nsys-host.sqlite"
HOST_TRACE = Path(__file__).parent / "cpu-rank-1.json.gz"


def story(**values):
    told = Story(**values)
    told.range("step", 0, 100)
    told.kernel(GEMM, 10, 20, launch=2)
    told.kernel(ALL_REDUCE, 20, 30.5, stream=NCCL, launch=12, size=4096)
    told.copy(60, 4, 1024)
    return told


def codes(findings):
    return [finding.code for finding in findings]


def test_both_forms_come_to_the_same_columns(tmp_path, form):
    path = story(rank=3, world_size=8, clock=500).write(tmp_path, form)
    before = path.read_bytes(), path.stat().st_mtime_ns
    captures, findings = read_all([path])
    assert findings == [] and list(tmp_path.iterdir()) == [path]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    (capture,) = captures
    assert (capture.rank, capture.world_size, capture.host, capture.device) == (3, 8, "node-1", "gpu")
    assert capture.named(capture.kernels) == [GEMM, ALL_REDUCE]
    assert capture.kernels.start.tolist() == [510_000, 520_000]
    assert capture.kernels.end.tolist() == [530_000, 550_500]
    assert capture.kernels.sizes.tolist() == [-1, 4096]
    assert capture.kernels.place.tolist() == [7, 20]
    assert capture.calls.start.tolist() == [502_000, 512_000]
    assert capture.calls.correlation.tolist() == capture.kernels.correlation.tolist() == [0, 1]
    assert "Pageable" in capture.named(capture.copies)[0] and capture.copies.sizes.tolist() == [1024]
    assert "step" in capture.named(capture.ranges)
    assert capture.epoch + capture.kernels.start[0] == 1_700_000_000_000_000_000 + 10_000


def test_ranks_come_from_the_capture_then_from_the_name(tmp_path):
    story(rank=1).nsys(tmp_path, "rank-7.sqlite")
    bare = tmp_path / "rank-5.json"
    bare.write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2, "tid": 1}]}')
    (tmp_path / "other.json").write_text(bare.read_text())
    captures, findings = read_all([tmp_path])
    assert [capture.rank for capture in captures] == [0, 1, 5]
    assert sorted(codes(findings)) == ["rank_of_name", "rank_unknown"]


def test_of_two_sessions_the_newest_is_read(tmp_path, form):
    older = story(epoch=1_700_000_000_000_000_000).write(tmp_path, form)
    older.rename(tmp_path / f"before-{older.name}")
    newer = story(epoch=1_800_000_000_000_000_000).write(tmp_path, form)
    captures, findings = read_all([tmp_path])
    assert [capture.path for capture in captures] == [newer]
    assert codes(findings) == ["two_sessions"] and newer.name in findings[0].text


def test_captures_of_two_jobs_are_not_one_run(tmp_path):
    story(rank=0, environment={"SLURM_JOB_ID": "17"}).nsys(tmp_path)
    story(rank=1, environment={"SLURM_JOB_ID": "18"}).nsys(tmp_path)
    assert codes(read_all([tmp_path])[1]) == ["two_sessions"]


def test_a_truncated_sqlite_is_named(tmp_path):
    path = story().nsys(tmp_path)
    whole = path.read_bytes()
    for length in (len(whole) - 4096, 4096, 50):
        path.write_bytes(whole[:length])
        captures, (finding,) = read(path)
        assert captures == [] and (finding.code, finding.level) == ("truncated", "error")


def test_damage_in_the_middle_is_named(tmp_path):
    path = story().nsys(tmp_path)
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    assert codes(read(path)[1]) == ["truncated"]


@pytest.mark.parametrize("name", ["rank-0.sqlite", "rank-0.json", "rank-0.json.gz", "rank-0.nsys-rep"])
def test_an_empty_file_is_named(tmp_path, name):
    (tmp_path / name).touch()
    assert codes(read_all([tmp_path])[1]) == ["empty"]


def test_a_capture_without_rows_is_named(tmp_path, form):
    assert codes(read_all([Story().write(tmp_path, form)])[1]) == ["empty"]


def test_no_capture_at_all_is_named(tmp_path):
    assert codes(read_all([tmp_path])[1]) == ["no_captures"]


def test_of_a_torn_trace_what_is_there_is_used(tmp_path):
    path = story().pytorch(tmp_path, "rank-0.json")
    text = path.read_text()
    path.write_text(text[: text.index('"step"')])
    captures, findings = read_all([path])
    assert len(captures[0].kernels) == 2 and codes(findings) == ["truncated"]
    whole = gzip.compress(text.encode())
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(whole[: len(whole) // 2])
    path.write_text("not a trace")
    assert all("truncated" in codes(read_all([file])[1]) for file in (path, packed))


def test_a_newer_version_is_read_by_its_columns(tmp_path):
    columns = SCHEMA.replace("demangledName ", "demangledKernel ").replace("sharedMemoryLimitConfig ", "novelty ")
    path = story().nsys(tmp_path, schema=columns, version=(4, 0))
    captures, findings = read_all([path])
    assert captures[0].named(captures[0].kernels) == [GEMM, ALL_REDUCE]  # by shortName
    assert codes(findings) == ["newer_version"] and "4.0" in findings[0].text


def test_a_table_without_a_needed_column_is_named(tmp_path):
    path = story().nsys(tmp_path, schema=SCHEMA.replace("streamId ", "lane "))
    captures, findings = read_all([path])
    assert "unknown_table" in codes(findings) and "streamId" in findings[0].text
    assert len(captures[0].kernels) == 0 and "CUPTI_ACTIVITY_KIND_KERNEL" in captures[0].missing


def test_kernels_of_graphs_are_told(tmp_path):
    path = story().nsys(tmp_path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 5 WHERE correlationId = 0")
    columns = "start INTEGER, end INTEGER, streamId INTEGER, correlationId INTEGER"
    connection.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({columns})")
    connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (90000, 95000, 7, 9)")
    connection.execute("CREATE TABLE DIAGNOSTIC_EVENT (severity INTEGER, text TEXT)")
    connection.execute("INSERT INTO DIAGNOSTIC_EVENT VALUES (3, 'Events may be lost.')")
    connection.commit()
    connection.close()
    captures, findings = read_all([path])
    assert codes(findings) == ["cuda_graphs", "graphs_whole", "diagnostic"] and "50%" in findings[0].text
    assert captures[0].named(captures[0].kernels)[-1] == "CUDA graph"


def test_several_devices_in_one_file_are_several_ranks(tmp_path):
    """As where nsys wraps the program that starts the ranks of a node."""
    told = story()
    told.kernel(GEMM, 15, 40, process=2, device=1)
    path = told.nsys(tmp_path)
    captures, findings = read_all([path])
    assert [capture.rank for capture in captures] == [0, 1] and codes(findings) == ["several_devices"] * 2
    assert [capture.kernels.durations.tolist() for capture in captures] == [[20_000, 30_500], [40_000]]
    assert [len(capture.calls) for capture in captures] == [2, 1]
    assert ["step" in capture.named(capture.ranges) for capture in captures] == [True, False]
    assert "device 1 is called rank 1" in findings[1].text


def payload(schema, size, length=24):
    return struct.pack("<IIIIQQ", 1, 0, schema, 0, length, 32 + length) + struct.pack("<QQQ", 7, size, 0)


@pytest.mark.parametrize(
    ("binary", "size"),
    [(payload(9, 65536), 65536), (payload(9, 65536, length=16), -1), (payload(8, 65536), -1), (b"torn", -1)],
)
def test_sizes_of_newer_exports_are_in_a_binary_payload(tmp_path, binary, size):
    """Laid out as nsys-ai 0.3 reads it. What doesn't fit its own schema is no size."""
    path = story().nsys(tmp_path)
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE NVTX_EVENTS ADD COLUMN binaryData TEXT")
    connection.execute("UPDATE NVTX_EVENTS SET jsonText = NULL, binaryData = ? WHERE text = 'ncclAllReduce'", (binary,))
    connection.execute("CREATE TABLE NVTX_PAYLOAD_SCHEMAS (schemaId INTEGER, payloadSize INTEGER)")
    connection.execute("INSERT INTO NVTX_PAYLOAD_SCHEMAS VALUES (9, 24), (8, 24)")
    connection.execute("CREATE TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES (schemaId INTEGER, name TEXT, offset INTEGER)")
    rows = [(9, "NCCL communicator ID", None), (9, "Message size [bytes]", 8), (8, "Rank", 8)]
    connection.executemany("INSERT INTO NVTX_PAYLOAD_SCHEMA_ENTRIES VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    (capture,) = read_all([path])[0]
    assert capture.kernels.sizes.tolist() == [-1, size]


def test_samples_of_network_cards(tmp_path):
    path = story().nsys(tmp_path)
    connection = sqlite3.connect(path)
    connection.executescript(SCHEMA.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
    connection.execute("INSERT INTO TARGET_INFO_NETWORK_METRICS VALUES (1, 0, 'Bytes sent', '', 'B/s')")
    connection.executemany("INSERT INTO NET_NIC_METRIC VALUES (?, ?, 9, 1, 0, ?)", [(0, 1, 100), (1, 2, 300)])
    connection.commit()
    connection.close()
    expected = {"card": 9, "metric": "Bytes sent", "unit": "B/s", "n": 2, "mean": 200.0, "max": 300}
    assert read_all([path])[0][0].network == (expected,)


GPU_SCHEMA = """
CREATE TABLE GPU_METRICS (
    timestamp INTEGER, typeId INTEGER NOT NULL, metricId INTEGER NOT NULL, value INTEGER NOT NULL
);
CREATE TABLE TARGET_INFO_GPU_METRICS (
    typeId INTEGER NOT NULL, sourceId INTEGER NOT NULL, typeName TEXT NOT NULL, metricId INTEGER NOT NULL,
    metricName TEXT NOT NULL
);
"""


def test_samples_of_gpus(tmp_path):
    """Tables as the user guide of Nsight Systems lists them."""
    path = story().nsys(tmp_path)
    connection = sqlite3.connect(path)
    connection.executescript(GPU_SCHEMA)
    kinds = [(72057594037928192 + gpu, 1, "GPU Metrics [GPU]", 3, "SMs Active [Throughput %]") for gpu in (0, 1)]
    connection.executemany("INSERT INTO TARGET_INFO_GPU_METRICS VALUES (?, ?, ?, ?, ?)", kinds)
    samples = [(0, kinds[0][0], 3, 40), (1, kinds[0][0], 3, 80), (0, kinds[1][0], 3, 10), (0, kinds[1][0], 4, 99)]
    connection.executemany("INSERT INTO GPU_METRICS VALUES (?, ?, ?, ?)", samples)
    connection.commit()
    connection.close()
    common = {"metric": "SMs Active [Throughput %]", "unit": None}
    first = {"card": 0, **common, "n": 2, "mean": 60.0, "max": 80}
    assert read_all([path])[0][0].gpu_metrics == (first, {"card": 1, **common, "n": 1, "mean": 10.0, "max": 10})


def test_a_copy_of_a_report_beside_its_export_is_not_read_twice(tmp_path):
    for name in ("rank-0.nsys-rep", "rank-0.sqlite", "rank-1.nsys-rep", ".rank-2.json", "notes.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in find([tmp_path])] == ["rank-0.sqlite", "rank-1.nsys-rep"]


def test_operators_stand_in_for_kernels_on_the_host():
    """A real trace of two steps of a tiny model, data parallel over gloo, by torch 2.13."""
    captures, findings = read_all([HOST_TRACE])
    (capture,) = captures
    assert findings == [] and (capture.rank, capture.world_size, capture.device) == (1, 2, "cpu")
    names = capture.named(capture.kernels)
    assert "aten::mm" in names and "aten::linear" not in names and "c10d::allreduce_" not in names
    assert sum(name.startswith("gloo:") for name in names) == 28
    assert len([name for name in capture.named(capture.ranges) if name.startswith("ProfilerStep#")]) == 2
    assert set(capture.missing) == {"kernel", "gpu_memcpy", "cuda_runtime"}


def test_own_time_of_nested_calls():
    start, end = np.array([0, 0, 2, 6, 0]), np.array([10, 5, 4, 9, 3])
    table = Events(start, end, np.zeros(5, np.int32), np.array([1, 1, 1, 1, 2]), np.zeros(5))
    assert kineto.own_time(table).tolist() == [2, 3, 2, 3, 3]
    assert len(kineto.own_time(EMPTY)) == 0


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_events_are_found_wherever_a_block_ends(tmp_path, monkeypatch, size):
    monkeypatch.setattr(kineto, "CHUNK", size)
    path = tmp_path / "a.json"
    path.write_text('{"a": 12.5, "traceEvents": [{"x": [1, "]}"]}, {"y": -3e5}], "b" : {"c": null}, "d": 1234}  ')
    trace = kineto.TraceFile(path)
    assert list(trace) == [{"x": [1, "]}"]}, {"y": -3e5}]
    assert trace.head == {"a": 12.5, "b": {"c": None}, "d": 1234}


def test_ranges_of_a_real_capture_of_nsight_systems():
    """Of a process without a GPU, by 2023.4; of the export's tables those are kept here that are read."""
    captures, findings = read_all([HOST_RANGES])
    assert codes(findings) == ["rank_unknown"]
    names = captures[0].named(captures[0].ranges)
    assert captures[0].version == "2023.4.4.54" and len(names) == 25
    assert names[:4] == ["ProfilerStep#0", "forward", "attention", "backward"]
    missing = {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_MEMCPY"}
    assert set(captures[0].missing) == missing


@pytest.mark.skipif(shutil.which("nsys") is None, reason="there is no nsys")
def test_a_report_goes_through_the_real_nsys(tmp_path):
    command = ["nsys", "profile", "--trace=osrt", "--sample=none", "--cpuctxsw=none", "-o", tmp_path / "rank-0"]
    subprocess.run([*command, sys.executable, "-c", "pass"], check=True, capture_output=True)
    captures, findings = read_all([tmp_path / "rank-0.nsys-rep"])
    assert captures == [] and codes(findings) == ["empty"]  # calls of the operating system alone are no profile
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.nsys-rep"]


def test_without_nsys_a_report_is_named_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "rank-0.nsys-rep").write_bytes(b"QDSTRM")
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = read_all([tmp_path])[1]
    assert finding.code == "no_nsys" and "nsys export --type sqlite rank-0.nsys-rep" in finding.text


def test_an_export_that_fails_is_named(tmp_path, fake_command):
    fake_command("nsys", "echo 'Importer error: unexpected end' >&2; exit 1")
    (tmp_path / "rank-0.nsys-rep").write_bytes(b"QDSTRM")
    (finding,) = read_all([tmp_path])[1]
    assert finding.code == "truncated" and "unexpected end" in finding.text
