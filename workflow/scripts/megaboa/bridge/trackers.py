"""Attempts of a run as one run of a tracker."""

from __future__ import annotations

import os
from typing import Any

from megaboa import files
from megaboa.store_paths import RunStore


def continue_mlflow_run(store: RunStore, tracking_uri: str | None) -> None:
    """Let Bridge's logger continue the previous attempt's MLflow run instead of starting a new one.

    Bridge logs its whole configuration as parameters, and MLflow refuses changes to them (such as what is loaded), so
    existing ones stay as they are. For W&B, the environment makes all attempts one run (run/command.py).
    """
    import mlflow

    place = files.digest(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"))  # the address may contain a password
    earlier = files.read_json(store.mlflow_run) if store.mlflow_run.exists() else None
    if earlier and earlier["place"] == place:
        os.environ["MLFLOW_RUN_ID"] = earlier["run_id"]
    start_run, log_params = mlflow.start_run, mlflow.log_params

    def start(*args: Any, **kwargs: Any) -> Any:
        run = start_run(*args, **kwargs)
        files.write_json(store.mlflow_run, {"place": place, "run_id": run.info.run_id})
        return run

    def log_new(params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        known = mlflow.active_run().data.params
        return log_params({name: value for name, value in params.items() if name not in known}, *args, **kwargs)

    mlflow.start_run, mlflow.log_params = start, log_new
