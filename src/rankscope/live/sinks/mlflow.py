"""Looks in a run of MLflow."""

import time
from typing import Any

from rankscope.live.monitor.looks import Look
from rankscope.live.sinks.scalars import imported, scalars

BATCH = 1000
"""MLflow takes no more metrics at once."""


class MLflow:
    """Into the run `run_id`, or the run that is active, or a new one of `experiment`, named `name`.

    `uri` is where MLflow keeps runs (its own setting where it is not given). A new run is ended with the
    monitor; another's is left open. Alarms are tags: `alarm/collapse/layer_03/step_000100`.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        experiment: str = "Default",
        name: str | None = None,
        uri: str | None = None,
    ) -> None:
        self.given, self.experiment, self.name, self.uri = run_id, experiment, name, uri
        self._client: Any = None
        self._id = ""
        self._own = False
        imported("mlflow")

    def __call__(self, look: Look) -> None:
        """The numbers of one look."""
        if self._client is None:
            self._begin()
        metric = imported("mlflow.entities").Metric
        now = int(time.time() * 1000)
        numbers = [metric(name, value, now, look.step) for name, value in scalars(look).items()]
        for start in range(0, len(numbers), BATCH):
            self._client.log_batch(self._id, metrics=numbers[start : start + BATCH])
        for alarm in look.alarms:
            where = [] if alarm.layer is None else [f"layer_{alarm.layer:02}"]
            where += [] if alarm.head is None else [f"head_{alarm.head:02}"]
            key = "/".join(["alarm", alarm.rule, *where, f"step_{look.step:06}"])
            self._client.set_tag(self._id, key, alarm.sentence)

    def close(self) -> None:
        """End the run, if it is ours."""
        if self._own and self._client is not None:
            self._client.set_terminated(self._id)
        self._client, self._own = None, False

    def _begin(self) -> None:
        mlflow = imported("mlflow")
        self._client = mlflow.MlflowClient(self.uri)
        if self.given is not None:
            self._id = self.given
        elif (active := mlflow.active_run()) is not None:
            self._id = active.info.run_id
        else:
            self._id, self._own = self._new(), True

    def _new(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        where = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        return str(self._client.create_run(where, run_name=self.name).info.run_id)
