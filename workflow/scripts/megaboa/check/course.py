"""The course of a run: its steps, what happens at some of them, and what it starts from."""

from __future__ import annotations

from megaboa.check.facts import Facts
from megaboa.check.rule import Broken, warning


def warmup_ends_before_the_decay(f: Facts) -> Broken | None:
    """Warm-up is shorter than the decay (which ends with the run, unless told otherwise);
    optimizer_param_scheduler.py asserts it after the model was built."""
    end = f.training.decay_iters or f.training.iters
    if end is None or f.training.warmup_iters < end:
        return None
    text = f"{f.training.warmup_iters} steps of warm-up, and the decay ends at step {end}"
    return Broken("schedule.warmup_iters", text, (end - 1,))


def checkpoints_come_before_the_end(f: Facts) -> Broken | None:
    """A save interval longer than the run saves the last step only: after a failure it starts from step 0."""
    interval, iters = f.training.save_interval, f.training.iters
    if not interval or iters is None or interval <= iters:
        return None
    return warning("checkpoint.save_interval", f"{interval} in a run of {iters} steps saves only the last", (iters,))


def tokens_are_in_the_vocabulary(f: Facts) -> Broken | None:
    """The model's vocabulary holds the tokenizer's: setup.py refuses a smaller one, and a token beyond it would read
    memory that isn't the embedding's."""
    model = f.model
    if model.vocab_size is None or model.tokenizer_vocab is None or model.tokenizer_vocab <= model.vocab_size:
        return None
    text = f"the tokenizer has {model.tokenizer_vocab} tokens, the model's vocabulary {model.vocab_size}"
    return Broken("model.vocab_size", text, (model.tokenizer_vocab,))


def embeddings_are_tied_as_in_the_checkpoint(f: Facts) -> Broken | None:
    """An imported model ties its embeddings as the checkpoint does: otherwise the output layer is missing, or thrown
    away."""
    model = f.model
    if not model.pretrained or model.tied is None or model.source_tied is None or model.tied == model.source_tied:
        return None
    return Broken(
        "model.share_embeddings_and_output_weights",
        f"{str(model.tied).lower()}, and the checkpoint's tie_word_embeddings is {str(model.source_tied).lower()}",
        (str(model.source_tied).lower(),),
    )


RULES = (
    warmup_ends_before_the_decay,
    checkpoints_come_before_the_end,
    tokens_are_in_the_vocabulary,
    embeddings_are_tied_as_in_the_checkpoint,
)
