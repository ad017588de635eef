rule get_model:
    input:
        lambda wildcards: SHARED.model_inputs(wildcards.model),
        spec=planned("specs/models/{model}.json"),
    output:
        "<experiment>/models/{model}/source.json",
    log:
        "<experiment>/logs/models/{model}.source.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa get-model --spec {input.spec} --out {output} 2>&1 | tee -i {log}"


rule import_model:
    input:
        source="<experiment>/models/{model}/source.json",
        image=lambda wildcards: INPUTS.image_of_conversion(
            f"{RESULTS}/models/{wildcards.model}/import.json"
        ),
    output:
        "<experiment>/models/{model}/import.json",
    log:
        "<experiment>/logs/models/{model}.import.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: ASKED.import_cores(wildcards.model)
    resources:
        **ASKED.imports(),
        mem_mb=lambda wildcards: SHARED.import_mb(wildcards.model, shared=1.2),
    params:
        scripts=SCRIPTS,
        convert=CONVERT,
        image=IMAGE,
        store=lambda wildcards: PLAN.experiment.store,
        device=PLAN.experiment.device,
    shell:
        "{params.convert} --logs {log}.ranks {params.scripts:q}/megaboa import-model --source {input.source} --store {params.store:q}"
        " --device {params.device} {params.image} --out {output} 2>&1 | tee -i {log}"


rule prove_import:
    input:
        source="<experiment>/models/{model}/source.json",
        imported="<experiment>/models/{model}/import.json",
        image=lambda wildcards: INPUTS.image_of_conversion(
            f"{RESULTS}/models/{wildcards.model}/proof.json"
        ),
    output:
        "<experiment>/models/{model}/proof.json",
    log:
        "<experiment>/logs/models/{model}.proof.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: ASKED.import_cores(wildcards.model)
    resources:
        **ASKED.imports(),
        mem_mb=lambda wildcards: SHARED.import_mb(
            wildcards.model, shared=1.2, whole=1.3
        ),
    params:
        scripts=SCRIPTS,
        convert=CONVERT,
        image=IMAGE,
    shell:
        "{params.convert} --logs {log}.ranks {params.scripts:q}/megaboa prove-import --source {input.source} --import {input.imported}"
        " {params.image} --out {output} 2>&1 | tee -i {log}"


# `import` is a Python keyword: a rule can have this name, but other rules can't refer to it by attribute.
rule:
    name:
        "import"
    input:
        SHARED.import_proofs,
