"""Fine-tuning from a run of ours: layouts agree, a killed run goes on bit for bit, exports are what was trained."""

import json
import os
import re
import signal
import sysconfig
from pathlib import Path

import pytest
from clone import edit
from transformers import AutoTokenizer, GenerationConfig

pytestmark = pytest.mark.slow

STEPS, SAVE_INTERVAL, KILLED_AT = 30, 6, 7
TWO = "resources.gpus_per_node: 2"
BASE = "data.blend: text, training.train_iters: 4, training.eval_iters: 0"
FROM = "continue_from: tuned/base@4"
LAYOUTS = {"dp2": "parallel.tp: 1", "tp2": "parallel.tp: 2, parallel.sp: true", "pp2": "parallel.pp: 2"}
COUNTED = ", ".join(f"overrides.model.account_for_{part}_in_pipeline_split: true" for part in ("embedding", "loss"))
OF_LORA = {**LAYOUTS, "pp2": f"parallel.pp: 2, parallel.vpp: 2, {COUNTED}"}  # four stages, of which two hold a layer
TALKS = "data.blend: talks, tuning.template: eos.jinja"
LAST = f"{TALKS}, tuning.loss_on: last-answer"
RUNS = {
    "base": f"{{{BASE}}}",
    "sft": f"{{task: sft, {FROM}}}",
    **{f"sft-{name}": f"{{task: sft, {FROM}, {TWO}, {values}}}" for name, values in LAYOUTS.items()},
    "lora": f"{{task: lora, {FROM}}}",
    **{f"lora-{name}": f"{{task: lora, {FROM}, {TWO}, {values}}}" for name, values in OF_LORA.items()},
    "lora-cp2": f"{{task: lora, {FROM}, {TWO}, parallel.cp: 2}}",
    "lora-imported": f"{{task: lora, tuning.targets: [linear_qkv], {TALKS}, training.precision: bf16_mixed}}",
    "dora": f"{{task: dora, {FROM}, {LAST}}}",
    "dora-pp2": f"{{task: dora, {FROM}, {LAST}, {TWO}, {LAYOUTS['pp2']}}}",
}
MORE = """\
export: {runs: [lora, dora, lora-imported, sft]}
recovery: {backoff_seconds: 0}
report:
  agreements:
    - {reference: sft, runs: [sft-dp2, sft-tp2, sft-pp2], grad_norm_tolerance: 1.0e-5}
    - {reference: lora, runs: [lora-dp2, lora-tp2, lora-pp2, lora-cp2], grad_norm_tolerance: 1.0e-5}
    - {reference: dora, runs: [dora-pp2], grad_norm_tolerance: 1.0e-5}
"""


def experiment(workspace, name, runs, more=""):
    config = workspace.experiment(name, runs, STEPS, SAVE_INTERVAL, more)
    corpora = """limit: 60}
  chats: {source: python-stdlib, prompt: question, answer: answer, limit: 400}
  talks: {source: talks.jsonl, messages: talk}
"""
    edit(config, "limit: 60}\n", corpora)
    edit(config, 'data: {split: "90,5,5"}', 'data: {split: "94,6,0", blend: chats}')
    tuning = "tuning: {template: config/experiments/templates/chatml.jinja, rank: 4, alpha: 8}\n"
    edit(config, "training:", f"{tuning}training:")
    edit(config, "seq_length: 64, precision: fp32}", "seq_length: 128, precision: fp32, eval_interval: 15}")
    edit(config, "warmup_iters: 2}", "warmup_iters: 2}\noptimizer: {lr: 1.0e-2}")
    return config


def turn(number, place):
    """Of four: two questions, each with its answer."""
    said = (f"{number}?", str(number + 1), "and then?", str(number + 2))[place]
    return {"role": ("user", "assistant")[place % 2], "content": said}


@pytest.fixture(scope="module")
def tuned(workspace):
    """One experiment, from the parent's pretraining to the report."""
    talks = ([turn(number, place) for place in range(4)] for number in range(200))
    (workspace.path / "talks.jsonl").write_text("".join(json.dumps({"talk": talk}) + "\n" for talk in talks))
    chatml = (workspace.path / "config/experiments/templates/chatml.jinja").read_text()
    (workspace.path / "eos.jinja").write_text(chatml.replace("'<|im_end|>'", "eos_token"))
    config = experiment(workspace, "tuned", RUNS, MORE)
    workspace.output = workspace.snakemake("--configfile", config)
    return workspace


def test_all_layouts_agree_and_every_task_learns(tuned):
    checks = tuned.json("tuned", "report", "checks.json")
    assert checks["state"] == "PASS", checks
    for run in ("sft", "lora", "dora", "lora-imported"):
        curve = [float.fromhex(loss) for _, loss, _ in tuned.steps("tuned", run)]
        assert len(curve) == STEPS and sum(curve[-3:]) / 3 < curve[0] - 0.05
    assert tuned.steps("tuned", "sft")[0][1] == tuned.steps("tuned", "lora")[0][1], "adapters begin with adding nothing"


def test_only_adapters_are_saved_and_no_weight_of_the_base(tuned):
    size = {run: tuned.json("tuned", "runs", run, "train.json")["checkpoints"][-1]["bytes"] for run in ("sft", "lora")}
    assert size["lora"] < size["sft"] / 2


def test_exports_are_the_base_and_the_adapters_and_peft_reads_them(tuned):
    for run in ("lora", "dora", "lora-imported"):
        proof = tuned.json("tuned", "runs", run, "proof.json")
        checks = {one["name"]: one for one in proof["checks"]}
        assert {"merged", "logits", "second export", "validation loss"} <= checks.keys()
        assert all(one["state"] == "PASS" for one in checks.values())
        assert ("trained" in checks) == (run == "lora-imported"), "after continue_from `merged` says it"
        has_peft = Path(sysconfig.get_path("purelib"), "peft").is_dir()  # of `make setup`
        assert ("peft" in checks) == has_peft and ("peft" in (proof["left_out"] or {})) != has_peft
        export = tuned.results("tuned", "runs", run, "export")
        adapter = json.loads((export / "adapter" / "adapter_config.json").read_text())
        assert (adapter["r"], adapter["lora_alpha"], adapter["use_dora"]) == (4, 8, run == "dora")
        base = adapter["base_model_name_or_path"]
        assert base == "tuned/base@4" or (run == "lora-imported" and "models/dense" in base), base
        others = set() if run == "lora-imported" else {"o_proj", "gate_proj", "up_proj", "down_proj"}
        assert set(adapter["target_modules"]) == {"q_proj", "k_proj", "v_proj"} | others
        assert "{% generation %}" in (export / "chat_template.jinja").read_text()
        assert "`adapter/`; here they are merged" in (export / "README.md").read_text()


def test_the_weights_are_compared_with_those_of_the_parent(tuned):
    proof = tuned.json("tuned", "runs", "sft", "proof.json")
    said = {one["name"]: one["detail"] for one in proof["checks"]}
    changed, count = re.match(r"(\d+) of (\d+) parameters differ from those of tuned/base@4", said["trained"]).groups()
    assert changed == count
    config = experiment(tuned, "still", {"sft": RUNS["sft"]}, "export: {runs: all}\n")
    edit(config, "{lr: 1.0e-2}", "{lr: 1.0e-30}")
    output = tuned.snakemake("--configfile", config, code=1)
    assert "0 of" in output and "parameters differ from those of tuned/base@4" in output


def test_generation_ends_as_answers_do(tuned):
    for run in ("dora", "lora-imported"):
        export = tuned.results("tuned", "runs", run, "export")
        words = AutoTokenizer.from_pretrained(export)
        checks = {one["name"]: one for one in tuned.json("tuned", "runs", run, "proof.json")["checks"]}
        assert checks["stops"]["state"] == "PASS"
        assert f"answers end with {words.eos_token}, generation with" in checks["stops"]["detail"]
        assert words.eos_token_id in GenerationConfig.from_pretrained(export).eos_token_id
    for run in ("sft", "lora"):  # to their tokenizer <|im_end|> is ordinary text
        proof = tuned.json("tuned", "runs", run, "proof.json")
        assert "stops" not in {one["name"] for one in proof["checks"]}
        assert "set eos_token_id where text is generated" in proof["left_out"]["stops"]


def test_the_report_shows_which_tokens_count(tuned):
    page = tuned.results("tuned", "report", "index.html").read_text()
    shown = [part.split("</pre>")[0] for part in page.split('<pre class="example">')[1:]]
    before, marked = next(one for one in shown if "What does" in one).split("<mark>")
    assert "&lt;|im_start|&gt;user\nWhat does" in before and marked.count("&lt;|im_end|&gt;") == 1
    assert marked.endswith("&lt;|im_end|&gt;</mark>\n")
    talks = [re.findall("<mark>(.*?)</mark>", one, re.DOTALL) for one in shown if "and then?" in one]
    one, two = sorted(talks, key=len)  # of a conversation its last answer, or both
    assert (len(one), len(two)) == (1, 2) and two[1:] == one
    first, last = (int(answer.removesuffix("&lt;|endoftext|&gt;")) for answer in two)
    assert last == first + 1


def test_all_turns_of_a_conversation_are_read_and_the_asked_ones_count(tuned):
    index = {run: tuned.json("tuned", "runs", run, "launch.json")["index"] for run in ("lora-imported", "dora")}
    read = {run: tuned.json("tuned", "data", "indexes", f"{name}.json")["examples"] for run, name in index.items()}
    assert all((one["examples"], one["cut"], one["silent"]) == (188, 0, 0) for one in read.values())
    assert read["lora-imported"]["tokens"] == read["dora"]["tokens"]
    assert read["dora"]["counted"] < read["lora-imported"]["counted"] < read["dora"]["tokens"] / 2


def test_killed_runs_go_on_bit_for_bit(tuned):
    """Adapters with the base that they change, in two ranks, and the whole model."""
    runs = {name: RUNS[name] for name in ("sft", "lora-tp2")}
    config = experiment(tuned, "killed", runs, "recovery: {backoff_seconds: 0}\n")
    for run in runs:
        process = tuned.start(f"results/killed/runs/{run}/train.json", "--configfile", config)
        os.kill(tuned.wait_for_step("killed", run, KILLED_AT)[-1], signal.SIGKILL)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
    for run in runs:
        assert len(list((tuned.store("killed", run) / "attempts").iterdir())) == 2
        assert tuned.steps("killed", run) == tuned.steps("tuned", run)


def test_a_template_for_other_conversations_is_refused_before_anything_trains(tuned):
    (tuned.path / "other.jinja").write_text("{% for m in messages %}{{ m['from'] }}: {{ m['value'] }}\n{% endfor %}")
    config = experiment(tuned, "wrong", {"sft": RUNS["sft"]})
    edit(config, "config/experiments/templates/chatml.jinja", "other.jinja")
    output = tuned.snakemake("pretrain", "--configfile", config, code=1)
    assert "tuning.template" in output and "chat template" in output
    assert not tuned.results("wrong", "runs", "sft", "attempts.jsonl").exists()
