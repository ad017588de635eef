# ruff: noqa: E501 (one mistake a line reads better)
"""Every mistake that a user might make: the message names the key, the value or what is allowed, and a remedy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from indexed_files import write_indexed
from ordinary_user import as_ordinary_user

from megaboa.config import ConfigError, command_line, keys, load
from megaboa.plan import make_plan

GOOD = """\
experiment: good
device: cpu
tokenizers:
  bpe: {train_on: text, vocab_size: 512}
corpora:
  text: {source: python-stdlib}
models:
  dense:
    tokenizer: bpe
    config: {model_type: qwen3, hidden_size: 64}
training:
  train_iters: 10
"""


@dataclass(frozen=True)
class Mistake:
    """What is appended to a good file, or replaced in it; and what the message must say."""

    name: str
    key: str
    hints: tuple[str, ...]
    add: str = ""
    replace: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        return self.name


def mistake(name: str, key: str, *hints: str, add: str = "", replace: tuple[str, str] = ("", "")) -> Mistake:
    return Mistake(name, key, hints, add, replace)


OLD = "  text: {source: python-stdlib}\n"
OTHER = ("  text: {source: python-stdlib}\n", "  text: {source: python-stdlib}\n  other: {source: 'hf:org/other'}\n")
COPY = (OTHER[0], f"{OTHER[0]}  copy: {{source: [./python-stdlib, 'hf:org/other'], limit: 9}}\n")
ITERS = "  train_iters: 10\n"


def training(line: str) -> tuple[str, str]:
    return (ITERS, f"{ITERS}  {line}\n")


def resources(text: str) -> str:
    return f"resources: {{{text}}}\n"


def sweep(text: str) -> str:
    return f"sweep: {text}\n"


MISTAKES = [
    mistake("an option of sbatch that has a key", "resources.slurm_extra", "--constraint is set by the workflow", "set resources.constraint", add=resources("slurm_extra: --exclusive --constraint=h100")),
    mistake("misspelt key of a Hugging Face config", "models.dense.config.intermediate_sze", "unknown key in a config of qwen3", "did you mean 'intermediate_size'?", replace=("hidden_size: 64", "hidden_size: 64, intermediate_sze: 128")),
    mistake("misspelt key of a Hugging Face config in the sweep", "sweep.grid.models.dense.config.num_hidden_layrs", "did you mean 'num_hidden_layers'?", add=sweep("{grid: {models.dense.config.num_hidden_layrs: [1, 2]}}")),
    mistake("misspelt key in a part of a Hugging Face config", "models.dense.config.text_config.hidden_sze", "a config of gemma3_text", "did you mean 'hidden_size'?", replace=("{model_type: qwen3, hidden_size: 64}", "{model_type: gemma3, text_config: {hidden_sze: 64}}")),
    mistake("expression in a Hugging Face config", "models.dense.config.hidden_size", "'2 * 32' must be a whole number: a model's config takes no expressions", replace=("hidden_size: 64", "hidden_size: 2 * 32")),
    mistake("quoted number in a Hugging Face config", "models.dense.config.text_config.hidden_size", "'64' must be a whole number, without quotes", replace=("{model_type: qwen3, hidden_size: 64}", "{model_type: gemma3, text_config: {hidden_size: '64'}}")),
    mistake("text for a number of a Hugging Face config in the sweep", "sweep.grid.models.dense.config.hidden_size[1]", "'2 * 32' must be a whole number", add=sweep("{grid: {models.dense.config.hidden_size: [32, 2 * 32]}}")),
    mistake("text for a number of a Hugging Face config that is swept as a whole", "sweep.grid.models.dense.config[0]", "hidden_size: '64' must be a whole number, without quotes", add=sweep("{grid: {models.dense.config: [{model_type: llama, hidden_size: '64'}]}}")),
    mistake("key of another family", "models.dense.config.n_layer", "unknown key in a config of qwen3", replace=("hidden_size: 64", "n_layer: 2")),
    mistake("figure's column", "report.figures[0].y", "there is no column 'losss'; did you mean 'loss'", add="report: {figures: [{name: a, kind: line, data: steps, x: step, y: losss}]}\n"),
    mistake("column that is called otherwise", "report.figures[0].y", "there is no column 'final_loss'; did you mean 'loss.min', 'loss.last' or 'loss.first'? All columns are listed in docs/how-to/report.md", add="report: {figures: [{name: a, kind: bar, x: run, y: final_loss}]}\n"),
    mistake("figure's filter", "report.figures[0].filter", "there is no column 'modle'; did you mean 'model'", add="report: {figures: [{name: a, kind: bar, x: run, y: mfu, filter: {modle: x}}]}\n"),
    mistake("heat map without value", "report.figures[0]", "value is the column for a heat map's colours", add="report: {figures: [{name: a, kind: heat, x: lr, y: gbs}]}\n"),
    mistake("two figures of one name", "report.figures[1].name", "two figures are called 'a': rename one", add="report: {figures: [{name: a, kind: bar, x: run, y: mfu}, {name: a, kind: bar, x: run, y: steps}]}\n"),
    mistake("evaluation without placeholders", "evaluate.command", "lacks {model} and {out}", add="evaluate: {command: lm_eval}\n"),
    mistake("evaluation by no script", "evaluate.command", "there is no file 'no/eval.py' in /", add="evaluate: {command: 'python -u no/eval.py {model} {out}'}\nexport: {runs: all}\n"),
    mistake("evaluation of nothing", "evaluate.command", "export.runs", add="evaluate: {command: 'x {model} {out}'}\n"),
    mistake("secret for the ranks", "launch.environment", "HF_TOKEN is named like a secret", "export it in the shell", add="launch: {environment: {HF_TOKEN: abc}}\n"),
    mistake("secret for Bridge", "overrides.logger.comet_api_key", "is a secret", "environment variable", add="overrides: {logger.comet_api_key: abc}\n"),
    mistake("secret of the environment for Bridge", "overrides.logger.wandb_entity", "'${oc.env:HF_TOKEN}' holds `${`", "write the value itself", add="overrides: {logger.wandb_entity: '${oc.env:HF_TOKEN}'}\n"),
    mistake("secret of the environment inside a value", "overrides.logger.mlflow_tags", "'x-${oc.env:HF_TOKEN}' holds `${`", add="overrides: {logger.mlflow_tags: {a: [1, {b: 'x-${oc.env:HF_TOKEN}'}]}}\n"),
    mistake("secret of the environment in a name", "overrides.logger.mlflow_tags", "holds `${`", add="overrides: {logger.mlflow_tags: {'a:${oc.decode:x},b': 1}}\n"),
    mistake("another field's value", "overrides.logger.wandb_entity", "holds `${`", add="overrides: {logger.wandb_entity: '${model.hidden_size}'}\n"),
    mistake("secret of the environment behind backslashes", "overrides.logger.mlflow_tags", "holds `${`", add="overrides: {logger.mlflow_tags: {'k:$\\{oc.env\\:HF_TOKEN\\},z': 1}}\n"),
    mistake("secret of the environment, swept", "sweep.grid.overrides.logger.wandb_entity[1]", "holds `${`", add=sweep("{grid: {overrides.logger.wandb_entity: [a, '${oc.env:HF_TOKEN}']}}")),
    mistake("secret of the environment for a tracker", "trackers.wandb.entity", "'${oc.env:HF_TOKEN}' holds `${`", add="trackers: {wandb: {entity: '${oc.env:HF_TOKEN}'}}\n"),
    mistake("token in a repository's address", "image.bridge_source.repo", "holds a password or token", add=f"image: {{runtime: apptainer, path: here/x@sha256:{'0' * 64}, bridge_source: {{repo: 'https://t0ken@here/x', commit: {'a' * 40}}}}}\n"),
    mistake("option for a repository", "image.bridge_source.repo", "is an option of git", add=f"image: {{runtime: apptainer, path: here/x@sha256:{'0' * 64}, bridge_source: {{repo: '--upload-pack=x', commit: {'a' * 40}}}}}\n"),
    mistake("password in a tracking URI", "trackers.mlflow.tracking_uri", "MLFLOW_TRACKING_PASSWORD", add="trackers: {mlflow: {tracking_uri: 'http://me:abc@here'}}\n"),
    mistake("offline and a server", "trackers", "remove one", add="trackers: {offline: true, mlflow: {tracking_uri: 'http://here'}}\n"),
    mistake("an export of a run that saves nothing", "export.runs", "save_interval above 0", add="checkpoint: {save_interval: 0}\nexport: {runs: all}\n"),
    mistake("sgd with a distributed optimizer", "optimizer.name", "parallel.distributed_optimizer: false", add="optimizer: {name: sgd}\n"),
    # keys
    mistake("unknown section", "trainning", "did you mean 'training'", add="trainning: {seed: 1}\n"),
    mistake("unknown key", "training.global_batchsize", "did you mean 'global_batch_size'", replace=training("global_batchsize: 8")),
    mistake("key of a section whose name is similar", "train_iters", "did you mean 'training.train_iters'", add="train_iters: 5\n"),
    mistake("key of several sections", "seed", "did you mean 'training.seed'", add="seed: 5\n"),
    mistake("key of a sweep", "runs", "did you mean 'sweep.runs'", add="runs: {a: {training.seed: 1}}\n"),
    mistake("name with dots", "resources.gpus_per_node", "sweep: write `resources: {gpus_per_node: ...}`", add="resources.gpus_per_node: 1\n"),
    mistake("name with three parts", "checkpoint.local.every", "write `checkpoint: {local: {every: ...}}`", add="checkpoint.local.every: 1\n"),
    mistake("key that another section has, and this one nearly", "export.run", "did you mean 'runs'", add="export: {run: all}\n"),
    mistake("key of another section", "training.lr", "did you mean 'optimizer.lr'", replace=training("lr: 0.1")),
    mistake("short name as key", "parallel.tensor", "known: tp", add="parallel: {tensor: 2}\n"),
    mistake("key of a model", "models.dense.tokenizr", "did you mean 'tokenizer'", replace=("    tokenizer: bpe\n", "    tokenizer: bpe\n    tokenizr: bpe\n")),
    mistake("duplicate key", "training", "twice", "line 11", add="training: {seed: 1}\n"),
    mistake("key that is a number", "sweep.runs", "'1' is not text", "quotes", add="sweep: {runs: {1: {training.seed: 1}}}\n"),
    mistake("key that is a truth value", "parallel", "'on' is not text", add="parallel: {on: 1}\n"),
    mistake("no models", "models", "is missing", replace=("models:\n  dense:\n    tokenizer: bpe\n    config: {model_type: qwen3, hidden_size: 64}\n", "")),
    mistake("empty models", "models", "at least 1", replace=("models:\n  dense:\n    tokenizer: bpe\n    config: {model_type: qwen3, hidden_size: 64}\n", "models: {}\n")),
    mistake("empty section", "parallel", "is empty", add="parallel:\n"),
    mistake("list for a section", "parallel", "mapping", add="parallel: [tp, 2]\n"),
    mistake("bad name", "models.0dense", "letter", add="data: {num_workers: 0}\n", replace=("  dense:", "  0dense:")),
    # types and values
    mistake("text for a whole number", "parallel.tp", "'two'", "allowed: numbers", add="parallel: {tp: two}\n"),
    mistake("quoted number", "parallel.tp", "write 2 without quotes", add="parallel: {tp: '2'}\n"),
    mistake("fraction for a whole number", "parallel.tp", "1.5", "whole number", add="parallel: {tp: 1.5}\n"),
    mistake("truth value for a number", "parallel.tp", "true", "whole number", add="parallel: {tp: true}\n"),
    mistake("number for a truth value", "parallel.sp", "1", "true or false", add="parallel: {sp: 1}\n"),
    mistake("text for a truth value", "parallel.sp", "true or false, without quotes", add="parallel: {sp: 'true'}\n"),
    mistake("no", "parallel.sp", "write true or false", add="parallel: {sp: no}\n"),
    mistake("off", "checkpoint.async_save", "write true or false", add="checkpoint: {async_save: off}\n"),
    mistake("Yes in an override", "overrides.model.moe_permute_fusion", "write true or false", add="overrides: {model.moe_permute_fusion: Yes}\n"),
    mistake("octal", "training.seed", "010", "leading zeros", replace=training("seed: 010")),
    mistake("octal, the other way", "training.seed", "0o17", "octal", replace=training("seed: 0o17")),
    mistake("hexadecimal", "training.seed", "0x10", "decimal", replace=training("seed: 0x10")),
    mistake("base 60", "resources.runtime", "1:30", "base 60", add="resources: {runtime: 1:30}\n"),
    mistake("not a number", "optimizer.lr", ".nan", "finite", add="optimizer: {lr: .nan}\n"),
    mistake("not a number in the sweep", "sweep.runs.a.optimizer.lr", ".nan is not a finite number", add=sweep("{runs: {a: {optimizer.lr: .nan}}}")),
    mistake("infinite", "optimizer.lr", ".inf", "finite", add="optimizer: {lr: .inf}\n"),
    mistake("overflow", "optimizer.lr", "1e999", "finite", add="optimizer: {lr: 1e999}\n"),
    mistake("negative", "training.micro_batch_size", "-1", "greater than 0", replace=training("micro_batch_size: -1")),
    mistake("zero", "training.train_iters", "0", "greater than 0", replace=(ITERS, "  train_iters: 0\n")),
    mistake("negative learning rate", "optimizer.lr", "-0.001", "greater than 0", add="optimizer: {lr: -1e-3}\n"),
    mistake("beta of one", "optimizer.beta2", "less than 1", add="optimizer: {beta2: 1.0}\n"),
    mistake("misspelt choice", "training.precision", "did you mean 'bf16_mixed'", replace=training("precision: bf16_mixd")),
    mistake("choice in another case", "schedule.decay", "did you mean 'WSD'", add="schedule: {decay: wsd}\n"),
    mistake("no such choice", "device", "'tpu'", "allowed: cpu, cuda", replace=("device: cpu", "device: tpu")),
    mistake("another word for a choice", "device", "'gpu' is not allowed; did you mean 'cuda'?", replace=("device: cpu", "device: gpu")),
    mistake("number for text", "resources.partition", "17", "quotes", add="resources: {partition: 17}\n"),
    mistake("wall time", "resources.runtime", "'4 hours'", "4h", add="resources: {runtime: 4 hours}\n"),
    mistake("split in two parts", "data.split", "'90,10'", "98,1,1", add="data: {split: '90,10'}\n"),
    mistake("one for a list", "report.agreements", "list", add="report: {agreements: {reference: run}}\n"),
    mistake("missing in a list", "report.agreements[0].runs", "is missing", add="report: {agreements: [{reference: run}]}\n"),
    mistake("unknown profiler", "profile.tool", "did you mean 'pytorch'?", add="profile: {tool: pytorc}\n"),
    mistake("no such profiler", "profile.tool", "there is no file 'no.py'", add="profile: {tool: no.py}\n"),
    mistake("backward profile", "profile", "5 is not before 2", add="profile: {steps: [5, 2]}\n"),
    mistake("no such cause", "recovery.actions.node_failur", "did you mean 'node_failure'", add="recovery: {actions: {node_failur: stop}}\n"),
    mistake("no such action", "recovery.actions.hang", "'retry'", "allowed: stop, resume, requeue", add="recovery: {actions: {hang: retry}}\n"),
    mistake("negative budget", "recovery.budget", "-1", add="recovery: {budget: -1}\n"),
    mistake("no time without progress", "recovery.no_progress_minutes", "greater than 0", add="recovery: {no_progress_minutes: 0}\n"),
    mistake("a spike that is none", "recovery.loss_spike.factor", "greater than 1", add="recovery: {loss_spike: {factor: 1.0}}\n"),
    mistake("no such starter", "launch.starter", "'torchrun'", "allowed: auto, srun, local", add="launch: {starter: torchrun}\n"),
    mistake("no such network", "launch.network", "did you mean 'infiniband'", add="launch: {network: infiniban}\n"),
    mistake("text for srun's arguments", "launch.srun_args", "list", add="launch: {srun_args: --mpi=none}\n"),
    mistake("no name of a variable", "launch.environment", "'A;true' is not the name of a variable", "no digit first", add="launch: {environment: {'A;true': x}}\n"),
    mistake("number for a variable", "launch.environment.NCCL_DEBUG", "1", "quotes", add="launch: {environment: {NCCL_DEBUG: 1}}\n"),
    mistake("three steps", "profile.steps", "2 values", add="profile: {steps: [1, 2, 3]}\n"),
    mistake("small vocabulary", "tokenizers.bpe.vocab_size", "100", "260", replace=("512", "100")),
    # images
    mistake("an image without a runtime", "image", "path needs an image: set runtime to pyxis or apptainer", add="image: {path: a.sqsh}\n"),
    mistake("no such runtime", "image.runtime", "'enroot'", "allowed: none, pyxis, apptainer", add="image: {runtime: enroot}\n"),
    mistake("apptainer without an image", "image", "set path or build", add="image: {runtime: apptainer}\n"),
    mistake("an image by its tag", "image.path", "has no digest", "name@sha256:", add="image: {runtime: pyxis, path: 'nvcr.io/nvidia/pytorch:26.06-py3'}\n"),
    mistake("an image of the other runtime", "image.path", "set runtime to pyxis", add="image: {runtime: apptainer, path: a.sqsh}\n"),
    mistake("no such image", "image.path", "there is no image 'a.sif'", add="image: {runtime: apptainer, path: a.sif}\n"),
    mistake("no such Dockerfile", "image.build.file", "there is no file 'Dockerfile'", add="image: {runtime: pyxis, build: {file: Dockerfile}}\n"),
    mistake("no such context", "image.build.context", "there is no folder 'none'", add="image: {runtime: pyxis, build: {file: experiment.yaml, context: none}}\n"),
    mistake("not a Dockerfile", "image.build", "has no FROM", add="image: {runtime: pyxis, build: {file: experiment.yaml}}\n"),
    mistake("a mount without a target", "image.mounts[0]", "'/fsx'", "source:target", add=f"image: {{runtime: pyxis, path: 'x@sha256:{'0' * 64}', mounts: [/fsx]}}\n"),
    mistake("a mount of nothing", "image.mounts[0]", "there is no '/none-such' to mount as /x", add=f"image: {{runtime: pyxis, path: 'x@sha256:{'0' * 64}', mounts: ['/none-such:/x']}}\n"),
    mistake("a secret with its value", "image.secrets[0]", add=f"image: {{runtime: pyxis, path: 'x@sha256:{'0' * 64}', secrets: ['HF_TOKEN=hf_x']}}\n"),
    mistake("a branch of Bridge", "image.bridge_source.commit", "'main' is not a commit: give the full hash", add=f"image: {{runtime: pyxis, path: 'x@sha256:{'0' * 64}', bridge_source: {{repo: 'https://x/y', commit: main}}}}\n"),
    mistake("a short hash of Bridge", "image.bridge_source.commit", "full hash of 40 digits", add=f"image: {{runtime: pyxis, path: 'x@sha256:{'0' * 64}', bridge_source: {{repo: 'https://x/y', commit: abc1234}}}}\n"),
    mistake("a relative place for Bridge", "image.bridge_source.mount_as", "'opt'", "path of the checkout", add=f"image: {{runtime: pyxis, path: 'x@sha256:{'0' * 64}', bridge_source: {{repo: 'https://x/y', commit: '{'0' * 40}', mount_as: opt}}}}\n"),
    mistake("a swept profiler that is not there", "sweep.grid.profile.tool[1]", "there is no file 'no.py'", add="sweep: {grid: {profile.tool: [none, no.py]}}\n"),
    mistake("a sweep over evaluations", "sweep.runs.a.evaluate.command", "it isn't a property of a run", add="sweep: {runs: {a: {evaluate.command: x}}}\n"),
    mistake("a sweep over images", "sweep.grid.image.path", "all runs of an experiment share the image", add="sweep: {grid: {image.path: [a, b]}}\n"),
    # models, corpora, references and files
    mistake("two origins", "models.dense", "has both hf and config", replace=("    tokenizer: bpe\n", "    tokenizer: bpe\n    hf: org/name\n")),
    mistake("no origin", "models.other", "needs hf, config or recipe; none is given", add="model: dense\n", replace=("  dense:", "  other: {tokenizer: bpe}\n  dense:")),
    mistake("no model_type", "models.dense", "model_type", replace=("model_type: qwen3, ", "")),
    mistake("pretrained recipe", "models.dense", "pretrained needs hf or config", replace=("config: {model_type: qwen3, hidden_size: 64}", "recipe: vanilla_gpt_pretrain_config\n    init: pretrained")),
    mistake("args without recipe", "models.dense", "args belong to recipe", replace=("    tokenizer: bpe\n", "    tokenizer: bpe\n    args: {a: 1}\n")),
    mistake("misspelt model", "model", "did you mean 'dense'", add="model: dens\n"),
    mistake("misspelt corpus", "data.blend", "did you mean 'text'", add="data: {blend: txt}\n"),
    mistake("misspelt corpus in a blend", "data.blend", "did you mean 'text'", add="data: {blend: {tekst: 1}}\n"),
    mistake("blend of nothing", "data.blend", "mapping from corpora to weights", add="data: {blend: 3}\n"),
    mistake("weight of zero", "data.blend.text", "greater than 0", add="data: {blend: {text: 0}}\n"),
    mistake("blend of no corpus", "data.blend", "at least 1", add="data: {blend: {}}\n"),
    mistake("misspelt corpus of a split", "data.blend_per_split.valid", "did you mean 'text'", add="data: {blend_per_split: {train: text, valid: {txt: 1}}}\n"),
    mistake("misspelt corpus of a validation set", "data.validation_sets.law", "did you mean 'text'", add="data: {validation_sets: {law: tekst}}\n"),
    mistake("misspelt corpus in an axis", "sweep.grid.data.blend_per_split.train[1]", "did you mean 'text'", add=sweep("{grid: {data.blend_per_split.train: [text, txt]}}")),
    mistake("no blend to train on", "data.blend_per_split.train", "is missing", add="data: {blend_per_split: {valid: text}}\n"),
    mistake("misspelt split", "data.blend_per_split.validation", "did you mean 'valid'", add="data: {blend_per_split: {train: text, validation: text}}\n"),
    mistake("two kinds of blends", "data", "blend and blend_per_split are both set", "remove one", add="data: {blend: text, blend_per_split: {train: text}}\n"),
    mistake("split of blends per split", "data", "split shares out", "remove it", add="data: {split: '90,5,5', blend_per_split: {train: text}}\n"),
    mistake("two kinds of blends by a sweep", "data", "blend and blend_per_split are both set", add="data: {blend_per_split: {train: text}}\n" + sweep("{runs: {a: {data.blend: text}}}")),
    mistake("nameless validation sets", "data.validation_sets", "mapping", add="data: {validation_sets: text}\n"),
    mistake("empty validation set", "data.validation_sets.law", "is empty", add="data: {validation_sets: {law: null}}\n"),
    mistake("validation set called like the main one", "data.validation_sets.main", "'main' is what tables", "name the set otherwise", add="data: {blend: text, validation_sets: {main: text}}\n"),
    mistake("validation set called like the main one in a sweep", "sweep.runs.a.data.validation_sets", "'main' is what tables", add=sweep("{runs: {a: {data.validation_sets: {main: text}}}}")),
    mistake("validation set that is trained on", "data.validation_sets.law", "'text'", "name another corpus", add="data: {blend_per_split: {train: text, valid: other}, validation_sets: {law: text}}\n", replace=OTHER),
    mistake("a split that is trained on", "data.blend_per_split.valid", "names 'other', which blend_per_split.train trains on in whole", "name another corpus", add="data: {blend_per_split: {train: {text: 1, other: 1}, valid: other}}\n", replace=OTHER),
    mistake("a test that is trained on", "data.blend_per_split.test", "names 'text'", add="data: {blend_per_split: {train: text, valid: other, test: {text: 1, other: 1}}}\n", replace=OTHER),
    mistake("a swept split that is trained on", "sweep.grid.data.blend_per_split.valid", "names 'text'", add="data: {blend_per_split: {train: text}}\n" + sweep("{grid: {data.blend_per_split.valid: [other, text]}}"), replace=OTHER),
    mistake("a split of the same source", "data.blend_per_split.valid", "names 'copy', which has the source of 'text'", "name another corpus", add="data: {blend_per_split: {train: text, valid: copy}}\n", replace=COPY),
    mistake("validation set of the same source", "data.validation_sets.law", "names 'copy', which has the source of 'text'", add="data: {blend: text, validation_sets: {law: copy}}\n", replace=COPY),
    mistake("validation set of two kinds", "data.validation_sets.law", "mixes 'text'", "make two sets", add="data: {blend: text, validation_sets: {law: {text: 1, other: 1}}}\n", replace=OTHER),
    mistake("validation set of nothing", "data.validation_sets", "there is none: set data.split", add="data: {blend: text, split: '99,0,1', validation_sets: {law: text}}\n", replace=OTHER),
    mistake("validation sets without the main one", "data.validation_sets", "set data.blend_per_split.valid", add="data: {blend_per_split: {train: text}, validation_sets: {law: other}}\n", replace=OTHER),
    mistake("validation sets without validation", "data.validation_sets", "eval_iters is 0", add="data: {blend: text, validation_sets: {law: text}}\n", replace=training("eval_iters: 0")),
    mistake("mask across ranks", "data.reset_attention_mask", "parallel.cp to 1, not 2", add="data: {reset_attention_mask: true}\nparallel: {cp: 2}\nresources: {gpus_per_node: 2}\n"),
    mistake("mask of text without its ends", "data.reset_attention_mask", "corpora.text.append_eod is false", add="data: {reset_attention_mask: true}\n", replace=("  text: {", "  text: {append_eod: false, ")),
    mistake("nothing to train on", "data.split", "raise the first share", add="data: {split: '0,50,50'}\n"),
    mistake("share above one", "data.fim.rate", "1.5", "less than or equal to 1", add="data: {fim: {rate: 1.5}}\n"),
    mistake("fragments without a rate", "data.fim", "set both or none", add="data: {fim: {split_sample: '<file>'}}\n"),
    mistake("no epochs", "data.max_epochs", "greater than 0", add="data: {max_epochs: 0}\n"),
    mistake("misspelt tokenizer", "models.dense.tokenizer", "did you mean 'bpe'", replace=("    tokenizer: bpe", "    tokenizer: bpee")),
    mistake("no tokenizer", "models.dense", "set tokenizer", replace=("    tokenizer: bpe\n", "")),
    mistake("tokenizer of no corpus", "tokenizers.bpe.train_on", "corpus 'texts'", "did you mean 'text'", replace=("train_on: text", "train_on: texts")),
    mistake("missing corpus file", "corpora.text.source", "'nowhere/*.jsonl': no such file", replace=("python-stdlib", "nowhere/*.jsonl")),
    mistake("corpora with files of the same name", "corpora.text_b", "its files text_b.bin and text_b.idx would be those of the corpus 'text': rename one", replace=("{source: python-stdlib}", "{source: python-stdlib, text_key: [b, c]}\n  text_b: {source: python-stdlib}")),
    mistake("missing existing tokens", "corpora.old.megatron", "there is neither nowhere/a.bin nor nowhere/a.idx", replace=(OLD, OLD + "  old: {megatron: nowhere/a}\n")),
    mistake("tokens that were cut short", "corpora.old.megatron", "torn.bin has 3 bytes, and torn.idx is the index of 4: copy both files again", replace=(OLD, OLD + "  old: {megatron: torn}\n")),
    mistake("an index that was cut short", "corpora.old.megatron", "short.idx has 61 bytes instead of 62: copy both", replace=(OLD, OLD + "  old: {megatron: short}\n")),
    mistake("an index that is none", "corpora.old.megatron", "none.idx is not a Megatron index: copy both", replace=(OLD, OLD + "  old: {megatron: none}\n")),
    mistake("source and megatron", "corpora.text", "needs exactly one of source and megatron; given: both", replace=("{source: python-stdlib}", "{source: python-stdlib, megatron: nowhere/a}")),
    mistake("neither source nor megatron", "corpora.text", "needs exactly one of source and megatron; given: none", replace=("{source: python-stdlib}", "{limit: 3}")),
    mistake("missing filter", "corpora.text.filter", "there is no file 'nowhere.py': check the path", replace=("{source: python-stdlib}", "{source: python-stdlib, filter: nowhere.py}")),
    mistake("filter that is no Python", "corpora.text.filter", "'keep' is not a Python file (.py)", replace=("{source: python-stdlib}", "{source: python-stdlib, filter: keep}")),
    mistake("filter of existing tokens", "corpora.old", "are read as they are: remove filter", replace=(OLD, OLD + "  old: {megatron: old, filter: keep.py}\n")),
    mistake("exports of steps that aren't saved", "export.checkpoints", "every 4 steps: the run 'run' keeps no checkpoint of step 4, 8, but of 5, 10", add="checkpoint: {save_interval: 5}\nexport: {runs: all, checkpoints: {every: 4}}\n"),
    mistake("exports of steps that aren't kept", "export.checkpoints", "keeps no checkpoint of step 5, but of 10: change checkpoint.save_interval, and with keep_last also keep_every", add="checkpoint: {save_interval: 5, keep_last: 1}\nexport: {runs: all, checkpoints: {every: 5}}\n"),
    mistake("exports of no step", "export.checkpoints", "keeps no checkpoint of step 20, but of 10", add="export: {runs: all, checkpoints: {every: 20}}\n"),
    mistake("exports of some steps", "export.checkpoints", "must be `all`, or `{every: N}`", add="export: {runs: all, checkpoints: some}\n"),
    mistake("text options of existing tokens", "corpora.old", "are read as they are: remove limit and text_key", replace=(OLD, OLD + "  old: {megatron: old, limit: 3, text_key: b}\n")),
    mistake("a tokenizer trained on tokens", "tokenizers.bpe.train_on", "has tokens, and no text to train a tokenizer on", replace=("source: python-stdlib", "megatron: old")),
    mistake("vocab without merges", "tokenizers.bpe", "vocab and merges belong together", replace=("train_on: text, vocab_size: 512", "vocab: v.json")),
    mistake("trained and given tokenizer", "tokenizers.bpe", "needs one of train_on, sentencepiece, tiktoken, or vocab and merges", replace=("vocab_size: 512", "vocab: v.json, merges: v.json")),
    mistake("missing merges.txt", "tokenizers.bpe.merges", "there is no file 'm.txt'", replace=("train_on: text, vocab_size: 512", "vocab: v.json, merges: m.txt")),
    mistake("text for sentencepiece", "tokenizers.bpe.sentencepiece", "'old.idx' is not a model of SentencePiece", replace=("train_on: text, vocab_size: 512", "sentencepiece: old.idx")),
    mistake("text for tiktoken", "tokenizers.bpe.tiktoken", "'v.json' is not what TikTokenizer reads", replace=("train_on: text, vocab_size: 512", "tiktoken: v.json")),
    mistake("a pattern without tiktoken", "tokenizers.bpe", "name its file, or remove them", replace=("vocab_size: 512", "tiktoken_pattern: v1")),
    mistake("merges for vocab", "tokenizers.bpe.vocab", "'old.bin' is not GPT-2's vocab.json", replace=("train_on: text, vocab_size: 512", "vocab: old.bin, merges: v.json")),
    mistake("misspelt stdlib", "corpora.text.source", "did you mean 'python-stdlib'", replace=("python-stdlib", "python-stdlb")),
    mistake("a recipe with a syntax error", "models.dense.recipe", "broken.py, line 1: is not valid Python ('(' was never closed)", replace=("config: {model_type: qwen3, hidden_size: 64}", "recipe: broken.py")),
    mistake("a profiler with a syntax error", "profile.tool", "broken.py, line 1: is not valid Python", add="profile: {tool: broken.py}\n"),
    mistake("a model whose config.json is cut off", "models.dense.hf", "config.json can't be read:", replace=("config: {model_type: qwen3, hidden_size: 64}", "hf: ./broken")),
    mistake("a model whose config.json is a list", "models.dense.hf", "config.json is not a JSON object", replace=("config: {model_type: qwen3, hidden_size: 64}", "hf: ./listed")),
    mistake("a number with a last underscore", "training.seed", "10_ is not a finite number", replace=training("seed: 10_")),
    mistake("a fraction with an underscore before the point", "optimizer.lr", "1_.5 is not a finite number", add="optimizer: {lr: 1_.5}\n"),
    mistake("text tagged as a number", "optimizer.lr", "abc is not a finite number", add="optimizer: {lr: !!float abc}\n"),
    mistake("missing recipe file", "models.dense.recipe", "there is no file 'recipes/none.py'", replace=("config: {model_type: qwen3, hidden_size: 64}", "recipe: recipes/none.py")),
    mistake("unknown performance recipe", "models.dense.recipe", "Bridge has no performance recipe 'llama'", replace=("config: {model_type: qwen3, hidden_size: 64}", "recipe: perf_recipes.llama")),
    mistake("misspelt recipe", "models.dense.recipe", "Bridge has no recipe 'llama3_8b_pretrain_confg'; it has llama3_8b_pretrain_config or ", replace=("config: {model_type: qwen3, hidden_size: 64}", "recipe: llama3_8b_pretrain_confg")),
    mistake("recipe that is named like none", "models.dense.recipe", "Bridge has no recipe 'zzz'; `megaboa recipes` lists those that it has", replace=("config: {model_type: qwen3, hidden_size: 64}", "recipe: zzz")),
    mistake("recipe that fine-tunes, by its older name", "models.dense.recipe", "llama3_8b_sft_config fine-tunes (sft): only pretraining", replace=("config: {model_type: qwen3, hidden_size: 64}", "recipe: llama3_8b_sft_config")),
    mistake("performance recipe that fine-tunes", "models.dense.recipe", "fine-tunes (sft)", replace=("config: {model_type: qwen3, hidden_size: 64}", "recipe: llama3_8b_sft_8gpu_h100_bf16_config")),
    mistake("missing model folder", "models.dense.hf", "there is no folder './none'", replace=("config: {model_type: qwen3, hidden_size: 64}", "hf: ./none")),
    mistake("missing export", "models.dense.hf", "there is no folder 'results/a/runs/b/export'", replace=("config: {model_type: qwen3, hidden_size: 64}", "hf: results/a/runs/b/export")),
    mistake("misspelt model folder that could be an id", "models.dense.hf", "there is no folder 'listed/inside': did you mean 'listed/insides'?, or rename the folder listed, if an id of the hub is meant", replace=("config: {model_type: qwen3, hidden_size: 64}", "hf: listed/inside")),
    mistake("misspelt tokenizer folder", "models.dense.tokenizer", "there is no folder 'listed/x': check the path, or rename the folder listed, if an id of the hub is meant", replace=("tokenizer: bpe", "tokenizer: listed/x")),
    # overrides
    mistake("override without a dot", "overrides.seed", "dotted field", add="overrides: {seed: 1}\n"),
    mistake("override of a key that is set", "overrides.train.train_iters", "training.train_iters", "remove one", add="overrides: {train.train_iters: 5}\n"),
    mistake("override of a part of a key", "overrides.model.seq_length", "set that instead", "training.seq_length", add="overrides: {model.seq_length: 5}\n"),
    mistake("override of our own", "overrides.checkpoint.save", "Megaboa itself", add="overrides: {checkpoint.save: here}\n"),
    mistake("override of one of two ends", "overrides.optimizer.weight_decay", "set by the key optimizer.weight_decay: set that instead", add="overrides: {optimizer.weight_decay: 0.3}\n"),
    mistake("null of a key that is set", "overrides.train.train_iters", "same field as training.train_iters: remove one", add="overrides: {train.train_iters: null}\n"),
    mistake("null of a key that has none", "optimizer.lr", "must be a number", add="overrides: {optimizer.lr: null}\n"),
    mistake("null and a number of tokens", "overrides.train.train_iters", "same field as training.train_tokens: remove one", replace=(ITERS, "  train_tokens: 10\n"), add="overrides: {train.train_iters: null}\n"),
    mistake("an end by the clock", "overrides.train.exit_duration_in_mins", "counts as their failure", "resources.runtime", add="overrides: {train.exit_duration_in_mins: 5}\n"),
    mistake("Bridge's second tier", "overrides.checkpoint.replication_jump", "set checkpoint.local instead", add="overrides: {checkpoint.replication_jump: 1}\n"),
    mistake("copies of a state that no rank saves", "checkpoint.local", "experiment.yaml:14: ", "set with parallel.fsdp: torch", "nearest: null", add="parallel: {fsdp: torch}\ncheckpoint: {local: {every: 2}}\n"),
    mistake("copies in a relative folder", "checkpoint.local.folder", "is not an absolute path", add="checkpoint: {local: {every: 2, folder: here}}\n"),
    mistake("copies without an interval", "checkpoint.local.every", "missing", add="checkpoint: {local: {folder: /tmp}}\n"),
    mistake("override with a bad value", "optimizer.lr", "-1", "greater than 0", add="overrides: {optimizer.lr: -1}\n"),
    # sweeps
    mistake("empty sweep", "sweep", "is empty", add=sweep("{}")),
    mistake("empty grid", "sweep.grid", "at least 1", add=sweep("{grid: {}}")),
    mistake("empty axis", "sweep.grid.parallel.tp", "is empty", add=sweep("{grid: {parallel.tp: []}}")),
    mistake("axis of one value", "sweep.grid.parallel.tp", "list of values", add=sweep("{grid: {parallel.tp: 2}}")),
    mistake("unknown axis", "sweep.grid.parallel.pt", "did you mean parallel.tp", add=sweep("{grid: {parallel.pt: [1, 2]}}")),
    mistake("short axis", "sweep.grid.gbs", "did you mean training.global_batch_size", add=sweep("{grid: {gbs: [8]}}")),
    mistake("axis that is a section", "sweep.grid.parallel", "such as parallel.tp", add=sweep("{grid: {parallel: [1]}}")),
    mistake("axis that is shared", "sweep.grid.corpora.text.limit", "can't be swept", "data.blend", add=sweep("{grid: {corpora.text.limit: [1, 2]}}")),
    mistake("wrong value in an axis", "sweep.grid.parallel.tp[1]", "-2", "greater than 0", add=sweep("{grid: {parallel.tp: [1, -2]}}")),
    mistake("misspelt model in an axis", "sweep.grid.model[0]", "did you mean 'dense'", add=sweep("{grid: {model: [dence]}}")),
    mistake("axis of no model", "sweep.grid.models.dens.config.hidden_size", "did you mean dense", add=sweep("{grid: {models.dens.config.hidden_size: [8]}}")),
    mistake("set and swept as an override", "sweep.grid.overrides.train.train_iters", "same field as training.train_iters", "sweep training.train_iters instead", add=sweep("{grid: {overrides.train.train_iters: [1, 2]}}")),
    mistake("swept twice", "sweep.zip", "same field as sweep.grid.training.seed", add=sweep("{grid: {training.seed: [1]}, zip: {training.seed: [2]}}")),
    mistake("a webhook in the sweep", "sweep.grid.recovery.notify", "can't be swept", "$MEGABOA_RUN", add=sweep("{grid: {recovery.notify: [a, b]}}")),
    mistake("swept under two names", "sweep.grid.overrides.optimizer.lr", "same field", add=sweep("{grid: {optimizer.lr: [1.0], overrides.optimizer.lr: [2.0]}}")),
    mistake("swept to null and set", "sweep.grid.overrides.train.train_iters", "same field as training.train_iters", "sweep training.train_iters instead", add=sweep("{grid: {overrides.train.train_iters: [null]}}")),
    mistake("swept, and null in the file", "sweep.grid.schedule.decay_iters", "same field as overrides.scheduler.lr_decay_iters, which the file sets", add=sweep("{grid: {schedule.decay_iters: [5]}}") + "overrides: {scheduler.lr_decay_iters: null}\n"),
    mistake("null and a value in one run", "sweep.runs.a.schedule.decay_iters", "same field as overrides.scheduler.lr_decay_iters", add=sweep("{runs: {a: {overrides.scheduler.lr_decay_iters: null, schedule.decay_iters: 5}}}")),
    mistake("null and a value on two axes", "sweep.grid.schedule.decay_iters", "same field as sweep.grid.overrides.scheduler.lr_decay_iters", add=sweep("{grid: {overrides.scheduler.lr_decay_iters: [null], schedule.decay_iters: [5]}}")),
    mistake("unequal zip", "sweep", "equal length", "training.seed has 2", add=sweep("{zip: {training.seed: [1, 2], optimizer.lr: [0.1]}}")),
    mistake("duplicate value", "sweep.grid.optimizer.lr[1]", "same name 'lr0.0003'", add=sweep("{grid: {optimizer.lr: [3e-4, 0.0003]}}")),
    mistake("a blend in other units", "sweep", "train the same thing: they differ only in data.blend", add=sweep("{grid: {data.blend: [{text: 3, other: 1}, {other: 0.25, text: 0.75}]}}"), replace=OTHER),
    mistake("a split's blend in other units", "sweep", "train the same thing: they differ only in data.blend_per_split.valid", add="data: {blend_per_split: {train: text}}\n" + sweep("{grid: {data.blend_per_split.valid: [{other: 1, more: 2}, {other: 2, more: 4}]}}"), replace=(OLD, f"{OTHER[1]}  more: {{source: 'hf:org/more'}}\n")),
    mistake("runs that differ in speed alone", "sweep", "'gradoverlap' and 'nogradoverlap' train the same thing: they differ only in parallel.overlap_grad_reduce, which changes no loss", "`snakemake tune` (tune.also), or with training.nudge: 1", add=sweep("{grid: {parallel.overlap_grad_reduce: [true, false]}}")),
    mistake("a key that runs have anyway", "sweep.runs.b", "they differ only in parallel.overlap_grad_reduce, which", add=sweep("{runs: {a: {parallel.tp: 1}, b: {parallel.overlap_grad_reduce: false}}}")),
    mistake("the same in two ways", "sweep.runs.b", "they are equal; remove one", add=sweep("{runs: {a: {parallel.tp: 1}, b: {parallel.pp: 1}}}")),
    mistake("duplicate run", "sweep.runs.b", "'a' and 'b' train the same thing", "remove one", add=sweep("{runs: {a: {training.seed: 1}, b: {training.seed: 1}}}")),
    mistake("duplicate identity", "sweep", "differ only in resources.partition", add=sweep("{grid: {resources.partition: [x, y]}}")),
    mistake("bad run name", "sweep.runs.a/b", "letter", add=sweep("{runs: {a/b: {training.seed: 1}}}")),
    mistake("long run name", "sweep.grid.resources.partition[0]", "longer than 100 characters", add=sweep("{grid: {resources.partition: [" + "x" * 120 + "]}}")),
    mistake("label without keys", "sweep.grid.layout", "'tp2' must be a mapping", add=sweep("{grid: {layout: {tp2: 2}}}")),
    mistake("unknown key in a label", "sweep.grid.layout.a.parallel.pt", "did you mean parallel.tp", add=sweep("{grid: {layout: {a: {parallel.pt: 2}}}}")),
    mistake("export of no run", "export.runs", "there is no run 'rum'", "did you mean 'run'", add="export: {runs: [rum]}\n"),
    mistake("agreement with no run", "report.agreements[0].reference", "did you mean 'run'", add="report: {agreements: [{reference: rnu, runs: ['*']}]}\n"),
    # expressions
    mistake("unknown name for the length", "training.train_iters", "'x'", "mbs, seq_length, tp, pp", replace=(ITERS, "  train_iters: x / 2\n")),
    mistake("unknown name in the sweep", "sweep.runs.a.optimizer.lr", "'lrr' uses the unknown name 'lrr'; allowed", "cp, ep", add=sweep("{runs: {a: {optimizer.lr: lrr}}}")),
    mistake("length by itself", "training.train_iters", "depends on itself", "mbs, seq_length, tp, pp", replace=(ITERS, "  train_iters: train_iters / 2\n")),
    mistake("unknown name", "training.micro_batch_size", "'gbz'", "did you mean 'gbs'", replace=training("micro_batch_size: gbz / 2")),
    mistake("attribute", "training.micro_batch_size", "not allowed: 'gbs.real'", replace=training("micro_batch_size: gbs.real")),
    mistake("call", "training.micro_batch_size", "not allowed", replace=training("micro_batch_size: open('f')")),
    mistake("huge power", "training.micro_batch_size", "too large", replace=training("micro_batch_size: 9**9**9")),
    mistake("division by zero", "training.micro_batch_size", "divides by zero", replace=training("micro_batch_size: gbs / (tp - 1)")),
    mistake("cycle", "training.micro_batch_size", "depends on itself: mbs → mbs", replace=training("micro_batch_size: mbs / 2")),
    mistake("result out of range", "training.micro_batch_size", "-8", "greater than 0", replace=training("micro_batch_size: -gbs")),
    # lengths and layouts
    mistake("no length", "training.train_iters", "is missing", "train_tokens", replace=(ITERS, "  seed: 1\n")),
    mistake("two lengths", "training", "remove one", replace=training("train_tokens: 1000")),
    mistake("layout does not fit", "resources.gpus_per_node", "tp * pp * cp = 2 * 1 * 1", "nearest: 2", add="parallel: {tp: 2}\n"),
    mistake("batch does not fit", "training.global_batch_size", "3 * 1", "nearest: 6 or 9", replace=training("micro_batch_size: 3")),
    # YAML
    mistake("tab", "", "tab in the indentation", "spaces", replace=(ITERS, "\ttrain_iters: 10\n")),
    mistake("unclosed bracket", "", "is not YAML", add="parallel: {tp: 2\n"),
    mistake("unknown alias", "", "undefined alias", add="parallel: *nothing\n"),
    mistake("recursive alias", "overrides.model.x.y", "inside what it repeats", add="overrides: {model.x: &a {y: *a}}\n"),
    mistake("python tag", "overrides.model.x", "tag", "plain YAML", add="overrides: {model.x: !!python/tuple [1]}\n"),
    mistake("two documents", "", "several documents", add="---\nmodels: {}\n"),
]  # fmt: skip


def message_of(paths: list[Path], extra: dict | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan(load(paths, extra))
    return str(caught.value)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistake(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = mistake.replace
    assert not old or old in GOOD
    for name, ending, size in (("old", "bin", 4), ("torn", "bin", 3), ("short", "idx", 61), ("none", "idx", 9)):
        write_indexed(Path(name), [[1, 2]])
        os.truncate(f"{name}.{ending}", size)
    Path("v.json").write_text("{}")
    Path("broken.py").write_text("recipe(\n")
    for folder, text in {"broken": '{"model_type":', "listed": "[1]"}.items():
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(text)
    Path("listed/insides").mkdir()
    file = Path("experiment.yaml")
    file.write_text(GOOD.replace(old, new) + mistake.add if old else GOOD + mistake.add)
    message = message_of([file])
    lines = [line for line in message.splitlines() if line.startswith("  experiment.yaml:") or not mistake.key]
    found = [line for line in lines if f": {mistake.key}: " in line or not mistake.key]
    assert found, f"no line about {mistake.key!r} in:\n{message}"
    for hint in mistake.hints:
        assert any(hint in line for line in found), f"{hint!r} is not in:\n{message}"
    assert message.startswith("1 problem "), message


def test_good_file_is_good(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(GOOD)
    assert [run.name for run in make_plan(load([file])).runs] == ["run"]


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n- b\n", "top level"),
        (b"hello\n", "top level"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a: \x00\n", "not YAML"),
        (b"a: " + b"[" * 5000, "is n"),
        (b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(9)), "repeat too much"),
    ],
    ids=["empty", "comments", "list", "scalar", "binary", "null byte", "deep", "billion laughs"],
)  # fmt: skip
def test_files_that_are_no_configuration(content: bytes, hint: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    message = message_of([file])
    assert "bad.yaml" in message
    assert hint in message


def test_missing_file(tmp_path: Path) -> None:
    message = message_of([tmp_path / "none.yaml"])
    assert "none.yaml: can't be read (No such file or directory): check the path" in message
    assert message.startswith("1 problem")


def test_all_problems_at_once(tmp_path: Path) -> None:
    file = tmp_path / "many.yaml"
    file.write_text(
        GOOD + "parallel: {tp: two, sp: no}\nmodel: dens\nsweep: {grid: {optimizer.lrr: [1], training.seed: [-1]}}\n"
    )
    message = message_of([file])
    for key in ("parallel.tp", "parallel.sp", "model", "sweep.grid.optimizer.lrr", "sweep.grid.training.seed[0]"):
        assert f": {key}: " in message
    assert message.startswith("5 problems")


def test_all_runs_at_once(tmp_path: Path) -> None:
    file = tmp_path / "runs.yaml"
    file.write_text(GOOD + "sweep: {grid: {parallel.tp: [1, 2, 4], training.micro_batch_size: [1, 3]}}\n")
    message = message_of([file])
    assert "tp * pp * cp = 2 * 1 * 1 = 2" in message
    assert "tp * pp * cp = 4 * 1 * 1 = 4" in message
    assert "(runs tp2-mbs1, tp2-mbs3)" in message
    assert "nearest: 6 or 9 [batch_fills_the_ranks] (run tp1-mbs3)" in message


def test_mistakes_in_later_files_and_on_the_command_line_are_placed(tmp_path: Path) -> None:
    base, more = tmp_path / "base.yaml", tmp_path / "more.yaml"
    base.write_text(GOOD)
    more.write_text("parallel:\n  tp: 0\n")
    message = message_of([base, more], {"training.seed": -1})
    assert f"{more}:2: parallel.tp: 0 must be greater than 0" in message
    assert "--config: training.seed: -1 must be" in message


def test_a_field_of_tokens_is_no_secret():
    assert keys.override_problem("model.moe_token_dispatcher_type") is None
    assert "is a secret" in keys.override_problem("logger.hf_token")


@pytest.mark.parametrize("value", ["10_", "010"])
def test_a_doubtful_number_on_the_command_line_is_no_default(value: str, tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    with pytest.raises(ConfigError, match=rf"--config: training\.seed: .*{value}"):
        load([file], command_line({"training": {"seed": value}}))


def test_what_may_not_be_read_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_indexed(Path("old"), [[1, 2]])
    Path("hf").mkdir()
    Path("hf/config.json").write_text('{"model_type": "llama"}')
    for name in ("text.jsonl", "hf/tokenizer.json"):
        Path(name).touch(mode=0)
    Path("old.bin").chmod(0)
    experiment = Path("experiment.yaml")
    corpora = "  text: {source: text.jsonl}\n  old: {megatron: old}\n"
    model = "  other: {hf: hf}\n"
    experiment.write_text(GOOD.replace(OLD, corpora).replace("models:\n", "models:\n" + model))
    with as_ordinary_user(tmp_path), pytest.raises(ConfigError) as caught:
        load([experiment])
    said = str(caught.value)
    assert "corpora.text.source: text.jsonl: permission denied: give this user the right to read it" in said
    assert "corpora.old.megatron: old.bin: permission denied" in said
    assert "models.other.hf: hf/tokenizer.json: permission denied" in said
