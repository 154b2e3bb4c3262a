"""openai-python's ``responses.create(stream=True)`` and ``responses.stream()``, and databricks-openai's.

CALL is ``create`` or ``stream``, with ``databricks-`` in front for ``DatabricksOpenAI``.
"""

from __future__ import annotations

import os
from typing import Any

from report import ASKED, Seen, report

BODY: dict[str, Any] = {
    "model": "sup-demo",
    "input": ASKED["input"],
    "extra_body": {"databricks_options": ASKED["databricks_options"]},
}


def client(url: str, call: str) -> Any:
    """The client as its own documentation makes it."""
    if call.startswith("databricks-"):
        from databricks_openai import DatabricksOpenAI

        os.environ |= {"DATABRICKS_HOST": url, "DATABRICKS_TOKEN": "tok-A"}
        return DatabricksOpenAI(max_retries=0)
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/serving-endpoints", api_key="tok-A", max_retries=0)


def read(url: str, seen: Seen, call: str) -> None:
    """One stream to its end."""
    with client(url, call) as made:
        if call.endswith("create"):
            for event in made.responses.create(**BODY, stream=True):
                seen.note(event.to_dict(warnings=False))
            return
        with made.responses.stream(**BODY) as stream:
            for event in stream:
                seen.note(event.to_dict(warnings=False))
            seen.final = stream.get_final_response().output_text


report(read)
