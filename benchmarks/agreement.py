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
import hashlib
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa.bridge import process
from megaboa.files import append_line
from megaboa.observe.steps import add_routing, read_events, step_rows, table_of
from megaboa.paths import RunFolder, RunStore
from megaboa.records import AgreementCheck, ReportSpec, read
from megaboa.report.checks import agreement_checks
from megaboa.report.runs import RunResult
from megaboa.scheduler.ranks import ReservedPort, rank_environment

MODULES = ("recipes.common", "training.gpt_step", "training.pretrain", "training.checkpointing")


def jitter(model: list[Any], seed: int) -> None:
    """The same on every rank that holds a copy of a parameter, as it depends on the parameter's name alone."""
    import torch

    for chunk in model:
        for name, weight in chunk.named_parameters():
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            ulps = torch.randint(-1, 2, weight.shape, generator=generator).to(weight.dtype)
            with torch.no_grad():
                weight.copy_(torch.where(ulps == 0, weight, torch.nextafter(weight, ulps * torch.inf)))


def scale_experts(by: float) -> Callable[[list[Any]], None]:
    def scale(model: list[Any]) -> None:
        for chunk in model:
            for name, weight in chunk.named_parameters():
                if ".experts." in name:
                    weight.register_hook(lambda gradient: gradient * by)

    return scale


def drop_microbatch(model: list[Any]) -> None:
    """Every fourth backward pass of a rank is left out."""
    from megatron.core.pipeline_parallel import schedules

    backward, calls = schedules.backward_step, 0

    def forgetful(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return None if calls % 4 == 0 else backward(*arguments, **named)

    schedules.backward_step = forgetful


def keep_experts_to_own_tokens(model: list[Any]) -> None:
    """Gradients of the tokens of other ranks don't reach an expert."""
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
    """Every data parallel rank goes by its own gradients."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    _ParamAndGradBucketGroup.start_grad_sync = lambda self, *arguments, **named: None


def keep_norms(model: list[Any]) -> None:
    """Every tensor parallel rank goes by its own gradients of the norms, of which each sees a part of the sequence."""
    from megatron.core.distributed import finalize_model_grads

    sys.modules[finalize_model_grads.__module__]._allreduce_non_tensor_model_parallel_grads = lambda *given: None


# What is wrong, in which run, and what makes it so on every rank before the first step.
MISTAKES: dict[str, tuple[str, Callable[[list[Any]], None]]] = {
    "gradients of the experts times 1.01": ("moe-ep2", scale_experts(1.01)),
    "gradients of the experts times 2": ("moe-ep2", scale_experts(2.0)),
    "one microbatch in four dropped": ("moe-ep2", drop_microbatch),
    "experts' gradients not reduced over ep ranks": ("moe-ep2", keep_experts_to_own_tokens),
    "gradients not reduced over dp ranks": ("dp2", keep_gradients),
    "norms' gradients not reduced over tp ranks": ("tp2-sp", keep_norms),
}


def start() -> None:
    """Import everything that a rank needs; from here on `train` forks it."""
    process.prepare("cpu", int(os.environ.get("OMP_NUM_THREADS", "1")))
    for name in MODULES:
        importlib.import_module(f"megatron.bridge.{name}")


def be_a_rank(who: dict[str, str], folder: RunFolder, store: RunStore, seed: int, mistake: str | None) -> None:
    os.environ |= who
    attempt = store.attempt(1)
    with attempt.log(int(who["RANK"])).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from megatron.bridge.training import pretrain as bridge
    from megatron.bridge.training.callbacks import Callback

    from megaboa.bridge import train

    class Change(Callback):
        def on_train_start(self, context: Any) -> None:
            if seed:
                jitter(context.model, seed)
            if mistake:
                MISTAKES[mistake][1](context.model)

    pretrain = bridge.pretrain

    def changed(config: Any, forward_step: Any, callbacks: list[Any]) -> None:
        pretrain(config, forward_step, callbacks=[Change(), *callbacks])

    bridge.pretrain, changed.__module__ = changed, pretrain.__module__
    folder.launch.checkpoint["save_interval"] = 0
    folder.launch.trackers["tensorboard"] = False
    folder.run.training["eval_iters"] = 0
    wanted = argparse.Namespace(claim=0, resume_from=0, parent=None, capture=False, skip=[])
    train.train(folder, store, attempt, wanted)
    os._exit(0)


def train(path: Path, seed: int = 0, mistake: str | None = None) -> RunResult:
    """A run of the experiment, trained here and now."""
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
            ranks.append(context.Process(target=be_a_rank, args=(who, folder, store, seed, mistake)))
            ranks[-1].start()
        for one in ranks:
            one.join()
        port.close()
        if any(one.exitcode for one in ranks):
            raise RuntimeError(f"{path.name} failed:\n{store.attempt(1).log(0).read_text()[-3000:]}")
        rows = add_routing(step_rows(read_events(store)), store)
    return RunResult(folder.name, {}, "PASS", summary={}, steps=table_of(rows).to_pandas())


class Protocol:
    """Trains what is asked for, and judges it by the experiment's agreements."""

    def __init__(self, results: Path, out: Path | None = None):
        self.results, self.out = results, out
        self.agreements = read(ReportSpec, results / "specs" / "report.json").agreements
        self._trained: dict[tuple[str, int, str | None], RunResult] = {}

    def trained(self, name: str, seed: int, mistake: str | None = None) -> RunResult:
        key = (name, seed, mistake)
        if key not in self._trained:
            self._trained[key] = run = train(self.results / "runs" / name, seed, mistake)
            if self.out:
                line = {"run": name, "seed": seed, "mistake": mistake, "steps": json.loads(run.steps.to_json())}
                with self.out.open("a") as stream:
                    stream.write(json.dumps(line) + "\n")
        return self._trained[key]

    def check(self, name: str, seed: int, mistake: str | None = None) -> AgreementCheck:
        """Of a run, against its reference with the same seed and no mistake."""
        [agreement] = [one for one in self.agreements if name in one.runs]
        runs = [self.trained(agreement.reference, seed), self.trained(name, seed, mistake)]
        [check] = agreement_checks([replace(agreement, runs=(name,))], runs)
        return check

    @property
    def runs(self) -> list[str]:
        return [name for agreement in self.agreements for name in agreement.runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of an experiment whose data and models are made")
    parser.add_argument("--seeds", type=int, default=0, help="how many")
    parser.add_argument("--from-seed", type=int, default=1, help="the first one; 0 moves nothing")
    parser.add_argument("--runs", nargs="*", help="default: all that must agree with another")
    parser.add_argument("--mistakes", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    start()
    protocol = Protocol(arguments.results, arguments.out)
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


if __name__ == "__main__":
    main()
