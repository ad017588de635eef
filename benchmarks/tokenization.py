"""Text to Megatron's .bin/.idx: the whole pipeline beside other tools, on one corpus, in one go.

The corpus is made of this machine's own text files (documentation, Python sources), shuffled and repeated up to a size,
and a BPE tokenizer is trained on it. A peer takes part if it is there:

    python benchmarks/tokenization.py                                  this pipeline alone
    python benchmarks/tokenization.py --megatron-lm ../Megatron-LM     + preprocess_data.py and preprocess_data_fast.py
    python benchmarks/tokenization.py --datatrove ../venv/bin/python   + datatrove's Megatron writer, of that Python

Megatron-LM is a checkout of https://github.com/NVIDIA/Megatron-LM; its tools run in this project's environment. As
preprocess_data.py is slow, it gets a part of the corpus (--slow-mb) and is compared by its rate. Times are of the whole
command, start-up included; memory is the peak of the sum over all of a command's processes (PSS).
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow/scripts"))

from megaboa.data import tokenizer

ROOT = Path(__file__).parents[1]
PLACES = ["/usr/share/doc", "/usr/share/perl", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
SUFFIXES = {".py", ".txt", ".md", ".rst", ".html", ".pm", ".pod", ".json", ".pyi", ".h", ".c", ""}
LARGEST_FILE = 1_000_000
VOCABULARY = 32_000
EXPERIMENT = """\
experiment: bench
device: cpu
store: {folder}/store
corpora: {{bench: {{source: {corpus}, tokenizer: {tokenizer}, shards: {shards}}}}}
models:
  tiny:
    tokenizer: {tokenizer}
    config: {{model_type: qwen3, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
      num_key_value_heads: 2, head_dim: 16}}
training: {{train_iters: 1}}
"""
DATATROVE = """\
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer
corpus, tokenizer, out, tasks = sys.argv[1:]
LocalPipelineExecutor(
    pipeline=[
        JsonlReader(corpus),
        MegatronDocumentTokenizer(output_folder=out, tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>"),
    ],
    tasks=int(tasks), workers=int(tasks), logging_dir=out + "/logs",
).run()
"""


@dataclass
class Result:
    name: str
    megabytes: float
    seconds: float
    peak: float
    same: str

    @property
    def rate(self) -> float:
        return self.megabytes / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--slow-mb", type=float, default=60.0, help="of the corpus, for preprocess_data.py")
    parser.add_argument("--shards", type=int, default=os.cpu_count())
    parser.add_argument("--megatron-lm", type=Path)
    parser.add_argument("--datatrove", type=Path, help="a Python that has datatrove and orjson")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megaboa-tokenize-", dir=arguments.folder) as folder:
        results = measure(Path(folder), arguments)
    print(table(results))


def measure(folder: Path, wanted: argparse.Namespace) -> list[Result]:
    corpus, small = folder / "corpus" / "corpus.jsonl", folder / "small" / "small.jsonl"
    text = write_corpus(corpus, int(wanted.gigabytes * 1e9))
    share = write_part(corpus, small, int(wanted.slow_mb * 1e6))
    tokens = folder / "tokenizer"
    texts = (json.loads(line)["text"] for line in small.open())
    tokenizer.train(texts, VOCABULARY, tokens)
    say(f"corpus: {text / 1e9:.2f} GB of text")
    ours = run_ours(folder, corpus, tokens, text, wanted.shards)
    reference = folder / "results" / "bench" / "data" / "bench"
    results = [ours]
    if wanted.megatron_lm:
        common = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokens, "--append-eod"]
        for script, source, size, extra in (
            ("preprocess_data_fast.py", corpus, text, ["--use-gigatoken"]),
            ("preprocess_data.py", small, share, ["--workers", os.cpu_count()]),
        ):
            out = folder / script
            command = [sys.executable, wanted.megatron_lm / "tools" / script, "--input", source, "--output-prefix", out]
            seconds, peak = run([*command, *common, *extra], wanted.megatron_lm, PYTHONPATH=wanted.megatron_lm)
            same = equal(Path(f"{out}_text_document"), reference)
            results.append(Result(f"Megatron-LM {script} {' '.join(map(str, extra))}", size / 1e6, seconds, peak, same))
    if wanted.datatrove:
        out = folder / "datatrove"
        command = [wanted.datatrove, "-c", DATATROVE, small.parent, tokens / "tokenizer.json", out, "1"]
        seconds, peak = run(command, folder)
        made = next(out.glob("*.bin"), out / "nothing.bin")
        same = equal(made.with_suffix(""), reference)
        results.append(Result("datatrove MegatronDocumentTokenizer", share / 1e6, seconds, peak, same))
    return results


def run_ours(folder: Path, corpus: Path, tokens: Path, text: int, shards: int) -> Result:
    config = folder / "bench.yaml"
    config.write_text(EXPERIMENT.format(folder=folder, corpus=corpus, tokenizer=tokens, shards=shards))
    for part in ("Snakefile", "workflow", "profiles", "config", "envs"):
        (folder / part).symlink_to(ROOT / part)
    # a corpus without verification, which the other tools don't have
    manifest = "results/bench/data/bench.json"
    command = [Path(sys.executable).with_name("snakemake"), "--profile", ROOT / "profiles/local", manifest]
    seconds, peak = run([*command, "--configfile", config], folder)
    return Result(f"Megaboa, {shards} shards (snakemake, whole command)", text / 1e6, seconds, peak, "–")


def files() -> Iterator[Path]:
    for place in map(Path, PLACES):
        for path in sorted(place.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and 0 < path.stat().st_size <= LARGEST_FILE:
                yield path


def write_corpus(target: Path, size: int) -> int:
    """Write all files in random order, repeatedly, until the size is reached; returns the bytes of text."""
    lines = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            lines.append((json.dumps({"text": text}) + "\n", len(text.encode())))
    target.parent.mkdir()
    chance, done = random.Random(0), 0
    with target.open("w") as stream:
        while done < size:
            chance.shuffle(lines)
            for line, length in lines:
                if done >= size:
                    break
                stream.write(line)
                done += length
    return done


def write_part(corpus: Path, target: Path, size: int) -> int:
    target.parent.mkdir()
    done = 0
    with corpus.open() as stream, target.open("w") as out:
        for line in stream:
            if done >= size:
                break
            out.write(line)
            done += len(json.loads(line)["text"].encode())
    return done


def run(command: list[object], folder: Path, **environment: object) -> tuple[float, float]:
    """Seconds and peak memory (in GB) of a command and all of its processes."""
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **{key: str(value) for key, value in environment.items()}}
    say(" ".join(map(str, command))[:200])
    with tempfile.TemporaryFile() as log:
        begin = time.monotonic()
        process = subprocess.Popen(list(map(str, command)), cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        watcher = Watcher(process.pid)
        code = process.wait()
        seconds = time.monotonic() - begin
        peak = watcher.stop()
        if code:
            log.seek(0)
            sys.exit(log.read()[-3000:].decode(errors="replace") + f"\nexit code {code}")
    say(f"  {seconds:.1f} s")
    return seconds, peak


class Watcher(threading.Thread):
    """Samples the memory of a process and its children four times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process, self._over, self._peak = psutil.Process(pid), threading.Event(), 0
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.25):
            total = 0
            try:
                for process in [self._process, *self._process.children(recursive=True)]:
                    total += process.memory_full_info().pss
            except psutil.Error:
                continue
            self._peak = max(self._peak, total)

    def stop(self) -> float:
        self._over.set()
        self.join()
        return self._peak / 1e9


def equal(made: Path, reference: Path) -> str:
    """Whether the token files are identical, or one is the beginning of the other."""
    ours, theirs = Path(f"{reference}.bin"), Path(f"{made}.bin")
    if not theirs.exists() or not theirs.stat().st_size:
        return "nothing written"
    if ours.stat().st_size == theirs.stat().st_size:
        index = filecmp.cmp(f"{reference}.idx", f"{made}.idx", shallow=False)
        return "identical" if index and filecmp.cmp(ours, theirs, shallow=False) else "DIFFERENT"
    with ours.open("rb") as one, theirs.open("rb") as other:
        while piece := other.read(1 << 20):
            if one.read(len(piece)) != piece:
                return "DIFFERENT"
    return "identical, as far as it goes"


def table(results: list[Result]) -> str:
    ours = results[0]
    rows = [("", "text MB", "seconds", "MB/s", "peak GB", "Megaboa is", "tokens")]
    rows += [
        (
            result.name,
            f"{result.megabytes:,.0f}",
            f"{result.seconds:.1f}",
            f"{result.rate:.1f}",
            f"{result.peak:.2f}",
            f"{ours.rate / result.rate:.1f} x" if result is not ours else "",
            result.same,
        )
        for result in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    if shutil.which("snakemake") is None and not Path(sys.executable).with_name("snakemake").exists():
        sys.exit("run it with the environment's Python: .venv/bin/python benchmarks/tokenization.py")
    main()
