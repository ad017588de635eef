"""What jobs ask of a machine or a cluster, in Snakemake's words."""

from types import SimpleNamespace

import pytest
from fake_scheduler import Tower

from megaboa.errors import InputError
from megaboa.plan.resources import JobResources
from megaboa.plan.shared import Shared
from megaboa.scheduler import registry
from megaboa.scheduler.answers import Excess, Request, UnreachableError, Where
from megaboa.scheduler.slurm import queue

PROFILE = {"slurm_account": "lab", "slurm_partition": "cpu", "gpu_partition": "gpu"}
TRAINING = {
    "mpi": "srun",
    "nodes": 2,
    "tasks_per_node": 4,
    "cpus_per_task": 3,
    "mem_mb": 40000,
    "runtime": "2h",
    "gpu_machine": 1,
    "gpus_in_flight": 8,
    "slurm_extra": "--gpus-per-node=4 --open-mode=append",
}
GPUS = """
device: cuda
sweep: {runs: {wide: {}}}
resources: {nodes: 2, gpus_per_node: 4, cpus_per_rank: 3, mem_mb_per_rank: 10000, runtime: 2h}
"""
IMPORTED = """
models: {dense: {init: pretrained, conversion: {tp: 2}}}
"""


def jobs(plan, profile=(), submits=False):
    return JobResources(Shared(plan, profile=dict(profile)), submits)


def asked(resources, **wildcards):
    """Their values for one job."""
    one = SimpleNamespace(**wildcards)
    return {name: value(one) if callable(value) else value for name, value in resources.items()}


def test_a_run_is_one_allocation_for_all_its_ranks(plan_of):
    found = jobs(plan_of(GPUS))
    assert asked(found.training("train"), run="wide") == TRAINING
    assert found.cores("wide") == 12
    places = {"slurm_partition": "gpu", "slurm_account": "lab", "constraint": None, "qos": None}
    assert asked(jobs(plan_of(GPUS), PROFILE).training("train"), run="wide") == TRAINING | places


def test_what_the_cluster_grants_no_job_is_told_of_all_runs_alike(plan_of, monkeypatch):
    asked = []

    def excesses(requests):
        asked.extend(requests)
        return [[Excess("resources.nodes", "2", "there is 1", "lower it")] for _ in requests]

    monkeypatch.setattr(registry.cluster(), "excesses", excesses)
    runs = "{wide: {}, other: {schedule.warmup_iters: 2}, long: {schedule.warmup_iters: 3, resources.runtime: 3h}}"
    plan = plan_of(GPUS.replace("{wide: {}}", runs))
    (one,) = jobs(plan, PROFILE).excesses(["wide", "other", "long"]).values()
    assert one == ["wide", "other", "long"] and len(asked) == 2
    assert asked[0] == Request(Where("gpu", "lab"), nodes=2, cores=12, mem_mb=40000, seconds=7200, gpus=4)
    whole = jobs(plan, {**PROFILE, "gpu_option": "exclusive"})
    assert whole.request("wide").gpus == 0, "there SLURM knows of no GPUs"
    for name in ("cluster", "clusters", "slurm_cluster"):
        assert jobs(plan, {**PROFILE, name: "other"}).request("wide").where == Where("gpu", "lab", cluster="other")
    assert jobs(plan).excesses(["wide"]) == {} and len(asked) == 2, "this machine has no partitions"

    def silent(requests):
        raise UnreachableError("no controller")

    monkeypatch.setattr(registry.cluster(), "excesses", silent)
    assert jobs(plan, PROFILE).excesses(["wide"]) == {}


def test_nodes_with_a_feature_and_a_quality_of_service(plan_of):
    config = GPUS.replace("runtime: 2h", "runtime: 2h, constraint: 'h100&nvlink', qos: long")
    found = asked(jobs(plan_of(config), PROFILE).training("train"), run="wide")
    assert (found["constraint"], found["qos"]) == ("h100&nvlink", "long")
    assert asked(jobs(plan_of(config), PROFILE).exports(), run="wide")["constraint"] == "h100&nvlink"


def test_spares_are_nodes_of_the_training_job_which_outlives_one_that_fails(plan_of):
    found = jobs(plan_of(GPUS.replace("nodes: 2,", "nodes: 2, spare_nodes: 1,")))
    more = {"nodes": 3, "gpus_in_flight": 12, "slurm_extra": f"{TRAINING['slurm_extra']} --no-kill"}
    assert asked(found.training("train", spares=True), run="wide") == TRAINING | more
    assert asked(found.training("capture"), run="wide") == TRAINING, "a profile is a matter of minutes"
    assert asked(jobs(plan_of(GPUS)).training("train", spares=True), run="wide") == TRAINING


def test_one_rank_takes_two_tasks_of_half_its_cores(plan_of):
    plan = plan_of("resources: {cpus_per_rank: 5}")
    found = asked(jobs(plan).training("train"), run=plan.runs[0].name)
    assert (found["tasks_per_node"], found["cpus_per_task"], found["gpus_in_flight"]) == (2, 3, 1)
    assert (found["gpu_machine"], found["slurm_extra"]) == (0, "--open-mode=append")


def test_an_experiment_names_places_and_options_of_its_own(plan_of):
    own = GPUS.replace("runtime: 2h", "runtime: 2h, partition: big, account: us, slurm_extra: --exclude=n3")
    found = asked(jobs(plan_of(own), PROFILE).training("train"), run="wide")
    assert (found["slurm_partition"], found["slurm_account"]) == ("big", "us")
    assert found["slurm_extra"] == "--gpus-per-node=4 --open-mode=append --exclude=n3"


@pytest.mark.parametrize(
    ("option", "ranks", "expected"),
    [
        ("gpus-per-node", 4, {"slurm_extra": "--gpus-per-node=4 --open-mode=append"}),
        ("gres", 4, {"slurm_extra": "--open-mode=append", "gres": "gpu:4"}),
        ("gpus-per-task", 4, {"slurm_extra": "--gpus-per-task=1 --open-mode=append", "cpus_per_task": 3}),
        (
            *("gpus-per-task", 1),
            {"slurm_extra": "--gpus-per-task=1 --ntasks-per-node=1 --open-mode=append", "cpus_per_task": 3},
        ),
        ("exclusive", 4, {"slurm_extra": "--exclusive --open-mode=append"}),
    ],
)
def test_sites_ask_for_gpus_in_different_ways(plan_of, option, ranks, expected):
    plan = plan_of(GPUS.replace("gpus_per_node: 4", f"gpus_per_node: {ranks}"))
    found = asked(jobs(plan, PROFILE | {"gpu_option": option}).training("train"), run="wide")
    assert found.items() >= expected.items() and ("gres" in found) == (option == "gres")


def test_another_way_to_ask_for_gpus_is_refused(plan_of):
    with pytest.raises(InputError, match="gpu_option is 'gpus': take gpus-per-node, gres"):
        jobs(plan_of(GPUS), PROFILE | {"gpu_option": "gpus"}).training("train")


def test_a_job_waits_for_what_is_left_of_the_same_run(plan_of, monkeypatch):
    questions = []

    def dependency(rule, folder):
        questions.append((rule, str(folder.path)))
        return ["--dependency=afterany:17"]

    monkeypatch.setattr(queue, "dependency", dependency)
    waiting = asked(jobs(plan_of(GPUS), PROFILE, submits=True).training("capture"), run="wide")
    assert waiting["slurm_extra"] == "--gpus-per-node=4 --dependency=afterany:17 --open-mode=append"
    assert questions == [("capture", "results/small/runs/wide")]
    asked(jobs(plan_of(GPUS), PROFILE).training("capture"), run="wide")
    asked(jobs(plan_of(GPUS), submits=True).training("capture"), run="wide")
    assert len(questions) == 1, "the job itself would find itself, and without a cluster there is nobody to ask"


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ({}, {"gpu_machine": 1, "gpus_in_flight": 1}),
        (
            PROFILE,
            {
                **{"gpu_machine": 1, "gpus_in_flight": 1, "slurm_extra": "--gpus-per-node=1"},
                **{"slurm_partition": "gpu", "slurm_account": "lab", "constraint": None, "qos": None},
            },
        ),
    ],
)
def test_a_model_for_gpus_is_converted_on_one(plan_of, profile, expected):
    found = jobs(plan_of(GPUS), profile)
    assert asked(found.exports(), run="wide") == expected
    assert asked(found.imports(), model="dense") == expected


def test_on_the_cpu_a_conversion_asks_for_nothing_special(plan_of):
    found = jobs(plan_of())
    assert found.exports() == found.imports() == {}


def test_an_evaluation_is_a_conversion_and_what_the_experiment_asks_for(plan_of):
    more = "evaluate: {command: 'true {model} {out}', runtime: 180, slurm_extra: --exclude=n3}\nexport: {runs: all}\n"
    found = asked(jobs(plan_of(GPUS + more), PROFILE).evaluation(), run="wide")
    assert (found["runtime"], found["slurm_extra"]) == (180, "--gpus-per-node=1 --exclude=n3")


def test_a_model_of_several_ranks_is_imported_in_an_allocation(plan_of):
    plan = plan_of(IMPORTED)
    found = jobs(plan)
    assert found.import_cores("dense") == 2
    assert asked(found.imports(), model="dense") == {
        **{"mpi": "srun", "nodes": 1, "tasks_per_node": 2, "cpus_per_task": 1},
    }


def test_another_scheduler_has_words_of_its_own(plan_of, monkeypatch):
    monkeypatch.setattr(registry, "SCHEDULERS", (Tower(),))
    found = asked(jobs(plan_of(GPUS), {"floor": "first"}).training("train"), run="wide")
    assert found == {
        **{"mem_mb": 40000, "runtime": "2h", "gpu_machine": 1, "gpus_in_flight": 8},
        **{"floors": 2, "climb": "up"},
    }


@pytest.mark.parametrize(
    ("runs", "chosen"),
    [
        (
            "{small: {resources.gpus_per_node: 1}, huge: {resources.nodes: 64}, two: {resources.nodes: 2}, one: {}}",
            "two",
        ),
        ("{full: {}, thin: {resources.gpus_per_node: 1, resources.nodes: 2}}", "full"),
    ],
)
def test_a_machine_is_measured_on_full_nodes_and_on_two_where_runs_have_several(plan_of, runs, chosen):
    more = "device: cuda\nresources: {gpus_per_node: 8}\ntraining: {global_batch_size: 512}\n"
    assert jobs(plan_of(more + "sweep: {runs: " + runs + "}\n")).calibrated == chosen
