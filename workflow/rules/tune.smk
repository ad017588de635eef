# `snakemake tune` plans another experiment (plan/trials.py): one of the user's runs in every legal setting that fits. One
# job tries them in turn. It resumes an interrupted call, because the trials are in the store.
rule tune:
    input:
        lambda wildcards: configuration.tuned(SHARED),


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
        "python {params.scripts:q}/megaboa tune --spec {input.spec} --out {output} 2>&1 | tee -i {log}"


# Measures the inputs of step time predictions, with ranks started like those of the run with the most GPUs per node.
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
        run=f"{RESULTS}/runs/{ASKED.calibrated}/run.json",  # no input: changed steps or losses need no new measurement
    shell:
        "python {params.scripts:q}/megaboa calibrate --run {params.run:q} --out {output} 2>&1 | tee -i {log}"
