"""Validate every run of an experiment against our rules and against Bridge, without a GPU, and say what each will take.

`python workflow/scripts/preflight.py results/<experiment>/specs/runs.json --out FILE`; the table lies beside it (.tsv).
"""

import argparse
import sys
from pathlib import Path

from megaboa import files
from megaboa.bridge import process, zygote
from megaboa.bridge.quiet import quietly
from megaboa.check import costs, overview, refusals
from megaboa.paths import ExperimentFolder, RunFolder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("order", type=Path, help="the experiment's specs/runs.json, with the names of the runs")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    order, folder = files.read_json(arguments.order), arguments.order.parents[1]
    specs = ExperimentFolder(folder).specs
    added_up = files.read_json(specs.costs)

    with quietly():
        process.prepare("cpu")
        from megaboa.bridge.preflight import check

        found = check(folder, order["runs"])
    runs = {name: result for name, (result, _) in found.items()}
    speeds = costs.measured_speeds(folder.parent)
    expected = {name: expected_costs(folder, added_up, name, facts, speeds) for name, (_, facts) in found.items()}
    rows = [overview.row(name, result, facts, expected[name]) for name, (result, facts) in found.items()]
    total = costs.total(expected.values())
    files.write_text(arguments.out.with_suffix(".tsv"), overview.tsv(rows))
    print(overview.text(rows, total))
    for warning in refusals.grouped({name: result.get("warnings", []) for name, result in runs.items()}):
        print(f"warning: {warning}", file=sys.stderr)
    for left in refusals.grouped({name: unchecked(result) for name, result in runs.items()}):
        print(f"not checked here: {left}", file=sys.stderr)
    if "container" in files.read_json(specs.inside):
        print("The image is asked before training, or by `snakemake preflight_in_image`.", file=sys.stderr)

    refused = {name: result["reasons"] for name, result in runs.items() if result["state"] == "FAIL"}
    if refused:
        print("\n".join(refusals.grouped(refused, "is refused", "are refused")), file=sys.stderr)
        print(f"{len(refused)} of {len(runs)} runs could never work; nothing was trained.", file=sys.stderr)
        if order["skip_illegal"]:
            refusals.write(folder, refused)
            print("They are INVALID: the same command, given again, leaves them out.", file=sys.stderr)
        return 1
    exceeded = costs.over_budget(total, added_up["budget"]["gpu_hours"], added_up["budget"]["disk"])
    for key, problem in exceeded.items():
        print(f"{key}: {problem}: raise it, or plan less; nothing was trained.", file=sys.stderr)
    if exceeded:
        return 1
    files.write_json(arguments.out, {"runs": runs})
    print(f"{len(runs)} runs are accepted by Bridge")
    return 0


def unchecked(result):
    """What only the image can check."""
    stopped = result.get("stopped_at")
    return [*result.get("needs_image", []), *([f"needs the image: {stopped}"] if stopped else [])]


def expected_costs(folder, added_up, name, facts, speeds):
    if facts is None:
        return None
    run = RunFolder(folder / "runs" / name)
    measured = speeds.get(costs.speed_key(run.run, run.launch.gpu))
    mfu, exported = added_up["budget"]["mfu"], name in added_up["exports"]
    return costs.of_run(facts, given=run.launch.step_seconds, measured=measured, mfu=mfu, exported=exported)


if __name__ == "__main__":
    zygote.hand_over()
    sys.exit(main())
