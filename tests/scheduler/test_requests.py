"""megaboa.scheduler.slurm.requests: what users' options of sbatch must leave to the experiment's keys."""

import re
import subprocess
from types import SimpleNamespace

import pytest
from snakemake_executor_plugin_slurm.validation import get_forbidden_slurm_options

from megaboa.config.models.resources import Resources
from megaboa.scheduler.slurm.requests import options, options_problem, settings_problem


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--constraint=h100", "--constraint is set by the workflow: remove it, and set resources.constraint"),
        ("--exclusive -C h100", "-C is set by the workflow: remove it, and set resources.constraint"),
        ("-Ch100", "-C is set by the workflow: remove it, and set resources.constraint"),
        ("--qos long", "--qos is set by the workflow: remove it, and set resources.qos"),
        ("--output=log", "--output is set by the workflow: remove it"),
        ("--comment 'half", "can't be read: No closing quotation"),
        ("--exclusive --exclude=n3 --reservation='a b' --gpus-per-node=4 --begin=now+1hour", None),
        ("", None),
    ],
)
def test_options_that_the_workflow_sets_are_refused_with_the_key_to_set(options, said):
    assert options_problem(options) == said


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("--nice=0;touch x;true", ["--nice=0;touch", "x;true"]),
        ("--nice=0$(touch x) --exclude=`touch x`", ["--nice=0$(touch", "x)", "--exclude=`touch", "x`"]),
        ("--exclude=n3\n touch x", ["--exclude=n3", "touch", "x"]),
        ("--prefer=a100|h100 --gpus-per-node=h100:8", ["--prefer=a100|h100", "--gpus-per-node=h100:8"]),
        ('--prefer="a100|h100" --exclude=n[1-3]', ["--prefer=a100|h100", "--exclude=n[1-3]"]),
        ("--reservation 'two words' --mail-user=it\\'s", ["--reservation", "two words", "--mail-user=it's"]),
    ],
)
def test_a_shell_gets_the_words_of_the_users_options_and_executes_nothing(own, words, tmp_path):
    said = subprocess.run(f"printf '%s\\0' {options(own)}", shell=True, cwd=tmp_path, capture_output=True, check=True)
    assert said.stdout.decode().split("\0")[:-1] == words and not list(tmp_path.iterdir())


def test_common_options_stay_readable():
    assert options("--exclusive  --exclude=n3", returns=True, outlives=True) == (
        "--open-mode=append --no-kill --exclusive --exclude=n3"
    )


def test_all_that_the_executor_refuses_is_refused_by_the_plan():
    """Its patterns are alternatives of options, each followed by a space or an equals sign."""
    for pattern in get_forbidden_slurm_options():
        for option in re.findall(r"--[a-z-]+[a-z]|(?<![a-z-])-[A-Za-z]", pattern):
            assert options_problem(f"{option} 1"), option


def test_every_key_that_a_refusal_names_exists():
    keys = set(re.findall(r"resources\.(\w+)", " ".join(map(str, map(options_problem, OPTIONS)))))
    assert keys <= set(Resources.model_fields) and len(keys) == 9


OPTIONS = ("-C", "--qos", "-p", "--account", "--time", "--nodes", "--ntasks", "--cpus-per-task", "--mem")


ARRAYS = [("train", {"mpi": "srun"}), ("index", {"mem_mb": 1})] * 2


@pytest.mark.parametrize(
    ("asked", "rest"),
    [
        ("train", "leave them out"),
        ("index; train", "leave them out"),
        ("all", "name the other rules instead of `all`"),
        ("index", None),
        ("", None),
        (None, None),
    ],
)
def test_job_arrays_of_jobs_that_start_ranks_are_refused(asked, rest):
    problem = settings_problem(SimpleNamespace(array_jobs=asked), ARRAYS)
    assert (problem is None) == (rest is None)
    assert rest is None or (problem.endswith(rest) and "jobs of train start ranks" in problem)


def test_a_single_job_is_submitted_without_an_array():
    settings = SimpleNamespace(array_jobs="all")
    assert settings_problem(settings, ARRAYS[:2]) is None
    assert "jobs of train start ranks" in settings_problem(settings, [*ARRAYS, ("import_model", {"mpi": "srun"})])


def test_an_executor_without_such_settings_is_fine():
    assert settings_problem(None, ARRAYS) is None
