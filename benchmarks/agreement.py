"""Do layouts agree where rounding differs, and do they disagree where something is wrong?

    snakemake preflight data import --profile profiles/local     # once: what the default experiment's runs read
    python benchmarks/agreement.py results/tiny --seeds 20 --out seeds.jsonl
    python benchmarks/agreement.py results/tiny --mistakes --out mistakes.jsonl

Every run is trained by the real ranks, forked from one process that has imported Bridge. A seed moves each weight that a
run begins with by one unit in the last place, up, down, or not at all. A mistake is made in the ranks: see MISTAKES.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa.bridge import process
from megaboa.files import read_jsonl
from megaboa.launch.environment import ReservedPort, rank_environment
from megaboa.results import AttemptFolder, RunFolder, RunStore


def jitter(model: list[Any], seed: int) -> None:
    """The same on every rank that holds a copy of a parameter, as it depends on the parameter's name alone."""
    import torch

    for name, weight in parameters(model):
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        ulps = torch.randint(-1, 2, weight.shape, generator=generator).to(weight.dtype)
        with torch.no_grad():
            weight.copy_(torch.where(ulps == 0, weight, torch.nextafter(weight, ulps * torch.inf)))


def parameters(model: list[Any]) -> Iterator[tuple[str, Any]]:
    for chunk in model:
        yield from chunk.named_parameters()


def scale_gradients(model: list[Any], words: str, by: float) -> None:
    for name, weight in parameters(model):
        if words in name:
            weight.register_hook(lambda gradient: gradient * by)


def experts_by(by: float) -> Callable:
    return lambda model: scale_gradients(model, ".experts.", by)


MISTAKES: dict[str, Callable[[list[Any]], None]] = {
    "expert gradients x 1.01": experts_by(1.01),
    "expert gradients x 2": experts_by(2.0),
}


def forget_microbatch(forward_step: Callable) -> Callable:
    """The gradient of every fourth microbatch is lost; the loss that is logged is not."""
    calls = 0

    @functools.wraps(forward_step)
    def forgetful(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        output, loss_function = forward_step(*arguments, **named)

        def without_gradient(*given: Any, **more: Any) -> Any:
            loss, *rest = loss_function(*given, **more)
            return (loss * 0.0, *rest)

        return output, without_gradient if calls % 4 == 0 else loss_function

    return forgetful


def forget_other_ranks() -> None:
    """Gradients of the tokens that came from other ranks don't reach the experts."""
    from megatron.core.tensor_parallel.mappings import _AllToAll

    backward = _AllToAll.backward

    def own_alone(ctx: Any, gradient: Any) -> Any:
        result = backward(ctx, gradient)
        if ctx.group.size() > 1 and ctx.output_split_sizes is not None:
            print("split", ctx.output_split_sizes, ctx.input_split_sizes, file=sys.stderr)
        return result

    _AllToAll.backward = staticmethod(own_alone)


def rank(who: dict[str, str], path: Path, store: Path, seed: int, mistake: str | None) -> None:
    os.environ |= who
    with (store / f"rank-{who['RANK']}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from megatron.bridge.training import pretrain as bridge
    from megatron.bridge.training.callbacks import Callback

    from megaboa.bridge import train

    capture = {}

    class Change(Callback):
        def on_train_start(self, context: Any) -> None:
            if seed:
                jitter(context.model, seed)
            if mistake in MISTAKES:
                MISTAKES[mistake](context.model)
            import torch
            for chunk in context.model:
                for name, module in chunk.named_modules():
                    if name.endswith(".router"):
                        original = module.routing

                        def routing(logits, *a, original=original, layer=module.layer_number, module=module, **k):
                            out = original(logits, *a, **k)
                            if torch.is_grad_enabled():
                                flat = logits.detach().reshape(-1, logits.shape[-1])
                                s = flat.sort(dim=-1, descending=True).values
                                m = (s[:, module.topk - 1] - s[:, module.topk])
                                capture.setdefault((self.step, layer), []).append((out[1].clone(), m))
                            return out

                        module.routing = routing

        def on_train_step_start(self, context: Any) -> None:
            self.step = int(context.state.train_state.step) + 1

        def on_train_end(self, context):
            import torch
            torch.save(capture, os.environ["CAPTURE"] + f".{who['RANK']}") if "CAPTURE" in os.environ and capture else None

    pretrain = bridge.pretrain

    @functools.wraps(pretrain)
    def changed(config: Any, forward_step: Callable, callbacks: list[Any]) -> None:
        if mistake == "a microbatch's gradient is lost":
            forward_step = forget_microbatch(forward_step)
        pretrain(config, forward_step, callbacks=[Change(), *callbacks])

    bridge.pretrain = changed
    folder = RunFolder(path)
    folder.launch["checkpoint"]["save_interval"] = 0
    folder.launch["trackers"] = {"tensorboard": False}
    folder.run["training"]["eval_iters"] = 0
    wanted = argparse.Namespace(claim=0, resume_from=0, parent=None, capture=False, skip=[])
    train.train(folder, RunStore(store), AttemptFolder(store), wanted)
    os._exit(0)


def run(path: Path, seed: int = 0, mistake: str | None = None) -> list[dict[str, Any]]:
    """The events of one run's steps."""
    world_size = RunFolder(path).run["world_size"]
    context, port = multiprocessing.get_context("fork"), ReservedPort()
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        started = []
        for number in range(world_size):
            who = rank_environment(number, number, world_size, "127.0.0.1", port.number)
            started.append(context.Process(target=rank, args=(who, path, Path(folder), seed, mistake)))
            started[-1].start()
        for one in started:
            one.join()
        port.close()
        if any(one.exitcode for one in started):
            sys.exit(f"{path.name}: a rank failed\n{Path(folder, 'rank-0.log').read_text()[-3000:]}")
        return [event for event in read_jsonl(AttemptFolder(Path(folder)).steps) if event["event"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--runs", nargs="*", default=["dp2", "tp2-sp", "pp2", "cp2", "moe-ep2"])
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 20])
    parser.add_argument("--mistake")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    process.prepare("cpu", int(os.environ.get("OMP_NUM_THREADS", "1")))
    import importlib

    for name in ("recipes.common", "training.gpt_step", "training.pretrain", "training.checkpointing"):
        importlib.import_module(f"megatron.bridge.{name}")
    for seed in range(*arguments.seeds):
        for name in arguments.runs:
            begin = time.time()
            os.environ["CAPTURE"] = str(arguments.out) + f".{name}.{seed}.{arguments.mistake}".replace(" ", "_")
            events = run(arguments.results / "runs" / name, seed, arguments.mistake)
            line = {"run": name, "seed": seed, "mistake": arguments.mistake, "loss": [e["loss"] for e in events]}
            line["grad_norm"] = [e["grad_norm"] for e in events]
            with arguments.out.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
            print(name, seed, f"{time.time() - begin:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
