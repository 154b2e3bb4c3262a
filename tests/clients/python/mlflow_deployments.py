"""``predict_stream`` of MLflow's deployments client."""

from __future__ import annotations

import os

from mlflow.deployments import get_deploy_client
from report import ASKED, Seen, report


def read(url: str, seen: Seen, call: str) -> None:
    """One stream to its end."""
    os.environ |= {"DATABRICKS_HOST": url, "DATABRICKS_TOKEN": "tok-A"}
    for event in getattr(get_deploy_client("databricks"), call)(endpoint="sup-demo", inputs=ASKED):
        seen.note(event)


report(read)
