# `snakemake tune` plans another experiment (plan/tuning.py): a run of the user's in every legal setting that fits. One job
# tries them in turn, and resumes where an earlier call was cut off: the trials are in the store.
rule tune:
    input:
        lambda wildcards: calls.tuned(SHARED),


rule try_settings:
    input:
        SHARED.tried,
        image=SHARED.image_manifest,
        spec=planned("specs/tune.json"),
    output:
        "<experiment>/tune.json",
    log:
        "<experiment>/logs/tune.log",
    retries: 0
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: ASKED.cores(PLAN.runs[0].name)
    resources:
        **ASKED.trials(RULE_NAME("try_settings")),
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa tune --spec {input.spec} --out {output} 2>&1 | tee {log}"


# Measures what predictions of step times need, by the ranks of the run with most GPUs per node, where they are started.
rule calibrate:
    input:
        f"{RESULTS}/calibration.json",


rule measure_machine:
    input:
        SHARED.image_manifest,
    output:
        "<experiment>/calibration.json",
    log:
        "<experiment>/logs/calibration.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: ASKED.cores(ASKED.calibrated)
    resources:
        **ASKED.calibration(RULE_NAME("measure_machine")),
    params:
        scripts=SCRIPTS,
        run=f"{RESULTS}/runs/{ASKED.calibrated}/run.json",  # no input: other steps or losses measure nothing else
    shell:
        "python {params.scripts:q}/megaboa calibrate --run {params.run:q} --out {output} 2>&1 | tee {log}"
