"""Builds Bridge's configuration of some runs in a process of its own, as the CPU backend must come before Megatron.

`python configurations.py FOLDER`: FOLDER holds cases.json, {name: changes to the run}; the fields asked for are
printed as JSON; of a case that is `refused`, what the error says (`config`: other keys of the model's config). Of one
of `ranks`, after Bridge has written what its `comm_overlap` says; of one to `profile`, after Bridge has checked how it
is saved.
"""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import made

from megaboa.bridge.process import playing_rank_0_of, prepare
from megaboa.bridge.quiet import quietly
from megaboa.files import read_json, write_json
from megaboa.records import LaunchSpec, ModelSource, ProfileSpec, RunSpec, parse
from megaboa.store_paths import AttemptFolder, RunStore

MODEL = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 500}
RUN = {
    "model": {"name": "m", "init": "scratch"},
    "data": {"blend": {"text": 1.0}, "split": "90,5,5"},
    "training": {
        "train_iters": 6,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "seq_length": 64,
        "precision": "fp32",
    },
    "optimizer": {},
    "schedule": {},
    "parallel": {"tp": 1},
    "device": "cpu",
    "overrides": {},
}
CORPORA = {
    "text": made.corpus(made.dataset(prefix="/data/text", tokens=300)),
    "law": made.corpus(made.dataset(prefix="/data/law", tokens=50)),
    "talk": made.corpus(
        *(made.dataset(prefix=f"/data/talk-{part}", tokens=n) for part, n in (("a", 300), ("b", 100), ("c", 0)))
    ),
}
FIM = {"rate": 0.9, "spm_rate": 0.5, "split_sample": None, "fragment_rate": None, "no_prefix": None}
FIM["tokens"] = {part: f"<{part}>" for part in ("prefix", "middle", "suffix", "pad", "eod")}
CHECKPOINT = {"save_interval": None, "async_save": None, "keep_last": 3, "reshardable": True}
LAUNCH = {"checkpoint": CHECKPOINT, "num_workers": 2, "overrides": {}}


def main(folder):
    prepare("cpu")
    from transformers import AutoConfig

    from megaboa.bridge import configuration

    AutoConfig.for_model(**MODEL, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder / "hf")
    facts = {"digest": "1", "vocab_size": 1, "params": 1, "dtype": "float32", "device": "cpu"}
    source = ModelSource(name="m", path=str(folder / "hf"), **facts)
    inputs = configuration.Inputs(source, "tokenizer", None, CORPORA)
    store = RunStore(folder / "store" / "runs" / "tiny" / "dp2" / "0123456789ab")
    attempt = AttemptFolder(store.path / "attempts" / "02")
    found = {}
    for name, case in read_json(folder / "cases.json").items():
        asked = copy.deepcopy(RUN)
        for section, values in case["run"].items():
            asked[section] = values if section in ("data", "parent", "device") else asked[section] | values
        run = parse(RunSpec, asked, name)
        if "refused" in case:
            found[name] = why_refused(configuration, run, with_keys(inputs, folder / name, case.get("config")))
            continue
        config = configuration.build(run, inputs if run.has_source else configuration.Inputs(None, None, None, {}))
        launch = parse(LaunchSpec, LAUNCH | case.get("launch", {}), name)
        configuration.place(config, launch, store, attempt, None, folder / "cache")
        if profile := case.get("profile"):
            configuration.profile(config, parse(ProfileSpec, profile, name))
            config.checkpoint.finalize()
        if ranks := case.get("ranks"):
            with playing_rank_0_of(ranks):
                config.set_data_parallel_size()
            if config.comm_overlap:
                config.comm_overlap.finalize()
                config.comm_overlap.setup(config.model, config.optimizer, config.ddp)
        found[name] = {field: _read(config, field) for field in case["expected"]}
    return found


def with_keys(inputs, folder, keys):
    """The inputs with a model whose config.json has other keys."""
    if keys is None:
        return inputs
    write_json(folder / "config.json", read_json(Path(inputs.source.path) / "config.json") | keys)
    return replace(inputs, source=replace(inputs.source, path=str(folder)))


def why_refused(configuration, run, inputs):
    try:
        configuration.build(run, inputs)
    except Exception as error:
        return str(error)
    return None


def _read(config, field):
    value = config
    for part in field.split("."):
        value = getattr(value, part)
    return value if isinstance(value, int | float | str | list | tuple | dict | None) else str(value)


if __name__ == "__main__":
    with quietly():
        answer = main(Path(sys.argv[1]))
    print(json.dumps(answer))
