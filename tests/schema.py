"""Validation against the JSON schemas of the manual."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema


def validate(document: object, schema: Path) -> None:
    """Raise ``jsonschema.ValidationError`` if the document does not match the schema."""
    error = jsonschema.exceptions.best_match(_validator(schema).iter_errors(document))
    if error is not None:
        raise error


@functools.cache
def _validator(path: Path) -> Any:
    """The validator, cached: to check the schema itself takes longer than to check most documents."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    validator_class = jsonschema.validators.validator_for(schema)
    validator_class.check_schema(schema)
    return validator_class(schema)
