"""Resources of the workflow's jobs on a machine or a cluster: values for `resources:` in Snakemake's rules.

Values that depend on a run or a model are functions of the job's wildcards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from megaboa.config.models.resources import Resources
from megaboa.paths import RunFolder
from megaboa.plan.plan import Run
from megaboa.plan.shared import Shared
from megaboa.run.recovery import wall_seconds
from megaboa.scheduler.answers import Excess, Request, Size, UnreachableError, Where
from megaboa.scheduler.registry import cluster

Asked = dict[str, Any]  # resource -> value, or function of the wildcards


class JobResources:
    def __init__(self, shared: Shared, submits: bool):
        """`submits`: whether this process submits jobs; otherwise it is a job itself."""
        self.plan, self.shared, self.submits = shared.plan, shared, submits
        self.on_gpus = shared.plan.experiment.device == "cuda"

    def of(self, run: str) -> Resources:
        """The resources of a run in the experiment."""
        return self.shared.runs[run].config.resources

    def cores(self, run: str) -> int:
        """Cores of a run's ranks on one node."""
        return self.of(run).gpus_per_node * self.of(run).cpus_per_rank

    def training(
        self, rule: str, spares: bool = False, run_of: Callable[[Any], str] = lambda wildcards: wildcards.run
    ) -> Asked:
        """One allocation for all ranks of a run. `spares`: plus the nodes that can replace others."""

        def nodes(run: str) -> int:
            return self.of(run).nodes + (self.of(run).spare_nodes if spares else 0)

        def asked_for(wildcards: Any) -> Resources:
            return self.of(run_of(wildcards))

        def size(wildcards: Any) -> Size:
            asked = asked_for(wildcards)
            return Size(nodes(run_of(wildcards)), asked.gpus_per_node, self.cores(run_of(wildcards)))

        return {
            "mem_mb": lambda wildcards: asked_for(wildcards).mem_mb_per_rank * asked_for(wildcards).gpus_per_node,
            "runtime": lambda wildcards: asked_for(wildcards).runtime,
            # Without a scheduler two runs would both take this machine's first GPU: profiles/local lets one in at a
            # time.
            "gpu_machine": int(self.on_gpus),
            "gpus_in_flight": lambda wildcards: nodes(run_of(wildcards)) * asked_for(wildcards).gpus_per_node,
            **cluster().resources(
                size,
                self._where(run_of),
                lambda wildcards: self.options(run_of(wildcards), rule, spares),
                (lambda wildcards: asked_for(wildcards).gpus_per_node) if self.on_gpus else None,
                self.shared.profile,
            ),
        }

    def request(self, run: str) -> Request:
        """What the job that trains a run asks for."""
        asked, where = self.of(run), self._where(lambda name: name)
        exclusive = self.shared.profile.get("gpu_option") == "exclusive"  # the scheduler knows of no GPUs there
        return Request(
            where(run) if where else Where(None, None),
            nodes=asked.nodes + asked.spare_nodes,
            cores=self.cores(run),
            mem_mb=asked.mem_mb_per_rank * asked.gpus_per_node,
            seconds=wall_seconds(asked.runtime),
            gpus=asked.gpus_per_node if self.on_gpus and not exclusive else 0,
            spares=asked.spare_nodes,
        )

    def excesses(self, runs: Collection[str]) -> dict[Excess, list[str]]:
        """What the cluster doesn't grant to jobs that train these runs, as far as it can be asked, and to which."""
        if not runs or not self.shared.on_cluster:
            return {}
        alike: dict[Request, list[str]] = {}
        wanted = {*runs}
        for run in (name for name in self.shared.runs if name in wanted):  # in the order of the plan
            alike.setdefault(self.request(run), []).append(run)
        try:
            found = cluster().excesses(list(alike))
        except UnreachableError:  # then the scheduler says it of each job
            return {}
        named: dict[Excess, list[str]] = {}
        for asked, too_much in zip(alike, found, strict=True):
            for one in too_much:
                named.setdefault(one, []).extend(alike[asked])
        return named

    def trials(self, rule: str) -> Asked:
        """One allocation for all trials of `snakemake tune`, which have the same ranks as the user's run."""
        return self.training(rule, run_of=lambda wildcards: self.shared.plan.runs[0].name)

    @property
    def calibrated(self) -> str:
        """The run whose allocation is used for calibration: with the most GPUs per node, preferably on several nodes,
        but on as few as possible."""

        def worth(run: Run) -> tuple[int, int, int]:
            asked = run.config.resources
            return asked.gpus_per_node, min(asked.nodes, 2), -asked.nodes

        return max(self.shared.plan.runs, key=worth).name

    def calibration(self, rule: str) -> Asked:
        return self.training(rule, run_of=lambda wildcards: self.calibrated)

    def options(self, run: str, rule: str, spares: bool = False) -> str:
        """Further scheduler options for a run: the jobs that it waits for, and the user's own."""
        asked = self.of(run)
        waits = self.shared.on_cluster and self.submits  # a job would find itself
        return cluster().options(
            asked.slurm_extra,
            returns=True,
            after=RunFolder(self.shared.folder / "runs" / run) if waits else None,
            rule=rule,
            outlives=spares and asked.spare_nodes > 0,
        )

    def import_cores(self, model: str) -> int:
        """Cores of the ranks that import a model, on one node."""
        if self.plan.models[model].conversion.ranks == 1:
            return 1
        return self._import_ranks(model) * self.shared.first_run_of(model).config.resources.cpus_per_rank

    def imports(self) -> Asked:
        asked = self._conversion(lambda wildcards: self.shared.first_run_of(wildcards.model).name)
        return self._by_ranks(asked, self.shared.imported_models, lambda wildcards: wildcards.model)

    def exports(self) -> Asked:
        models = {self.shared.runs[run].model for run in self.plan.exports}
        asked = self._conversion(lambda wildcards: wildcards.run)
        return self._by_ranks(asked, models, lambda wildcards: self.shared.runs[wildcards.run].model)

    def _by_ranks(self, asked: Asked, models: Iterable[str], model_of: Callable[[Any], str]) -> Asked:
        """Resources for a conversion; several ranks get an allocation, as in training."""
        if all(self.plan.models[model].conversion.ranks == 1 for model in models):
            return asked

        def size(wildcards: Any) -> Size:
            model = model_of(wildcards)
            return Size(self.plan.models[model].conversion.nodes, self._import_ranks(model), self.import_cores(model))

        def gpus(wildcards: Any) -> int:
            return self._import_ranks(model_of(wildcards))

        asked |= cluster().resources(size, gpus=gpus if self.on_gpus else None, profile=self.shared.profile)
        if self.on_gpus:
            asked["gpus_in_flight"] = lambda wildcards: self.plan.models[model_of(wildcards)].conversion.ranks
        return asked

    def along(self) -> Asked:
        """Resources for exports of several checkpoints, and for their evaluations, if there are any."""
        asked, wanted = self.exports(), self.plan.experiment.evaluate
        return asked | self.evaluation() if wanted.command else asked

    def evaluation(self) -> Asked:
        """Resources for an evaluation: those of a conversion, plus the experiment's."""
        wanted = self.plan.experiment.evaluate
        return {**self._conversion(lambda wildcards: wildcards.run, wanted.slurm_extra), "runtime": wanted.runtime}

    def _import_ranks(self, model: str) -> int:
        """Ranks of a model's import on one node."""
        asked = self.plan.models[model].conversion
        return asked.ranks // asked.nodes

    def _conversion(self, run_of: Callable[[Any], str], own: str | None = None) -> Asked:
        """Resources of a conversion besides memory. `run_of`: the run for given wildcards; `own`: the user's options.

        A model for GPUs is built from Transformer Engine's modules, so even its conversion needs a GPU.
        """
        one_gpu = (lambda wildcards: 1) if self.on_gpus and self.shared.on_cluster else None
        asked = cluster().resources(
            where=self._where(run_of) if one_gpu else None,
            options=None if own is None else lambda wildcards: cluster().options(own),
            gpus=one_gpu,
            profile=self.shared.profile,
        )
        return {**({"gpu_machine": 1, "gpus_in_flight": 1} if self.on_gpus else {}), **asked}

    def _where(self, run_of: Callable[[Any], str]) -> Callable[[Any], Where] | None:
        """Partition and account of a run's training: the experiment's or the profile's; None without a cluster."""
        if not self.shared.on_cluster:
            return None
        usual = cluster().where(self.shared.profile)

        def where(wildcards: Any) -> Where:
            own = self.of(run_of(wildcards))
            return replace(
                usual,
                partition=own.partition or usual.partition,
                account=own.account or usual.account,
                constraint=own.constraint or usual.constraint,
                qos=own.qos or usual.qos,
            )

        return where
