"""Do layouts agree where rounding differs, and do they disagree where something is wrong?

    snakemake preflight data import --profile profiles/local     # once: what the default experiment's runs read
    python benchmarks/agreement.py results/tiny --seeds 20       # every one must pass
    python benchmarks/agreement.py results/tiny --mistakes       # every one must fail

Every run is trained by the real ranks, forked from one process that has imported Bridge, and judged by the report's
own check with the experiment's own tolerances. A seed moves each weight that all its runs begin with by one unit in the
last place, up, down, or not at all; 0 moves nothing. A mistake is made in the ranks of one run: see MISTAKES. With
`--out` every curve is kept, one JSON line a run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

import pandas as pd

from megaboa.bridge import process
from megaboa.files import append_line
from megaboa.observe.steps import add_routing, read_events, step_rows, table_of
from megaboa.paths import RunFolder
from megaboa.records import AgreementCheck, AgreementSpec, ReportSpec, read
from megaboa.report.agreement import agreement_checks
from megaboa.report.runs import RunResult
from megaboa.scheduler.ranks import ReservedPort, rank_environment
from megaboa.store_paths import RunStore

TWINS = 1000  # noise of a twin is numbered from here, that of a seed below
MODULES = ("recipes.common", "training.gpt_step", "training.pretrain", "training.checkpointing")


def scale_experts(by: float) -> Callable[[list[Any]], None]:
    def scale(model: list[Any]) -> None:
        for chunk in model:
            for name, weight in chunk.named_parameters():
                if ".experts." in name:
                    weight.register_hook(lambda gradient: gradient * by)

    return scale


def drop_microbatch(model: list[Any]) -> None:
    """Drop every fourth backward pass of a rank."""
    from megatron.core.pipeline_parallel import schedules

    backward, calls = schedules.backward_step, 0

    def forgetful(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return None if calls % 4 == 0 else backward(*arguments, **named)

    schedules.backward_step = forgetful


def keep_experts_to_own_tokens(model: list[Any]) -> None:
    """Drop the gradients of other ranks' tokens in an expert."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    combine = MoEAlltoAllTokenDispatcher.token_combine

    def own_alone(self: Any, hidden_states: Any, *arguments: Any, **named: Any) -> Any:
        splits, rank = [int(size) for size in self.output_splits], self.ep_group.rank()
        begin, end = sum(splits[:rank]), sum(splits[: rank + 1])

        def forget(gradient: Any) -> Any:
            kept = gradient.clone()
            kept[:begin], kept[end:] = 0.0, 0.0
            return kept

        if hidden_states.requires_grad:
            hidden_states.register_hook(forget)
        return combine(self, hidden_states, *arguments, **named)

    MoEAlltoAllTokenDispatcher.token_combine = own_alone


def keep_gradients(model: list[Any]) -> None:
    """Let every data parallel rank train with its own gradients."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    _ParamAndGradBucketGroup.start_grad_sync = lambda self, *arguments, **named: None


def keep_norms(model: list[Any]) -> None:
    """Let every tensor parallel rank use its own gradients of the norms, each from a part of the sequence."""
    from megatron.core.distributed import finalize_model_grads

    sys.modules[finalize_model_grads.__module__]._allreduce_non_tensor_model_parallel_grads = lambda *given: None


def _named(model: list[Any], *pieces: str) -> Any:
    """The first weight whose name contains all of these."""
    named = (one for chunk in model for one in chunk.named_parameters())
    return next(weight for name, weight in named if all(piece in name for piece in pieces))


def sum_twice(model: list[Any]) -> None:
    """Double the gradient of one layer's projection to queries, keys and values."""
    _named(model, "layers.1.", "linear_qkv.weight").register_hook(lambda gradient: gradient + gradient)


def keep_one_norm(model: list[Any]) -> None:
    """Let every tensor parallel rank use its own gradients of one norm: that before one layer's attention."""
    from megatron.core.distributed import finalize_model_grads

    module = sys.modules[finalize_model_grads.__module__]
    reduce, weight = module._allreduce_non_tensor_model_parallel_grads, _named(model, "layers.1.", "norm")

    def all_but_one(*given: Any) -> None:
        own = weight.main_grad.clone()
        reduce(*given)
        weight.main_grad.copy_(own)

    module._allreduce_non_tensor_model_parallel_grads = all_but_one


def scale_by_dp(model: list[Any]) -> None:
    """Sum gradients over data parallel ranks instead of averaging them."""
    for chunk in model:
        for group in chunk.bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor *= 2


def swap_shards(model: list[Any]) -> None:
    """Swap one weight's shards between two tensor parallel ranks."""
    import torch
    from megatron.core import parallel_state

    weight, group = _named(model, "layers.1.", "linear_fc2.weight"), parallel_state.get_tensor_model_parallel_group()
    pieces = [torch.empty_like(weight) for _ in range(2)]
    torch.distributed.all_gather(pieces, weight.detach().contiguous(), group=group)
    with torch.no_grad():
        weight.copy_(pieces[1 - group.rank()])


def draw_by_rank(model: list[Any]) -> None:
    """Let the second tensor parallel rank initialize its shard of one weight from other random numbers."""
    import torch
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_rank() == 1:
        weight = _named(model, "layers.0.", "linear_fc1.weight")
        with torch.no_grad():
            weight.normal_(0, float(weight.std()), generator=torch.Generator().manual_seed(1))


def scale_rate(model: list[Any]) -> None:
    """Raise the learning rate by 1%."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rate = OptimizerParamScheduler.get_lr
    OptimizerParamScheduler.get_lr = lambda self, group: 1.01 * rate(self, group)


# By description: the run, and the change that each rank makes before the first step.
MISTAKES: dict[str, tuple[str, Callable[[list[Any]], None]]] = {
    "gradients of the experts times 1.01": ("moe-ep2", scale_experts(1.01)),
    "gradients of the experts times 2": ("moe-ep2", scale_experts(2.0)),
    "one microbatch in four dropped": ("moe-ep2", drop_microbatch),
    "experts' gradients not reduced over ep ranks": ("moe-ep2", keep_experts_to_own_tokens),
    "gradients not reduced over dp ranks": ("dp2", keep_gradients),
    "norms' gradients not reduced over tp ranks": ("tp2-sp", keep_norms),
    "one layer's norm not reduced over tp ranks": ("tp2-sp", keep_one_norm),
    "one layer's gradient summed twice": ("dp2", sum_twice),
    "gradients summed over dp ranks, not averaged": ("dp2", scale_by_dp),
    "two tp ranks' shards swapped": ("tp2-sp", swap_shards),
    "one weight drawn by tp rank": ("tp2-sp", draw_by_rank),
    "learning rate 1% too high": ("pp2", scale_rate),
}


def start() -> None:
    """Import everything that a rank needs; `train` then forks this process."""
    process.prepare("cpu", int(os.environ.get("OMP_NUM_THREADS", "1")))
    for name in MODULES:
        importlib.import_module(f"megatron.bridge.{name}")


def be_a_rank(
    who: dict[str, str], folder: RunFolder, store: RunStore, seed: int, mistake: str | None, twin: int
) -> None:
    os.environ |= who
    attempt = store.attempt(1)
    with attempt.log(int(who["RANK"])).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from megatron.bridge.training import pretrain as bridge
    from megatron.bridge.training.callbacks import Callback

    from megaboa.bridge import train, training
    from megaboa.bridge.nudge import nudge

    class Change(Callback):
        def on_train_start(self, context: Any) -> None:
            if seed:
                nudge(context.model, seed)
            if twin:
                nudge(context.model, TWINS + twin)
            if mistake:
                MISTAKES[mistake][1](context.model)

    pretrain = bridge.pretrain

    def changed(config: Any, forward_step: Any, callbacks: list[Any]) -> None:
        pretrain(config, forward_step, callbacks=[Change(), *callbacks])

    bridge.pretrain, changed.__module__ = changed, pretrain.__module__
    folder.launch.checkpoint["save_interval"] = 0
    folder.launch.trackers["tensorboard"] = False
    folder.run.training["eval_iters"] = 0
    words = [f"--run={folder.path}", f"--store={store.path}", f"--attempt={attempt.path}"]
    training.train(training.Rank(folder, store, attempt, train.arguments(words)))
    os._exit(0)


def train(path: Path, seed: int = 0, mistake: str | None = None, twin: int = 0) -> RunResult:
    """Train a run of the experiment in this call."""
    folder = RunFolder(path)
    world_size = folder.run.world_size
    context, port = multiprocessing.get_context("fork"), ReservedPort()
    with tempfile.TemporaryDirectory(prefix="agreement-") as place:
        store = RunStore(Path(place))
        store.attempt(1).path.mkdir(parents=True)
        append_line(store.ledger, json.dumps({"event": "start", "attempt": 1}))
        ranks = []
        for rank in range(world_size):
            who = rank_environment(rank, rank, world_size, "127.0.0.1", port.number)
            ranks.append(context.Process(target=be_a_rank, args=(who, folder, store, seed, mistake, twin)))
            ranks[-1].start()
        for one in ranks:
            one.join()
        port.close()
        if any(one.exitcode for one in ranks):
            raise RuntimeError(f"{path.name} failed:\n{store.attempt(1).log(0).read_text()[-3000:]}")
        rows = add_routing(step_rows(read_events(store)), store)
    return RunResult(folder.name, {}, "PASS", summary={}, steps=table_of(rows).to_pandas())


class Protocol:
    """Trains runs as needed, and judges them by the experiment's agreements."""

    def __init__(self, results: Path, out: Path | None = None, twins: int = 0):
        self.results, self.out, self.twins = results, out, twins
        self.agreements = read(ReportSpec, results / "specs" / "report.json").agreements
        self._trained: dict[tuple[str, int, str | None, int], RunResult] = {}

    def trained(self, name: str, seed: int, mistake: str | None = None, twin: int = 0) -> RunResult:
        key = (name, seed, mistake, twin)
        if key not in self._trained:
            self._trained[key] = run = train(self.results / "runs" / name, seed, mistake, twin)
            if self.out:
                line = {"run": name, "seed": seed, "mistake": mistake, "twin": twin}
                line["steps"] = json.loads(run.steps.to_json())
                with self.out.open("a") as stream:
                    stream.write(json.dumps(line) + "\n")
        return self._trained[key]

    def check(self, name: str, seed: int, mistake: str | None = None) -> AgreementCheck:
        """Check a run against its reference with the same seed and without a mistake."""
        agreement = self.agreement_of(name)
        twins = [self.trained(agreement.reference, seed, twin=twin + 1) for twin in range(self.twins)]
        return judge(agreement, self.trained(name, seed, mistake), self.trained(agreement.reference, seed), twins)

    def agreement_of(self, name: str) -> AgreementSpec:
        [agreement] = [one for one in self.agreements if name in one.runs]
        return agreement

    def crossed(self, curves: Path) -> Iterator[tuple[str, str | None, AgreementCheck]]:
        """Check the curves of an earlier call: each against its reference, once for every group of twins.

        References of other seeds serve as twins: their initial weights differ by units in the last place.
        """
        found: dict[tuple[str, int, str | None], RunResult] = {}
        for line in map(json.loads, curves.open()):
            if not line.get("twin"):
                steps = pd.DataFrame(line["steps"]).reset_index(drop=True)
                found[line["run"], line["seed"], line["mistake"]] = RunResult(
                    line["run"], {}, "PASS", summary={}, steps=steps
                )
        for (name, seed, mistake), run in found.items():
            if name not in self.runs:
                continue
            agreement = self.agreement_of(name)
            references = {one: two for (who, one, _), two in found.items() if who == agreement.reference}
            others = [one for one in sorted(references) if one != seed]
            firsts = range(0, len(others) - self.twins + 1, self.twins) if self.twins else [0]
            for first in firsts:
                twins = [references[one] for one in others[first : first + self.twins]]
                yield name, mistake, judge(agreement, run, references[seed], twins)

    @property
    def runs(self) -> list[str]:
        return [name for agreement in self.agreements for name in agreement.runs]


def judge(agreement: AgreementSpec, run: RunResult, reference: RunResult, twins: list[RunResult]) -> AgreementCheck:
    twins = [replace(twin, name=f"twin{number}") for number, twin in enumerate(twins)]
    asked = replace(agreement, runs=(run.name,), twins=tuple(twin.name for twin in twins))
    [check] = agreement_checks([asked], [reference, run, *twins])
    return check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of an experiment whose data and models are made")
    parser.add_argument("--seeds", type=int, default=0, help="how many")
    parser.add_argument("--from-seed", type=int, default=1, help="the first one; 0 moves nothing")
    parser.add_argument("--runs", nargs="*", help="default: all that must agree with another")
    parser.add_argument("--mistakes", action="store_true")
    parser.add_argument("--twins", type=int, default=0, help="of every reference, to measure rounding by")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--crossed", type=Path, help="train nothing, and judge the curves that --out has written")
    arguments = parser.parse_args()
    protocol = Protocol(arguments.results, arguments.out, arguments.twins)
    if arguments.crossed:
        sys.exit(print_crossed(protocol.crossed(arguments.crossed)))
    start()
    wanted = [
        (name, seed, None)
        for seed in range(arguments.from_seed, arguments.from_seed + arguments.seeds)
        for name in arguments.runs or protocol.runs
    ]
    if arguments.mistakes:
        wanted += [(name, arguments.from_seed, mistake) for mistake, (name, _) in MISTAKES.items()]
    wrong = 0
    for name, seed, mistake in wanted:
        check = protocol.check(name, seed, mistake)
        wrong += (check.state == "PASS") == bool(mistake)
        numbers = f"{check.max_difference:.1e}  {check.max_grad_norm:.1e}  {check.exact_steps:2}"
        print(f"{name:8} {seed:3}  {check.state}  {numbers}  {mistake or '-'}: {check.detail}", flush=True)
    print(f"{len(wanted) - wrong} of {len(wanted)} verdicts are as they should be")
    sys.exit(wrong > 0)


def print_crossed(checks: Iterable[tuple[str, str | None, AgreementCheck]]) -> bool:
    """A line for each run and mistake; whether one of the verdicts is wrong."""
    found: dict[tuple[str, str | None], list[AgreementCheck]] = {}
    for name, mistake, check in checks:
        found.setdefault((name, mistake), []).append(check)
    wrong = 0
    for (name, mistake), of_run in found.items():
        verdicts = Counter(check.verdict for check in of_run)
        wrong += sum((check.state == "PASS") == bool(mistake) for check in of_run)
        listed = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
        begins = [check.beyond_at for check in of_run if check.beyond_at]
        steps = f"; beyond rounding from step {min(begins)} to {max(begins)}" if begins else ""
        print(f"{name:8}  {mistake or '-'}: {listed}{steps}")
    return wrong > 0


if __name__ == "__main__":
    main()
