"""``[[endpoint]]`` tables: settings that differ for some endpoints."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_serializer,
    model_validator,
)

from .forms import Count, Engage, FollowupKey, Form, Replay, Seconds, SizeOrOff, one_path, told

PathGlob = Annotated[str, AfterValidator(one_path), Form("a path such as /serving-endpoints/sup-*", "PATH")]
ModelGlob = Annotated[str, Field(min_length=1), Form("the name of a model, such as sup-*", "NAME")]


class EndpointTable(BaseModel):
    """One table. The defaults mean nothing: only what was written counts, see ``differs``."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    match: PathGlob = ""
    model: ModelGlob = ""
    engage: Engage = "off"
    replay: Replay = "auto"
    followup_key: FollowupKey = "same"
    max_cycles: Count = 1
    heartbeat: Seconds = 1.0
    upstream_body_limit: SizeOrOff = None

    @model_validator(mode="after")
    def _fits_something(self) -> Self:
        if not self.match and not self.model:
            raise told("must have match (a path), model (a name), or both")
        return self

    @model_serializer
    def _written(self) -> dict[str, Any]:
        given = self.model_fields_set
        return {name: getattr(self, name) for name in type(self).model_fields if name in given}

    @property
    def differs(self) -> dict[str, Any]:
        """The settings that this table sets, by name."""
        return {name: value for name, value in self._written().items() if name not in ("match", "model")}


def tables(value: object) -> object:
    """Tables in one string are JSON."""
    return json.loads(value) if isinstance(value, str) else value


EndpointTables = Annotated[
    tuple[EndpointTable, ...],
    BeforeValidator(tables),
    Form('[[endpoint]] tables, or as JSON [{"match": "/serving-endpoints/sup-*", "max_cycles": 20}]', "JSON"),
]
