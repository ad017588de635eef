"""Samples of a fine-tuned run, made before it holds a GPU: examples are split, converted to tokens by a template, and
packed if that is asked for. Bridge's own datasets do this, as they will on the ranks. If other tokens or masks come of
the same examples after a change here or there, raise SAMPLES of plan/tasks.py: indexes and runs are made again.

With a template that drops answers, or marks none of their tokens, a run would train on nothing or on prompts, so that
is an error here. One templated example is kept for the report.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetBuilder, build_gpt_sft_split
from megatron.bridge.data.conversation_processing import get_processor_tokenizer
from megatron.bridge.data.loaders import cyclic_iter
from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.training.config import ConfigContainer, runtime_config_update
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

from megaboa.blends import SPLITS, bounds_of, key_of_validation, split_blends
from megaboa.bridge import configuration
from megaboa.bridge.finetuning import splits
from megaboa.bridge.process import playing_rank_0_of
from megaboa.errors import InputError
from megaboa.paths import RunFolder
from megaboa.records import NO_TEMPLATE, CorpusRead, EvaluationRead, ExamplesRead, RunSpec, ShownExample, Tree, plain

FILES = dict(zip(SPLITS, ("training.jsonl", "validation.jsonl", "test.jsonl"), strict=True))  # names that Bridge uses
LOOKED_AT = 100  # number of examples for which it is checked that the template includes their texts
MOSTLY = 0.5
UNCUT = sys.maxsize


@dataclass(frozen=True)
class _Template:
    """A run's chat template, as errors name it: its corpus, and where the user finds it."""

    corpus: str
    place: str

    @classmethod
    def of(cls, folder: RunFolder, config: ConfigContainer) -> Self:
        corpus = next(iter(split_blends(folder.run.data)["train"]))
        if folder.run.tuning["template"] is not None:  # run.json has the text alone
            return cls(corpus, f"tuning.template of run {folder.name}")
        own = [
            Path(config.tokenizer.tokenizer_model, name) for name in ("chat_template.jinja", "tokenizer_config.json")
        ]
        file = next((path for path in own if path.exists()), own[0].parent)
        return cls(corpus, f"{file} (or a copy in tuning.template) of run {folder.name}")

    def error(self, problem: str) -> InputError:
        return InputError(f"corpora.{self.corpus}: {problem}")

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn the objections of a template, or of Bridge, into a one-sentence error."""
        try:
            yield
        except (ValueError, TypeError, TemplateError) as error:
            said = " ".join(str(error).split())
            if "boundary markers" in said or "AssistantMaskBoundaryConfig" in said:  # of a known format, in other words
                raise self.error(
                    "nothing in the chat template says which tokens are the assistant's: put {% generation %} and "
                    f"{{% endgeneration %}} around what it says, in {self.place}"
                ) from error
            raise self.error(
                f"the chat template refuses an example ({said}): correct {self.place}, or remove the example"
            ) from error


def build(folder: RunFolder, cache: Path) -> Tree:
    """Make the samples in the cache; return their number, and statistics of the examples."""
    run = folder.run
    cache.mkdir(parents=True, exist_ok=True)
    config = configuration.build_as_launched(folder, configuration.Inputs.for_data(folder))
    config.dataset.dataset_root = str(cache.absolute())
    with playing_rank_0_of(run.world_size):
        runtime_config_update(config)
    tokenizer = build_tokenizer(config.tokenizer)
    chats = run.tuning["template"] != NO_TEMPLATE
    if chats and not tokenizer.chat_template:
        raise InputError(
            f"the tokenizer of model {run.model['name']!r} has no chat template: set tuning.template to a Jinja file"
        )
    counts = {split: _write(folder, split, chats, cache / FILES[split]) for split in splits(run)}
    template = _Template.of(folder, config)
    read = _read(config, run, template, tokenizer, cache / FILES["train"])
    datasets = dict(zip(SPLITS, GPTSFTDatasetBuilder(config.dataset, tokenizer).build(), strict=True))
    samples = {split: len(dataset) for split, dataset in datasets.items() if dataset is not None}
    _require_batches(config, samples, counts)
    read = replace(read, positions=samples["train"] * config.dataset.seq_length)
    epochs = config.train.train_iters * config.train.global_batch_size / samples["train"]
    asked = CorpusRead(
        name=template.corpus, weight=1.0, tokens_asked=round(epochs * read.tokens), tokens=read.tokens, epochs=epochs
    )
    evaluated = [plain(row) for row in _evaluations(run, config, samples)]
    return {"samples": samples, "corpora": [plain(asked)], "evaluations": evaluated, "examples": plain(read)}


def _evaluations(run: RunSpec, config: ConfigContainer, samples: dict[str, int]) -> Iterator[EvaluationRead]:
    """How much one evaluation reads of the validation data."""
    batch = config.validation.eval_global_batch_size or config.train.global_batch_size
    if (iters := config.validation.eval_iters) and "valid" in samples:
        [corpus] = split_blends(run.data)["valid"]
        yield EvaluationRead(
            key=key_of_validation(run.data),
            corpus=corpus,
            unit="samples",
            asked=iters * batch,
            there=samples["valid"],
            eval_iters=iters,
            most=samples["valid"] // batch,
        )


def held_out(config: ConfigContainer, folder: RunFolder, first: int, end: int) -> list[dict[str, Any]]:
    """The batches that an evaluation read, on all ranks: whole batches, which are divided among the ranks."""
    config.dataset.dataset_root = folder.index.cache
    valid = GPTSFTDatasetBuilder(config.dataset, build_tokenizer(config.tokenizer)).build()[SPLITS.index("valid")]
    size = config.validation.eval_global_batch_size or config.train.global_batch_size
    loader = build_pretraining_data_loader(
        valid, first, "batch", size, 0, config.dataset.data_sharding, collate_fn=valid.collate_fn,
        global_batch_size=size, seed=config.dataset.seed,
    )  # fmt: skip
    return list(itertools.islice(cyclic_iter(loader), (end - first) // size))


def warnings(read: ExamplesRead) -> Iterator[str]:
    if read.silent > MOSTLY * read.examples:
        yield (
            f"{read.silent:,} of {read.examples:,} examples are so long that no token which counts is left of them: "
            "raise training.seq_length"
        )


def _write(folder: RunFolder, split: str, chats: bool, path: Path) -> int:
    """Write a split's examples for Bridge, and return their number. A corpus is divided at random, always in the same
    way."""
    [name] = split_blends(folder.run.data)[split]
    corpus = folder.corpora[name].examples
    with Path(corpus.path).open(encoding="utf-8", newline="\n") as lines:  # a text may have other ends of lines
        rows = list(lines)
    chosen = range(len(rows))
    if folder.run.data.get("blend"):
        chosen = list(chosen)
        random.Random(0).shuffle(chosen)
        begin, end = bounds_of(folder.run.data["split"], len(rows))[SPLITS.index(split)]
        chosen = sorted(chosen[begin:end])
    with path.open("w", encoding="utf-8") as out:
        for number in chosen:
            example = json.loads(rows[number])
            if chats and corpus.kind == "pairs":
                turns = (("user", example["prompt"]), ("assistant", example["answer"]))
                example = {"messages": [{"role": role, "content": content} for role, content in turns]}
            out.write(json.dumps(example, ensure_ascii=False) + "\n")
    return len(chosen)


def _require_batches(config: ConfigContainer, samples: dict[str, int], examples: dict[str, int]) -> None:
    """Check that there are enough samples for Bridge, which reads whole batches."""
    evaluated = config.validation.eval_global_batch_size or config.train.global_batch_size
    for split, count in samples.items():
        batch = config.train.global_batch_size if split == "train" else evaluated
        used = split == "train" or config.validation.eval_iters
        if used and count < batch:
            packed = f", packed to {count} sequences" if config.dataset.enable_offline_packing else ""
            raise InputError(
                f"data.split: leaves {examples[split]} examples for {split}{packed}, and a batch is {batch}: take more "
                "examples, a larger share, a share of 0, or a smaller training.global_batch_size"
            )


def _read(config: ConfigContainer, run: RunSpec, template: _Template, tokenizer: Any, path: Path) -> ExamplesRead:
    """Statistics of all training examples, read one by one as in training."""
    builder = GPTSFTDatasetBuilder(replace(config.dataset), tokenizer)
    dataset = build_gpt_sft_split(
        path,
        tokenizer=tokenizer,
        seq_length=UNCUT,
        memmap_workers=1,
        seed=config.dataset.seed,
        packed_sequence_size=-1,
        dataset_kwargs=builder.dataset_kwargs,
    )
    if run.tuning["template"] != NO_TEMPLATE:
        _require_text(path, tokenizer, template)
    length = config.dataset.seq_length
    tokens = counted = longest = cut = silent = 0
    shown: tuple[list[int], list[int]] | None = None
    for number in range(len(dataset)):
        ids, mask = _item(dataset, number, template)
        cut += len(ids) > length + 1
        longest = max(longest, len(ids))
        ids, mask = ids[: length + 1], mask[: length + 1]  # the last token is only predicted, the first one never
        counts = sum(mask[1:])
        tokens, counted, silent = tokens + len(ids), counted + counts, silent + (counts == 0)
        if counts and (shown is None or (len(ids) <= length and len(shown[0]) > length)):
            shown = ids, mask
    _require_answers(run, template, counted, tokens - len(dataset))
    words = get_processor_tokenizer(tokenizer)
    return ExamplesRead(
        examples=len(dataset),
        tokens=tokens,
        counted=counted,
        longest=longest,
        cut=cut,
        silent=silent,
        positions=0,
        template=_origin(run),
        shown=ShownExample(corpus=template.corpus, tokens=len(shown[0]), pieces=tuple(_pieces(*shown, words.decode))),
    )


def _origin(run: RunSpec) -> str:
    return {None: "the tokenizer's", NO_TEMPLATE: "none"}.get(run.tuning["template"], "a file of the experiment's")


def _item(dataset: Any, number: int, template: _Template) -> tuple[list[int], list[int]]:
    """An example's tokens, each with a flag for whether it is learned."""
    with template.refusals():
        item = dataset[number]
    return [int(one) for one in item["input_ids"]], [int(bool(one)) for one in item["loss_mask"]]


def _require_answers(run: RunSpec, template: _Template, counted: int, tokens: int) -> None:
    if not counted:
        raise template.error(
            "not one token of the answers would count in the loss: the chat template marks none, or "
            f"training.seq_length cuts all of them off: correct {template.place}, or raise it"
        )
    if counted == tokens and run.tuning["loss_on"] != "everything":
        raise template.error(
            "every token would count in the loss, those of prompts too, and tuning.loss_on is "
            f"{run.tuning['loss_on']}: correct {template.place}, or set it to everything"
        )


def _require_text(path: Path, tokenizer: Any, template: _Template) -> None:
    """Check that a template includes the texts: it may silently expect other roles or fields than the examples'."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(itertools.islice(lines, LOOKED_AT), start=1):
            turns = json.loads(line)["messages"]
            with template.refusals():
                text = tokenizer.apply_chat_template(turns, tokenize=False)
            for role in ("assistant", "user"):
                said = [turn["content"].strip() for turn in turns if turn["role"] == role][-1:]
                if said and said[0] not in text:
                    raise template.error(
                        f"the chat template leaves out what the {role} says last in example {number} "
                        f"({said[0][:60]!r}): it is not one for these conversations: correct {template.place}"
                    )


def _pieces(ids: list[int], mask: list[int], decode: Callable[[list[int]], str]) -> Iterator[tuple[str, bool]]:
    """Alternating stretches of tokens that count and don't. The first token is never predicted."""
    mask = [0, *mask[1:]]
    ends = [number for number in range(1, len(mask)) if mask[number] != mask[number - 1]]
    for begin, end in pairwise([0, *ends, len(mask)]):
        yield decode(ids[begin:end]), bool(mask[begin])
