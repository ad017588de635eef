# As a conversion: one GPU for models that were trained on GPUs, and what the experiment asks for beside it.
EVALUATION_OPTIONS = f"{CONVERSION_OF_RUN.get('slurm_extra', '')} {PLAN.experiment.evaluate.slurm_extra}".strip()


rule evaluate:
    input:
        SHARED.evaluations,


rule evaluate_model:
    input:
        export=f"{RESULTS}/runs/{{run}}/export.json",
        proof=f"{RESULTS}/runs/{{run}}/proof.json",
        spec=planned("specs/evaluate.json"),
    output:
        f"{RESULTS}/runs/{{run}}/evaluation.json",
    log:
        f"{RESULTS}/logs/evaluate/{{run}}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    resources:
        **{**CONVERSION_OF_RUN, "slurm_extra": EVALUATION_OPTIONS},
        mem_mb=lambda wildcards: SHARED.conversion_mb(
            RUNS[wildcards.run].model, copies=2.5
        ),
        runtime=PLAN.experiment.evaluate.runtime,
    params:
        scripts=SCRIPTS,
        store=PLAN.experiment.store,
    shell:
        "python {params.scripts:q}/evaluate.py --spec {input.spec} --export {input.export} --store {params.store:q}"
        " --out {output} 2>&1 | tee {log}"
