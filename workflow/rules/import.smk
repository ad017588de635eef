rule get_model:
    input:
        lambda wildcards: SHARED.model_inputs(wildcards.model),
        spec=f"{RESULTS}/specs/models/{{model}}.json",
    output:
        f"{RESULTS}/models/{{model}}/source.json",
    log:
        f"{RESULTS}/logs/models/{{model}}.source.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/get_model.py --spec {input.spec} --out {output} 2>&1 | tee {log}"


rule import_model:
    input:
        SHARED.image_manifest,
        source=f"{RESULTS}/models/{{model}}/source.json",
    output:
        f"{RESULTS}/models/{{model}}/import.json",
    log:
        f"{RESULTS}/logs/models/{{model}}.import.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    resources:
        **CONVERSION_OF_MODEL,
        mem_mb=lambda wildcards: SHARED.conversion_mb(wildcards.model, copies=1.2),
    params:
        scripts=SCRIPTS,
        python=PYTHON,
        store=PLAN.experiment.store,
        device=PLAN.experiment.device,
    shell:
        "{params.python} {params.scripts:q}/import_model.py --source {input.source} --store {params.store:q} --device {params.device} --out {output}"
        " 2>&1 | tee {log}"


rule prove_import:
    input:
        SHARED.image_manifest,
        source=f"{RESULTS}/models/{{model}}/source.json",
        imported=f"{RESULTS}/models/{{model}}/import.json",
    output:
        f"{RESULTS}/models/{{model}}/proof.json",
    log:
        f"{RESULTS}/logs/models/{{model}}.proof.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    resources:
        **CONVERSION_OF_MODEL,
        mem_mb=lambda wildcards: SHARED.conversion_mb(wildcards.model, copies=2.5),
    params:
        scripts=SCRIPTS,
        python=PYTHON,
    shell:
        "{params.python} {params.scripts:q}/prove_import.py --source {input.source} --import {input.imported} --out {output}"
        " 2>&1 | tee {log}"


# `import` is a keyword of Python: a rule can be called so, but other rules can't refer to it by attribute.
rule:
    name:
        "import"
    input:
        SHARED.import_proofs,
