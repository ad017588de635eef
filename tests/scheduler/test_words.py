"""Nobody but the scheduler's room knows a word of SLURM's: what must change for another scheduler stands there."""

import functools
import re
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "workflow" / "scripts" / "megaboa"
COMMANDS = r"sbatch|srun|salloc|scontrol|squeue|sacct(?:mgr)?|scancel|sinfo|sshare|slurm(?:ctld|dbd|d|stepd)"
STATES = "PENDING|COMPLETING|TIMEOUT|NODE_FAIL|CANCELLED|PREEMPTED|BOOT_FAIL|OUT_OF_MEMORY|POWERED_DOWN"
REASONS = "NodeDown|TimeLimit|DeadLine|BeginTime|ExcNodeList|JobState"
WORDS = re.compile(
    rf"\bSLURM\b|\b(?:{COMMANDS})\b|\bsrun_\w+|(?:SLURMD?|SBATCH|SRUN|SQUEUE|SACCT|SINFO|SCONTROL)_\w+"
    rf"|--profile slurm|logs/slurm|\bslurm_\w+|\b(?:{STATES}|{REASONS})\b"
)
# Formats that users and files have, and texts of others that are read.
ALLOWED = {
    "config/models/resources.py": (
        "keys of the experiment, and what each is, for who writes them",
        {"SLURM", "slurm_extra", "sbatch", "srun", "srun_args"},
    ),
    "config/models/outputs.py": ("a key of the experiment", {"slurm_extra", "sbatch"}),
    "records/images.py": ("keys of inside.json", {"srun", "srun_args"}),
    "records/runs.py": ("keys of launch.json", {"srun", "srun_args", "slurm_extra"}),
    "plan/resources.py": ("a key of the experiment", {"slurm_extra"}),
    "plan/run_facts.py": ("a key of the experiment", {"slurm_extra"}),
    "plan/image_specs.py": ("keys of inside.json, and of the experiment", {"srun", "srun_args"}),
    "image/contract.py": ("a key of inside.json", {"srun"}),
    "check/ranks_and_batches.py": ("a key of the experiment, in an error", {"slurm_extra"}),
    "doctor/troubles.py": ("a key of the experiment, in advice", {"slurm_extra"}),
    "causes.py": ("what logs say of any run, also of earlier ones", {"srun", "slurmd"}),
    "store_paths.py": ("a file's name in stores", {"srun"}),
    "observe/traces/nsys.py": (
        "the environment that a capture of anybody's has kept; it imports nothing of ours",
        {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID"},
    ),
}


def words_of(path):
    return set(WORDS.findall(path.read_text(encoding="utf-8")))


@functools.cache
def files():
    return {str(path.relative_to(LIBRARY)): path for path in LIBRARY.rglob("*.py")}


@pytest.mark.parametrize("name", sorted(name for name in files() if not name.startswith("scheduler/")))
def test_a_file_knows_no_word_of_slurms(name):
    _, allowed = ALLOWED.get(name, ("", set()))
    found = words_of(files()[name])
    assert found <= allowed, "ask megaboa.scheduler instead"


def test_the_other_files_of_the_room_know_none_either():
    told = [name for name in files() if name.startswith("scheduler/") and not name.startswith("scheduler/slurm/")]
    # The package's docstring names its rooms, and the table has a line for each scheduler.
    assert {name for name in told if words_of(files()[name])} <= {"scheduler/__init__.py"}


@pytest.mark.parametrize("name", ALLOWED)
def test_an_exception_is_needed(name):
    found, allowed = words_of(files()[name]), ALLOWED[name][1]
    assert found and allowed <= found


@pytest.mark.parametrize(
    "text",
    [
        *("ask squeue", "`srun -n 2`", "SLURM_JOB_ID", "SBATCH_PARTITION", '"slurm_partition"', "state == 'PENDING'"),
        *("ExcNodeList=n1", "SLURM job 7", "reason NodeDown", "SLURMD_NODENAME", "slurm_account"),
        *("snakemake --profile slurm", "its own log: logs/slurm"),
    ],
)
def test_words_are_found(text):
    assert WORDS.search(text)


@pytest.mark.parametrize("text", ["profiles/slurm", "the scheduler", "run", "TIMEOUTS", "from x.slurm import y"])
def test_other_words_are_not(text):
    assert not WORDS.search(text)
