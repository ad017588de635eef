"""What the workflow's jobs ask of a machine or a cluster, in Snakemake's words: the values of their `resources:`.

What depends on a run or a model is a function of the job's wildcards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megaboa.config.models.resources import Resources
from megaboa.launch import queue
from megaboa.paths import RunFolder
from megaboa.plan.shared import Shared

Asked = dict[str, Any]  # the name of a resource: a value, or a function of the wildcards


class JobResources:
    def __init__(self, shared: Shared, submits: bool):
        """`submits`: whether jobs are submitted here; else this is one of them."""
        self.plan, self.shared, self.submits = shared.plan, shared, submits
        self.on_gpus = shared.plan.experiment.device == "cuda"

    def of(self, run: str) -> Resources:
        """What the experiment says."""
        return self.shared.runs[run].config.resources

    def cores(self, run: str) -> int:
        """On one node."""
        return self.of(run).gpus_per_node * self.of(run).cpus_per_rank

    def training(self, rule: str) -> Asked:
        """One allocation for all ranks of a run.

        With `mpi` the plugin leaves srun to the job, which starts the ranks itself; then it wants at least two tasks
        per node. Tasks only size the allocation: they are as many as ranks, or two for one rank.
        """
        return {
            "mpi": "srun",
            "nodes": lambda wildcards: self.of(wildcards.run).nodes,
            "tasks_per_node": lambda wildcards: _tasks(self.of(wildcards.run).gpus_per_node),
            "cpus_per_task": lambda wildcards: _cpus_per_task(
                self.cores(wildcards.run), self.of(wildcards.run).gpus_per_node
            ),
            "mem_mb": lambda wildcards: self.of(wildcards.run).mem_mb_per_rank * self.of(wildcards.run).gpus_per_node,
            "runtime": lambda wildcards: self.of(wildcards.run).runtime,
            # Without SLURM two runs would both take this machine's first GPU: profiles/local lets one in at a time.
            "gpu_machine": int(self.on_gpus),
            "gpus_in_flight": lambda wildcards: self.of(wildcards.run).nodes * self.of(wildcards.run).gpus_per_node,
            **self._places(lambda wildcards: wildcards.run),
            "slurm_extra": lambda wildcards: self.slurm_extra(wildcards.run, rule),
        }

    def slurm_extra(self, run: str, rule: str) -> str:
        """What sbatch is told about a run besides its size: GPUs, what must end before it, nodes that it avoids."""
        # The plugin's own `gpu` resource would also set tasks per GPU.
        options = [f"--gpus-per-node={self.of(run).gpus_per_node}"] if self.on_gpus else []
        if self.shared.on_cluster and self.submits:  # the job itself would find itself
            options += queue.options(rule, RunFolder(self.shared.folder / "runs" / run))
        # A job that is put back into the queue writes to the same log again.
        return " ".join([*options, "--open-mode=append", self.of(run).slurm_extra]).strip()

    def import_cores(self, model: str) -> int:
        """Of the ranks that import a model, on one node."""
        if self.plan.models[model].conversion.ranks == 1:
            return 1
        return self._import_ranks(model) * self.shared.first_run_of(model).config.resources.cpus_per_rank

    def imports(self) -> Asked:
        """Several ranks are an allocation, as for training: without `mpi` the job would be a step itself, in which no
        ranks can be started."""
        asked = self._conversion(lambda wildcards: self.shared.first_run_of(wildcards.model).name)
        if all(self.plan.models[model].conversion.ranks == 1 for model in self.shared.imported_models):
            return asked
        asked |= {
            "mpi": "srun",
            "nodes": lambda wildcards: self.plan.models[wildcards.model].conversion.nodes,
            "tasks_per_node": lambda wildcards: _tasks(self._import_ranks(wildcards.model)),
            "cpus_per_task": lambda wildcards: _cpus_per_task(
                self.import_cores(wildcards.model), self._import_ranks(wildcards.model)
            ),
        }
        if self.on_gpus:
            asked |= {
                "gpus_in_flight": lambda wildcards: self.plan.models[wildcards.model].conversion.ranks,
                "slurm_extra": lambda wildcards: f"--gpus-per-node={self._import_ranks(wildcards.model)}",
            }
        return asked

    def exports(self) -> Asked:
        return self._conversion(lambda wildcards: wildcards.run)

    def evaluation(self) -> Asked:
        """As a conversion, and what the experiment asks for."""
        asked, wanted = self.exports(), self.plan.experiment.evaluate
        extra = f"{asked.get('slurm_extra', '')} {wanted.slurm_extra}".strip()
        return {**asked, "slurm_extra": extra, "runtime": wanted.runtime}

    def _import_ranks(self, model: str) -> int:
        """On one node."""
        asked = self.plan.models[model].conversion
        return asked.ranks // asked.nodes

    def _conversion(self, run_of: Callable[[Any], str]) -> Asked:
        """What a conversion takes besides memory, for the run that `run_of` finds for its wildcards.

        A model for GPUs is made of Transformer Engine's modules, also where it is only converted: that needs a GPU.
        """
        if not self.on_gpus:
            return {}
        one_gpu = {"gpu_machine": 1, "gpus_in_flight": 1}
        if not self.shared.on_cluster:
            return one_gpu
        return {**one_gpu, **self._places(run_of), "slurm_extra": "--gpus-per-node=1"}

    def _places(self, run_of: Callable[[Any], str]) -> Asked:
        """Partition and account of a run's training: the experiment's, else the profile's; none without a cluster."""
        profile = self.shared.profile
        if not self.shared.on_cluster:
            return {}
        return {
            "slurm_partition": lambda wildcards: self.of(run_of(wildcards)).partition or profile["gpu_partition"],
            "slurm_account": lambda wildcards: self.of(run_of(wildcards)).account or profile["slurm_account"],
        }


def _tasks(ranks: int) -> int:
    return max(2, ranks)


def _cpus_per_task(cores: int, ranks: int) -> int:
    return -(-cores // _tasks(ranks))
