# Bridge's own configuration of every run, built and validated without a GPU.
rule preflight:
    input:
        SHARED.preflight_inputs,
        order=planned("specs/runs.json"),
        costs=ancient(planned.unchanged("specs/costs.json")),
    output:
        "<experiment>/preflight.json",
    log:
        "<experiment>/logs/preflight.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa preflight {input.order} --out {output} 2>&1 | tee -i {log}"


# The same with the image's packages, if there is an image: before a GPU is requested, but after the image is made. If
# nothing here can start the image, its manifest says so, and training continues.
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
        "python {params.scripts:q}/megaboa preflight-in-image {input.order} --image {input.image} --out {output} 2>&1 | tee -i {log}"
