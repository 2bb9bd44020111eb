"""An incident in MLflow: nothing to configure, the active run is found.

python examples/mlflow_example.py
mlflow ui --backend-store-uri sqlite:///mlflow.db
"""

from __future__ import annotations

import mlflow
from training import train

from stayfinite.integrations.mlflow import MLflowSink


def main() -> None:
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    with mlflow.start_run() as run:
        sink = MLflowSink()  # found without it; here it is asked when all is told
        train(sinks=[sink])
        sink.flush()
    print(mlflow.get_run(run.info.run_id).data.tags["stayfinite.last_incident"])


if __name__ == "__main__":
    main()
