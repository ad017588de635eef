"""What an export holds besides the loaded model: a tensor and one file of `export.file_gb`, whatever the layers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import TIED_BF16, specification, train_tokenizer

import megaboa
from megaboa.bridge.source import obtain
from megaboa.records import write

SCRIPTS = Path(megaboa.__file__).parents[1]
WIDE = TIED_BF16 | {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16},
    "head_dim": 64,
}
FILE_BYTES = 10**8
MARGIN = 64 * 2**20  # Python, and what the allocator keeps
CONVERT = """
import sys
from pathlib import Path
from megaboa.bridge.process import prepare
from megaboa.bridge.quiet import quietly
from megaboa.records import ModelSource, read

def now(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))

with quietly():
    prepare("cpu")
    from megaboa.bridge import convert
    source, before, peak = read(ModelSource, Path("source.json")), 0, 0
    with convert.process_groups("cpu"):
        if sys.argv[1] == "import":
            convert.import_checkpoint(source, Path("megatron"))
        else:
            Path("hf").mkdir()
            bridge = convert.converter_of(source)
            model = convert.load_checkpoint(bridge, Path("megatron/iter_0000000"))
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
            before = now("VmRSS")
            convert.export_model(bridge, model, source, Path("hf"), int(sys.argv[2]))
            peak = now("VmHWM")
print(peak - before)
"""

pytestmark = pytest.mark.slow


def taken(folder, *words):
    """Bytes by which the resident set has grown at most while a loaded model was exported."""
    command = [sys.executable, "-c", CONVERT, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("layers", [4, 16])
def test_an_export_holds_a_file_and_a_tensor(tmp_path, layers):
    """Another copy of the model with 16 layers would take 538 MB."""
    words = train_tokenizer(tmp_path / "tokenizer")
    source = obtain(specification(tmp_path, words, config={**WIDE, "num_hidden_layers": layers}))
    write(tmp_path / "source.json", source)
    taken(tmp_path, "import")
    found = taken(tmp_path, "export", FILE_BYTES)
    written = sorted(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(written) > 1 and written[-1] < 1.01 * FILE_BYTES
    largest = 2 * 2 * WIDE["hidden_size"] * WIDE["intermediate_size"]  # of Megatron's: two of the export's together
    assert found < FILE_BYTES + largest + MARGIN
