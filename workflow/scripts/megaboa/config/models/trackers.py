"""TensorBoard, W&B and MLflow."""

from __future__ import annotations

from pydantic import field_validator, model_validator

from megaboa.config.models.section import Section, key
from megaboa.secrets import has_credentials


class WandB(Section):
    project: str | None = key(None, "project; default: the experiment's name")
    entity: str | None = key(None, "team or user that the project belongs to; default: the account's own")


class MLflow(Section):
    experiment: str | None = key(None, "experiment there; default: this one's name")
    tracking_uri: str | None = key(None, "where it is tracked; default: MLFLOW_TRACKING_URI, or MLflow's own default")

    @field_validator("tracking_uri")
    @classmethod
    def _without_password(cls, uri: str | None) -> str | None:
        if uri and has_credentials(uri):
            raise ValueError(
                "holds a password, which would be written to disk: leave it out, and export MLFLOW_TRACKING_USERNAME "
                "and MLFLOW_TRACKING_PASSWORD"
            )
        return uri


class Trackers(Section):
    """Where the ranks log to beside their own files. Changes no loss. Keys and passwords come from the environment."""

    tensorboard: bool = key(True, "event files in the folder of every attempt")
    wandb: WandB | None = key(None, "Weights & Biases; off. `wandb: {}` takes all defaults")
    mlflow: MLflow | None = key(None, "MLflow; off. `mlflow: {}` takes all defaults")
    offline: bool = key(False, "send nothing: write what they log into the run's store")

    @model_validator(mode="after")
    def _one_place(self) -> Trackers:
        if self.offline and self.mlflow and self.mlflow.tracking_uri:
            raise ValueError("offline writes to the store, and mlflow.tracking_uri names another place: remove one")
        return self
