# Bridge's own configuration of every run, built and validated without a GPU.
rule preflight:
    input:
        SHARED.preflight_inputs,
        order=planned("specs/runs.json"),
        costs=ancient(f"{RESULTS}/specs/costs.json"),
    output:
        f"{RESULTS}/preflight.json",
    log:
        f"{RESULTS}/logs/preflight.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/preflight.py {input.order} --out {output} 2>&1 | tee {log}"


# The same by the packages of the image, where there is one: before a GPU is asked for, but never before the image is made.
# Where nothing here can start the image, its manifest says so, and training goes on.
rule preflight_in_image:
    input:
        SHARED.preflight_inputs,
        image=SHARED.image_manifest,
        order=planned("specs/runs.json"),
        preflight=f"{RESULTS}/preflight.json",
    output:
        f"{RESULTS}/preflight-in-image.json",
    log:
        f"{RESULTS}/logs/preflight-in-image.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/preflight_in_image.py {input.order} --image {input.image} --out {output} 2>&1 | tee {log}"
