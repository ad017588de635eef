"""Fine-tuned experts in Bridge's own training on the CPU: padding and layouts don't change how they are balanced."""

import json

import pytest
from cpu_ranks import on_cpu

from megaboa.data import tokenizer

pytestmark = pytest.mark.slow

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_router_pre_softmax": True}
EXPERTS |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
EXPERTS |= {"moe_grouped_gemm": False, "moe_token_dispatcher_type": "alltoall"}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_z_loss_coeff": 0.1}
BIASED |= {"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_dtype": "fp32"}
LAYOUTS = {
    "dp2": (2, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),  # the second and the third one read no batches in Bridge
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Examples of many lengths, and of one; and the checkpoint that runs begin with, whatever their layout."""
    root = tmp_path_factory.mktemp("balancing")
    tokenizer.train([" ".join(WORDS)] * 50, 300, root / "tokenizer")
    for name, lengths in (("mixed", range(1, 9)), ("equal", [40] * 8)):
        (root / name).mkdir()
        rows = [{"prompt": WORDS[number], "answer": " one" * length} for number, length in enumerate(lengths)]
        (root / name / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tune(root, starts=True)
    return root


def _tune(root, name, model, length, per_token, starts, of_biases=False, of_adapters=False):
    import tiny_training
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.datasets import gpt_sft
    from megatron.bridge.data.sft_processing import PromptCompletionSFTPreprocessingConfig
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megaboa.bridge import finetuning
    from megaboa.bridge.balancing import Balancing
    from megaboa.bridge.process import save_in_foreground

    class Biases(Callback):
        """The largest of the routers' biases, which begin with 0."""

        def on_train_end(self, context):
            routers = [part for part in context.model[0].modules() if getattr(part, "expert_bias", None) is not None]
            self.largest = max([float(router.expert_bias.abs().max()) for router in routers], default=None)

    save_in_foreground()
    gpt_sft.tokenize_prompt_completion_example = finetuning.joined
    begins = "moe_router_enable_expert_bias" not in model and not starts
    checkpoint = {"pretrained_checkpoint": f"{root}/start/checkpoints"} if begins else {}
    checkpoint |= {} if starts else {"save": None}
    cfg = tiny_training.configuration(f"{root}/start", {**EXPERTS, **model}, checkpoint)
    cfg.model.num_layers = 4
    cfg.model.seq_length, cfg.model.vocab_size, cfg.model.calculate_per_token_loss = length, 320, per_token
    whole = "full" if name == "equal" else "completion"
    cfg.dataset = GPTSFTDatasetConfig(
        seq_length=length,
        dataset_root=f"{root}/{name}",
        seed=1,
        preprocessing=PromptCompletionSFTPreprocessingConfig(
            prompt_column="prompt", completion_column="answer", loss_mode=whole, strip_whitespace=False
        ),
        dataset_kwargs={"pad_to_max_length": True},
        num_workers=0,
        do_validation=False,
        do_test=False,
    )
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.tokenizer_model = "HuggingFaceTokenizer", f"{root}/tokenizer"
    cfg.tokenizer.vocab_size = None
    cfg.train.micro_batch_size, cfg.train.train_iters, cfg.ddp.average_in_collective = 1, 2, False
    record, forward = tiny_training.recorder(), forward_step
    callbacks = [record]
    if per_token:
        callbacks.append(Balancing(cfg))
        forward = callbacks[-1].install(forward)
    biases = Biases()
    if of_adapters:
        cfg.peft, cfg.checkpoint.pretrained_checkpoint = LoRA(target_modules=["linear_qkv"]), finetuning.NOWHERE
        finetuning._adapt(1, random_weights=True)
    pretrain(cfg, forward, callbacks=[*callbacks, biases])
    return biases.largest if of_adapters or of_biases else record.steps


def tune(folder, name="mixed", length=32, per_token=True, ranks=1, starts=False, **model):
    """Loss and gradient norm by step."""
    return on_cpu(_tune, str(folder), name, model, length, per_token, starts, world_size=ranks)[-1]


@pytest.fixture(scope="module")
def alone(folder):
    return tune(folder)


def same(found, expected):
    return all(found[step] == pytest.approx(values, rel=2e-6) for step, values in expected.items())


def test_padding_changes_nothing(folder, alone):
    assert same(tune(folder, length=64), alone)
    assert not same(tune(folder, moe_aux_loss_coeff=0.0), alone), "it would show"


def test_nor_with_an_expert_bias_and_a_z_loss(folder):
    assert same(tune(folder, length=64, **BIASED), tune(folder, **BIASED))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(folder, alone, layout):
    ranks, sizes = LAYOUTS[layout]
    assert same(tune(folder, ranks=ranks, **sizes), alone)


def test_experts_are_balanced_as_in_pretraining(folder):
    """Where all tokens count and nothing is padded, the mean over tokens is that over micro-batches."""
    assert same(tune(folder, "equal"), tune(folder, "equal", per_token=False))


@pytest.mark.parametrize("of_adapters", [False, True])
def test_biases_of_the_base_stay_under_adapters(folder, of_adapters):
    [largest] = on_cpu(_tune, str(folder), "mixed", BIASED, 32, True, False, True, of_adapters)
    assert (largest == 0) == of_adapters
