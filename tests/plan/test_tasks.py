"""megaboa.plan.tasks: what fine-tuning asks of an experiment, and what a run's identity holds of it."""

import pytest

from megaboa.check import adapters, costs, flops, memory, parameters
from megaboa.check.stages import stages
from megaboa.config import ConfigError
from megaboa.files import digest
from megaboa.plan import specifications, tasks
from megaboa.plan.shared import Shared
from megaboa.records import CorpusSpec, parse

CHATS = "corpora: {text: {source: python-stdlib}, chats: {source: python-stdlib, messages: messages}}\n"
TUNED = CHATS + "data: {blend: chats}\nmodels: {dense: {init: pretrained}}\ntask: %s\n"


def run_of(plan_of, task, more="", **given):
    [run] = plan_of(TUNED % task + more, **{"training.train_iters": 10, **given}).runs
    return run


def refusal(plan_of, text):
    with pytest.raises(ConfigError) as error:
        plan_of(text, **{"training.train_iters": 10})
    return str(error.value)


def test_the_identity_holds_the_task_and_what_is_of_it(plan_of, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    sft = run_of(plan_of, "sft", f"tuning: {{template: {template}, rank: 4}}\n").documents["run"]
    common = {"samples": 2, "loss_on": "answers", "pack": False}
    assert (sft["task"], sft["tuning"]) == ("sft", {"template": "{{ messages }}", **common})
    lora = run_of(plan_of, "lora", "tuning: {rank: 4, targets: [linear_qkv]}\n").documents["run"]["tuning"]
    assert lora == {
        **{"template": None, **common},
        **{"rank": 4, "alpha": 32, "dropout": 0.0, "targets": ["linear_qkv"]},
    }


def test_a_prompt_may_have_several_fields(plan_of, tmp_path):
    text = TUNED.replace("messages: messages", "prompt: [instruction, input], answer: output") % "sft"
    specs = specifications.contents(Shared(plan_of(text, **{"training.train_iters": 10}), tmp_path))
    assert parse(CorpusSpec, specs["corpora/chats.json"], "spec").example_keys == ("instruction", "input", "output")


def test_pretraining_knows_nothing_of_it(plan_of):
    [run] = plan_of("tuning: {rank: 4}\n").runs
    assert not {"task", "tuning"} & run.documents["run"].keys()
    [plain] = plan_of().runs
    assert digest(run.documents["run"]) == digest(plain.documents["run"])


def test_a_sweep_over_tasks_shares_one_index_of_the_examples(plan_of):
    plan = plan_of(TUNED % "sft" + "sweep: {grid: {task: [sft, lora, dora]}}\n", **{"training.train_iters": 10})
    assert [run.name for run in plan.runs] == ["task-sft", "task-lora", "task-dora"] and plan.runs[0].launch.index
    assert len({run.launch.index for run in plan.runs}) == 1
    other = plan_of(TUNED % "sft" + "tuning: {loss_on: everything}\n", **{"training.train_iters": 10})
    assert other.runs[0].launch.index != plan.runs[0].launch.index


def test_other_samples_of_the_same_examples_are_another_run(plan_of, monkeypatch):
    """Which otherwise would read an index of former masks, or resume with new ones."""
    plans = []
    for version in (1, tasks.SAMPLES):
        monkeypatch.setattr(tasks, "SAMPLES", version)
        plans.append(plan_of(TUNED % "sft", **{"training.train_iters": 10}).runs[0])
    before, now = plans
    assert before.launch.index != now.launch.index and before.digest != now.digest
    assert costs.speed_key(before.run, None) == costs.speed_key(now.run, None), "it is as fast as it was"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CHATS + "data: {blend: chats}\n", "'chats' holds examples for fine-tuning: set task to sft, lora or dora"),
        (CHATS + "data: {blend: text}\ntask: sft\nmodels: {dense: {init: pretrained}}\n", "corpora.text.messages"),
        (
            (TUNED % "sft").replace("blend: chats", "blend: chats, eod_mask_loss: true"),
            "eod_mask_loss: applies to text",
        ),
        (CHATS + "data: {blend: chats}\ntask: sft\n", "models.dense.init: is scratch, and sft needs a trained model"),
        (TUNED % "sft" + "tuning: {template: none}\n", "is `none`, and 'chats' holds conversations"),
        (TUNED % "sft" + "tuning: {template: no.jinja}\n", "there is no file 'no.jinja'"),
        (TUNED % "lora" + "tuning: {pack: true}\n", "packed sequences need a GPU's attention"),
        (TUNED % "lora" + "tuning: {pack: true}\ntraining: {micro_batch_size: 2}\n", "set it to 1, or tuning.pack"),
        (TUNED % "lora" + "parallel: {fsdp: torch}\ndevice: cuda\n", "lora trains adapters alone: set it to none"),
        (
            (TUNED % "lora").replace("init:", "config: {model_type: qwen3_moe, num_experts: 4}, init:"),
            "adapters to experts",
        ),
        (TUNED % "lora" + "tuning: {targets: [linear_proj, v_proj]}\n", "'v_proj' ends with the name of no layer"),
        (TUNED % "lora" + "tuning: {targets: [down_proj]}\n", "nearest: linear_fc2"),
        (TUNED % "lora" + "tuning: {targets: ['linear_(qkv']}\n", "tuning.targets"),
        (
            (TUNED % "lora").replace("init:", "config: {model_type: deepseek_v3}, init:")
            + "tuning: {targets: [linear_qkv]}\n",
            "they are linear_q_down_proj, linear_q_up_proj, linear_kv_down_proj, linear_kv_up_proj, linear_proj",
        ),
        (
            (TUNED % "sft").replace("init:", "config: {model_type: qwen2_5_vl}, init:"),
            "task: sft reads text, and vision and language (Qwen2.5-VL) is trained here on images",
        ),
        (
            TUNED % "sft" + "sweep: {runs: {base: {continue_from: itself}}}\n",
            "task: sft begins with weights alone, at its own step 0, so it can't continue in place",
        ),
        (
            (TUNED % "lora").replace("init:", "conversion: {tp: 2}, init:") + "export: {runs: all}\n",
            "trains adapters, which one process merges: remove it, or, once the model is imported, "
            "models.dense.conversion",
        ),
        (
            "models: {dense: {recipe: recipes/bert.py, config: null}}\n" + CHATS + "data: {blend: chats}\ntask: lora\n",
            "and 'dense' has a recipe: set it to pretrain, or name another model",
        ),
        (
            (TUNED % "lora").replace("blend: chats", "blend: chats, validation_sets: {more: chats}"),
            "validation_sets: applies to text, and task: lora reads examples",
        ),
        (CHATS.replace("messages: messages", "prompt: question"), "need messages, or prompt and answer"),
        (CHATS.replace("messages: messages", "messages: m, text_key: t"), "remove text_key"),
        ("tsk: sft\n", "did you mean 'task'"),
    ],
)
def test_what_can_not_be_is_said_with_the_remedy(plan_of, text, said):
    assert said in refusal(plan_of, text)


@pytest.mark.parametrize("task", ["sft", "lora"])
def test_packed_examples_are_not_cut_over_context_ranks_for_heads(plan_of, task):
    text = TUNED % task + "tuning: {pack: true}\noverrides: {model.mtp_num_layers: 1}\ndevice: cuda\n"
    given = {"training.train_iters": 10, "resources.gpus_per_node": 2, "training.micro_batch_size": 1}
    assert plan_of(text, **given).runs
    with pytest.raises(ConfigError, match=r"tuning.pack: .* set parallel.cp to 1.*heads_learn_within_examples"):
        plan_of(text, **given, **{"parallel.cp": 2})


def test_adapters_to_random_weights_are_for_measuring(plan_of):
    plan = plan_of((TUNED % "lora").replace("pretrained", "scratch"), **{"training.train_iters": 10})
    assert [warning for warning in plan.warnings if "changes random weights" in warning]
    text = (TUNED % "lora").replace("pretrained", "scratch") + "export: {runs: all}\n"
    assert "which are in no checkpoint" in refusal(plan_of, text)


def test_continue_from_begins_at_step_0_with_the_weights_alone(plan_of):
    runs = "sweep: {runs: {base: {task: pretrain, data.blend: text}, tuned: {continue_from: small/base}}}\n"
    plan = plan_of(TUNED % "lora" + runs, **{"training.train_iters": 10})
    parent = plan.runs[1].run.parent
    assert (parent.iteration, parent.steps_done, parent.load.optimizer, parent.weights_only) == (10, 0, False, True)
    runs = runs.replace("tuned:", "tuned: {}, more:").replace("small/base", "small/tuned")
    message = refusal(plan_of, TUNED % "lora" + runs)
    assert "small/tuned trained adapters (task: lora), and its checkpoints hold nothing else" in message


def test_of_frozen_weights_there_are_no_gradients_and_no_optimizer(plan_of):
    whole, lora, dora = (run_of(plan_of, task, "tuning: {rank: 8}\n").facts for task in ("sft", "lora", "dora"))
    count = parameters.of_stage(whole, stages(whole)[0]).total
    [added] = [adapters.of_stage(lora, stage) for stage in stages(lora)]
    hidden, ffn, layers = 4096, 128, 2  # llama's own size, as the experiment names none
    assert whole.model.hidden == hidden
    expected = layers * 8 * (hidden + 3 * hidden + 2 * hidden + hidden + 2 * ffn + ffn + hidden)
    assert added == expected
    weight, gradient, optimizer = memory.bytes_per_parameter(lora)
    found = memory.peak(lora)
    assert found.weights == weight * (count + added)
    assert (found.gradients, found.optimizer) == (gradient * added, optimizer * added)
    assert memory.peak(whole).gradients == gradient * count
    assert adapters.of_model(dora) == added + layers * (3 * hidden + 2 * hidden + 2 * ffn)
    assert 0.66 < flops.of_step(lora) / flops.of_step(whole) < 0.75
