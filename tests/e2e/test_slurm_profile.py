"""`snakemake --profile slurm` in a clone, as far as it goes without a cluster."""

import pytest
from clone import edit

pytestmark = pytest.mark.slow
RUN = "{resources.gpus_per_node: 2, resources.nodes: 2, resources.partition: big}"
EXTRA = "resources: {slurm_extra: --exclusive}"


@pytest.fixture(scope="module")
def config(workspace):
    child = RUN.replace("{", "{continue_from: wide/dp4@3, ")
    return workspace.experiment("wide", {"dp4": RUN, "dp1": "{}", "child": child}, more=EXTRA)


@pytest.fixture
def filled(workspace):
    path = workspace.path / "profiles" / "slurm" / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("gpu_option: auto", "gpu_option: gpus-per-node").replace(": auto", ": lab"))
    yield
    path.write_text(text)


def test_where_there_is_no_slurm_the_call_says_what_to_do(workspace, config):
    output = workspace.snakemake("-n", "--profile", "slurm", "--configfile", config, code=1)
    assert "slurm_account and slurm_partition and gpu_partition and gpu_option can't be found" in output
    assert "profiles/slurm/site.yaml" in output
    assert "Traceback" not in output and "jobs to do" not in output


def test_a_run_gets_its_allocation(workspace, config, filled):
    output = workspace.snakemake("-n", "-p", "pretrain", "--profile", "slurm", "--configfile", config)
    blocks = output.split("rule train:")[1:]
    outputs = [block.split("output: ")[1] for block in blocks]
    wide = next(block for block in outputs if block.startswith("results/wide/runs/dp4/train.json"))
    child = next(block for block in blocks if "output: results/wide/runs/child/train.json" in block)
    assert "results/wide/runs/dp4/train.json" in child.split("output: ")[0], "its parent is trained first"
    for resource in ("mpi=srun", "nodes=2", "tasks_per_node=2", "slurm_partition=big", "slurm_account=lab"):
        assert resource in wide and resource in child
    assert "slurm_extra=" in wide and "--exclusive" in wide and "gpus_in_flight=4" in wide
    single = next(block for block in blocks if "runs/dp1/train.json" in block)
    assert "nodes=1" in single and "tasks_per_node=2" in single and "slurm_partition=lab" in single


def test_models_for_gpus_are_converted_on_a_gpu(workspace, filled):
    config = workspace.experiment("converted", {"one": "{resources.partition: big}"}, more="export: {runs: all}\n")
    edit(config, "device: cpu", "device: cuda")
    output = workspace.snakemake("-n", "-p", "export", "--profile", "slurm", "--configfile", config)
    for rule in ("import_model", "prove_import", "export_model", "prove_export"):
        block = output.split(f"rule {rule}:")[1].split("rule ")[0]
        assert "slurm_partition=big" in block and "--gpus-per-node=1" in block and "gpus_in_flight=1" in block
    assert "--gpus-per-node" not in output.split("rule get_model:")[1].split("rule ")[0]


def test_ranks_of_an_import_get_their_allocation(workspace, filled):
    config = workspace.experiment("sharded", {"one": "{resources.partition: big}"})
    edit(config, "device: cpu", "device: cuda")
    edit(config, "init: pretrained", "init: pretrained\n    conversion: {tp: 2, pp: 2, nodes: 2}")
    output = workspace.snakemake("-n", "-p", "import", "--profile", "slurm", "--configfile", config)
    for rule in ("import_model", "prove_import"):
        block = output.split(f"rule {rule}:")[1].split("rule ")[0]
        for resource in ("mpi=srun", "nodes=2", "tasks_per_node=2", "cpus_per_task=1", "gpus_in_flight=4"):
            assert resource in block
        assert "slurm_partition=big" in block and "--gpus-per-node=2" in block


def test_several_nodes_are_refused_on_one_machine(workspace, config):
    output = workspace.snakemake("pretrain", "--configfile", config, code=1)
    assert "run dp4: resources.nodes is 2, and this machine is one" in output and "--profile slurm" in output
    assert not workspace.results("wide", "preflight.json").exists()


def test_before_ranks_start_one_machine_is_enough_for_any_layout(workspace, config):
    assert "3 runs are accepted by Bridge" in workspace.snakemake("preflight", "--configfile", config)
    assert [run["state"] for run in workspace.json("wide", "preflight.json")["runs"].values()] == ["PASS"] * 3
