"""Fine-tuned experts in Bridge's own training on the CPU: padding and layouts don't change how they are balanced."""

import json
from types import SimpleNamespace

import pytest
import yaml
from cpu_ranks import on_cpu

from megaboa.data import tokenizer

pytestmark = pytest.mark.slow

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_router_pre_softmax": True}
EXPERTS |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
EXPERTS |= {"moe_grouped_gemm": False, "moe_token_dispatcher_type": "alltoall"}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_z_loss_coeff": 0.1}
BIASED |= {"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_dtype": "fp32"}
HEADS = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
HEADED = {**HEADS, "num_moe_experts": None, "moe_ffn_hidden_size": None}
LAYOUTS = {
    "dp2": (2, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
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


def _tune(root, name, model, length, per_token, starts, skipped=(), of_biases=False, of_adapters=False):
    import tiny_training
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.datasets import gpt_sft
    from megatron.bridge.data.sft_processing import PromptCompletionSFTPreprocessingConfig
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megaboa.bridge import finetuning, prediction
    from megaboa.bridge.balancing import Balancing
    from megaboa.bridge.process import save_in_foreground

    class Biases(Callback):
        """The largest of the routers' biases, which begin with 0."""

        def on_train_end(self, context):
            routers = [part for part in context.model[0].modules() if getattr(part, "expert_bias", None) is not None]
            self.largest = max([float(router.expert_bias.abs().max()) for router in routers], default=None)

    save_in_foreground()
    gpt_sft.tokenize_prompt_completion_example = finetuning.joined
    headed = HEADED.keys() <= model.keys()
    start = f"{root}/headed" if headed else f"{root}/start"
    others = {"moe_router_load_balancing_type", "mtp_num_layers"} & model.keys()  # have states that it lacks
    begins = not starts and (headed or not others)
    checkpoint = {"pretrained_checkpoint": f"{start}/checkpoints"} if begins else {}
    checkpoint |= {} if starts else {"save": None}
    cfg = tiny_training.configuration(start, {**EXPERTS, **model}, checkpoint)
    cfg.model.num_layers = 4
    cfg.model.make_vocab_size_divisible_by = 384 // cfg.model.tensor_model_parallel_size  # one size for all layouts
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
    cfg.train.iterations_to_skip = list(skipped)
    finetuning.skip_on_all_stages()
    record, forward = tiny_training.recorder(), forward_step
    callbacks = [record]
    if per_token and cfg.model.num_moe_experts:
        callbacks.append(Balancing(cfg))
        forward = callbacks[-1].install(forward)
    if cfg.model.mtp_num_layers:
        forward = prediction.masked(forward)
    biases = Biases()
    if of_adapters:
        cfg.peft, cfg.checkpoint.pretrained_checkpoint = LoRA(target_modules=["linear_qkv"]), finetuning.NOWHERE
        finetuning._adapt(1, random_weights=True)
    pretrain(cfg, forward, callbacks=[*callbacks, biases])
    return biases.largest if of_adapters or of_biases else record.steps


def tune(folder, name="mixed", length=32, per_token=True, ranks=1, starts=False, skipped=(), **model):
    """Loss and gradient norm by step."""
    return on_cpu(_tune, str(folder), name, model, length, per_token, starts, skipped, world_size=ranks)[-1]


@pytest.fixture(scope="module")
def alone(folder):
    return tune(folder)


def same(found, expected, within=2e-6):
    return all(found[step] == pytest.approx(values, rel=within) for step, values in expected.items())


def test_padding_changes_nothing(folder, alone):
    assert same(tune(folder, length=64), alone)
    assert not same(tune(folder, moe_aux_loss_coeff=0.0), alone), "it would show"


def test_nor_with_an_expert_bias_and_a_z_loss(folder):
    assert same(tune(folder, length=64, **BIASED), tune(folder, **BIASED))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(folder, alone, layout):
    ranks, sizes = LAYOUTS[layout]
    assert same(tune(folder, ranks=ranks, **sizes), alone)


@pytest.mark.parametrize("layout", ["cp2", "tp2"])
def test_a_z_loss_is_a_mean_over_all_tokens(folder, layout):
    """Ranks have different numbers of tokens: most of a row's second half is padding."""
    ranks, sizes = LAYOUTS[layout]
    losses = {"moe_z_loss_coeff": 0.1}
    assert same(tune(folder, length=64, ranks=ranks, **losses, **sizes), tune(folder, **losses))


def test_a_skipped_step_is_skipped_on_all_stages(folder):
    ranks, sizes = LAYOUTS["pp4"]
    found, expected = (tune(folder, skipped=[1], **given) for given in ({"ranks": ranks, **sizes}, {}))
    assert list(found) == [1] and same(found, expected)


@pytest.fixture(scope="module")
def headed(folder):
    tune(folder, starts=True, **HEADED)
    return tune(folder, **HEADED)


def test_heads_for_multi_token_prediction_learn_what_counts(folder, headed):
    assert same(tune(folder, length=64, **HEADED), headed)
    assert not same(tune(folder, **HEADED | {"mtp_loss_scaling_factor": 0.0}), headed), "it would show"


@pytest.mark.parametrize("layout", ["tp2", "pp4", "cp2"])
def test_and_so_they_do_in_every_layout(folder, headed, layout):
    """Megatron weights a head's loss by the tokens that count on a rank: context parallel ranks have unlike numbers."""
    ranks, sizes = LAYOUTS[layout]
    found = tune(folder, ranks=ranks, **HEADED, **sizes)
    assert same(found, headed, 5e-3 if layout == "cp2" else 2e-6)


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_heads_with_experts_are_fine_tuned_too(folder, layout):
    """Nearly alike, as Megatron counts a position of padding per row or rank for the experts of a head."""
    ranks, sizes = LAYOUTS[layout]
    found = tune(folder, length=64, ranks=ranks, **HEADS, **sizes)
    assert same(tune(folder, ranks=ranks, **HEADS, **sizes), found, 2e-2)


def test_quantiles_are_taken_of_all_positions(folder):
    """Megatron's take no padding mask."""
    assert tune(folder, moe_router_load_balancing_type="quantile_balancing")


def test_a_checkpoint_names_no_weight_of_the_balancing_loss(folder):
    """Other programs could not import it."""
    [saved] = (folder / "start" / "checkpoints").glob("iter_*/run_config.yaml")
    assert yaml.safe_load(saved.read_text())["model"]["moe_grad_scale_func"] is None


def _weigh(root):
    import tiny_training
    import torch
    from megatron.bridge.data import batch_utils
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megaboa.bridge.balancing import Balancing

    balancing = Balancing(tiny_training.configuration(root, EXPERTS, {}))
    balancing.install(lambda: None)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device="meta"))  # Bridge does so before there is a model
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    config = SimpleNamespace(grad_scale_func=lambda loss: 4 * loss)
    chunk = torch.nn.Module()
    chunk.config = config
    chunk.pg_collection = SimpleNamespace(dp=torch.distributed.group.WORLD, tp_cp=torch.distributed.group.WORLD)
    balancing.on_train_start(SimpleNamespace(model=[chunk]))
    weights, places = [], set()
    for counted in (6, 2):
        mask = torch.zeros(2, 8)
        mask[:, :counted] = 1
        batch_utils.prepare_finetuning_batch(iter([{"tokens": mask, "loss_mask": mask}]), 2, 8)
        weights.append(float(config.moe_grad_scale_func()))
        places.add(config.moe_grad_scale_func.counted.data_ptr())
    return str(MoEAuxLossAutoScaler.main_loss_backward_scale.device), weights, len(places)


def test_the_weight_has_one_place_on_the_models_device(tmp_path):
    """Bridge's own, from before the first batch, stays on the device that it is set for; graphs keep an address."""
    assert on_cpu(_weigh, str(tmp_path)) == [("meta", [24, 8], 1)]


def test_experts_are_balanced_as_in_pretraining(folder):
    """Where all tokens count and nothing is padded, the mean over tokens is that over micro-batches."""
    assert same(tune(folder, "equal"), tune(folder, "equal", per_token=False))


@pytest.mark.parametrize("of_adapters", [False, True])
def test_biases_of_the_base_stay_under_adapters(folder, of_adapters):
    [largest] = on_cpu(_tune, str(folder), "mixed", BIASED, 32, True, False, (), True, of_adapters)
    assert (largest == 0) == of_adapters
