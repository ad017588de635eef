# Bridge's own configuration of every run, built and validated without a GPU.
rule preflight:
    input:
        SHARED.preflight_inputs,
        order=planned("specs/runs.json"),
        costs=ancient("<experiment>/specs/costs.json"),
    output:
        "<experiment>/preflight.json",
    log:
        "<experiment>/logs/preflight.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa preflight {input.order} --out {output} 2>&1 | tee {log}"


# The same by the packages of the image, where there is one: before a GPU is asked for, but never before the image is made.
# Where nothing here can start the image, its manifest says so, and training goes on.
rule preflight_in_image:
    input:
        SHARED.preflight_inputs,
        image=SHARED.image_manifest,
        order=planned("specs/runs.json"),
        preflight="<experiment>/preflight.json",
    output:
        "<experiment>/preflight-in-image.json",
    log:
        "<experiment>/logs/preflight-in-image.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa preflight-in-image {input.order} --image {input.image} --out {output} 2>&1 | tee {log}"
