"""Documents against the JSON schemas of the manual."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema


def validate(document: object, schema: Path) -> None:
    """Raise ``jsonschema.ValidationError`` where the document is not as the schema says."""
    error = jsonschema.exceptions.best_match(_validator(schema).iter_errors(document))
    if error is not None:
        raise error


@functools.cache
def _validator(path: Path) -> Any:
    """To check the schema itself takes longer than most documents do, so that is done once."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    made = jsonschema.validators.validator_for(schema)
    made.check_schema(schema)
    return made(schema)
