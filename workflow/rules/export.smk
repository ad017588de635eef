rule export:
    input:
        SHARED.export_proofs,
        SHARED.along,


rule export_model:
    input:
        train="<experiment>/runs/{run}/train.json",
        source=lambda wildcards: f"<experiment>/models/{RUNS[wildcards.run].model}/source.json",
        spec=planned("specs/exports/{run}.json"),
        image=lambda wildcards: INPUTS.image_of_conversion(
            f"{RESULTS}/runs/{wildcards.run}/export.json"
        ),
    output:
        "<experiment>/runs/{run}/export.json",
    log:
        "<experiment>/logs/export/{run}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: ASKED.import_cores(RUNS[wildcards.run].model)
    resources:
        **ASKED.exports(),
        mem_mb=lambda wildcards: SHARED.export_mb(wildcards.run, copies=2),
    params:
        scripts=SCRIPTS,
        python=lambda wildcards: job_commands.export_command(
            SHARED, PYTHON, CONVERT, wildcards.run, "export"
        ),
        image=IMAGE,
    shell:
        "{params.python} {params.scripts:q}/megaboa export-model --spec {input.spec} --source {input.source} {params.image} --out {output}"
        " 2>&1 | tee -i {log}"


rule prove_export:
    input:
        export="<experiment>/runs/{run}/export.json",
        source=lambda wildcards: f"<experiment>/models/{RUNS[wildcards.run].model}/source.json",
        image=lambda wildcards: INPUTS.image_of_conversion(
            f"{RESULTS}/runs/{wildcards.run}/proof.json"
        ),
    output:
        "<experiment>/runs/{run}/proof.json",
    log:
        "<experiment>/logs/export/{run}.proof.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: ASKED.import_cores(RUNS[wildcards.run].model)
    resources:
        **ASKED.exports(),
        mem_mb=lambda wildcards: SHARED.export_mb(
            wildcards.run, copies=3.5, proves=True
        ),
    params:
        scripts=SCRIPTS,
        python=lambda wildcards: job_commands.export_command(
            SHARED, PYTHON, CONVERT, wildcards.run, "proof"
        ),
        image=IMAGE,
    shell:
        "{params.python} {params.scripts:q}/megaboa prove-export --export {input.export} --source {input.source}"
        " {params.image} --out {output} 2>&1 | tee -i {log}"


# Exports the kept checkpoints of a run one by one. `megaboa export-along` may have made some of them during training.
rule export_along:
    input:
        train="<experiment>/runs/{run}/train.json",
        source=lambda wildcards: f"<experiment>/models/{RUNS[wildcards.run].model}/source.json",
        spec=planned("specs/along/{run}.json"),
        image=lambda wildcards: INPUTS.image_of_conversion(
            f"{RESULTS}/runs/{wildcards.run}/export.json"
        ),
    output:
        "<experiment>/runs/{run}/along.json",
    log:
        "<experiment>/logs/export/{run}.along.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: ASKED.import_cores(RUNS[wildcards.run].model)
    resources:
        **ASKED.along(),
        mem_mb=lambda wildcards: SHARED.export_mb(
            wildcards.run, copies=3.5, proves=True
        ),
    params:
        scripts=SCRIPTS,
        run=lambda wildcards: f"{RESULTS}/runs/{wildcards.run}",
    shell:
        "python {params.scripts:q}/megaboa export-along {params.run:q} --out {output} 2>&1 | tee -i {log}"


# Not part of `all`: the checkpoint's and the export's answers to the prompts of `generate`.
rule generate:
    input:
        SHARED.generations,


rule generate_text:
    input:
        export="<experiment>/runs/{run}/export.json",
        source=lambda wildcards: f"<experiment>/models/{RUNS[wildcards.run].model}/source.json",
        spec=planned("specs/generate.json"),
        image=lambda wildcards: INPUTS.image_of_conversion(
            f"{RESULTS}/runs/{wildcards.run}/generations.json"
        ),
    output:
        "<experiment>/runs/{run}/generations.json",
    log:
        "<experiment>/logs/export/{run}.generate.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: ASKED.import_cores(RUNS[wildcards.run].model)
    resources:
        **ASKED.exports(),
        mem_mb=lambda wildcards: SHARED.export_mb(
            wildcards.run, copies=2.5, proves=True
        ),
    params:
        scripts=SCRIPTS,
        python=lambda wildcards: job_commands.export_command(
            SHARED, PYTHON, CONVERT, wildcards.run, "generate"
        ),
        image=IMAGE,
    shell:
        "{params.python} {params.scripts:q}/megaboa generate --spec {input.spec} --export {input.export} --source {input.source} {params.image} --out {output}"
        " 2>&1 | tee -i {log}"


# Not part of `all` either: uploads only run when named.
rule push:
    input:
        SHARED.pushes,


rule push_model:
    input:
        export="<experiment>/runs/{run}/export.json",
        proof="<experiment>/runs/{run}/proof.json",
    output:
        "<experiment>/runs/{run}/push.json",
    log:
        "<experiment>/logs/export/{run}.push.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
        repository=lambda wildcards: PLAN.experiment.export.push[wildcards.run],
        private="--private" if PLAN.experiment.export.private else "--no-private",
    shell:
        "python {params.scripts:q}/megaboa push-model --export {input.export} --proof {input.proof} --repository {params.repository:q} {params.private}"
        " --out {output} 2>&1 | tee -i {log}"
