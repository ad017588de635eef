# Explains every run that isn't PASS. No files: it reads ledgers and logs as they are.
rule doctor:
    log:
        f"{RESULTS}/logs/doctor.log",
    localrule: True
    conda:
        "../../envs/pipeline.yaml"
    params:
        scripts=SCRIPTS,
        results=RESULTS,
    shell:
        "python {params.scripts:q}/doctor.py {params.results} 2>&1 | tee {log}"
