"""What a SARIF document of transload must be: the part of the standard that it uses, and what GitHub asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
from tests.schema import validate

OFFICIAL = os.environ.get("SARIF_SCHEMA", "")
"""The schema of the standard, which is not ours to keep here: sarif-2.1.0.json in @microsoft/sarif-multitool-linux."""

MESSAGE = {
    "type": "object",
    "required": ["text"],
    "additionalProperties": False,
    "properties": {"text": {"type": "string", "minLength": 1, "maxLength": 2_000}},
}
LEVEL = {"enum": ["error", "warning", "note"]}
LOCATIONS = {
    "type": "array",
    "minItems": 1,
    "maxItems": 100,
    "items": {
        "type": "object",
        "required": ["physicalLocation"],
        "additionalProperties": False,
        "properties": {
            "physicalLocation": {
                "type": "object",
                "required": ["artifactLocation", "region"],
                "additionalProperties": False,
                "properties": {
                    "artifactLocation": {
                        "type": "object",
                        "required": ["uri"],
                        "additionalProperties": False,
                        "properties": {
                            "uri": {"type": "string", "pattern": r"^[A-Za-z0-9:/._~%@!$&'()*+,;=-]+$"},
                            "uriBaseId": {"const": "%SRCROOT%"},
                        },
                    },
                    "region": {"const": {"startLine": 1}},
                },
            },
            "logicalLocations": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["fullyQualifiedName"],
                    "additionalProperties": False,
                    "properties": {"fullyQualifiedName": {"type": "string", "maxLength": 200}},
                },
            },
        },
    },
}
RULE = {
    "type": "object",
    "required": ["id", "shortDescription", "fullDescription", "help", "defaultConfiguration"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string", "pattern": "^[a-z][a-z0-9-]*$"},
        "shortDescription": MESSAGE,
        "fullDescription": MESSAGE,
        "helpUri": {"type": "string", "pattern": "^https://"},
        "help": {
            "type": "object",
            "required": ["text", "markdown"],
            "additionalProperties": False,
            "properties": {"text": {"type": "string", "minLength": 1}, "markdown": {"type": "string", "minLength": 1}},
        },
        "defaultConfiguration": {
            "type": "object",
            "required": ["level"],
            "additionalProperties": False,
            "properties": {"level": LEVEL},
        },
        "properties": {
            "type": "object",
            "required": ["security-severity", "tags"],
            "additionalProperties": False,
            "properties": {
                "security-severity": {"type": "string", "pattern": r"^\d\.\d$"},
                "tags": {"type": "array", "maxItems": 20, "contains": {"const": "security"}},
            },
        },
    },
}
NOTIFICATION = {
    "type": "object",
    "required": ["level", "message"],
    "additionalProperties": False,
    "properties": {"level": LEVEL, "message": MESSAGE, "locations": LOCATIONS},
}
RESULT = {
    "type": "object",
    "required": ["ruleId", "level", "message", "locations", "partialFingerprints"],
    "additionalProperties": False,
    "properties": {
        "ruleId": {"type": "string"},
        "level": LEVEL,
        "message": MESSAGE,
        "locations": LOCATIONS,
        "partialFingerprints": {
            "type": "object",
            "required": ["primaryLocationLineHash"],
            "additionalProperties": False,
            "properties": {"primaryLocationLineHash": {"type": "string", "pattern": "^[0-9a-f]{16}:[0-9]+$"}},
        },
    },
}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["$schema", "version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string"},
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "type": "object",
                "required": ["tool", "invocations", "results"],
                "additionalProperties": False,
                "properties": {
                    "tool": {
                        "type": "object",
                        "required": ["driver"],
                        "additionalProperties": False,
                        "properties": {
                            "driver": {
                                "type": "object",
                                "required": ["name", "semanticVersion", "rules"],
                                "additionalProperties": False,
                                "properties": {
                                    "name": {"const": "transload"},
                                    "semanticVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
                                    "informationUri": {"type": "string", "pattern": "^https://"},
                                    "rules": {"type": "array", "minItems": 100, "maxItems": 25_000, "items": RULE},
                                },
                            }
                        },
                    },
                    "invocations": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["executionSuccessful", "toolExecutionNotifications"],
                            "additionalProperties": False,
                            "properties": {
                                "executionSuccessful": {"type": "boolean"},
                                "toolExecutionNotifications": {"type": "array", "items": NOTIFICATION},
                            },
                        },
                    },
                    "results": {"type": "array", "maxItems": 5_000, "items": RESULT},
                },
            },
        },
    },
}
"""Stricter than the standard: nothing that transload does not write is allowed."""


def run_in(text: str) -> dict[str, Any]:
    """The one run of a valid document."""
    document = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    run: dict[str, Any] = document["runs"][0]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules))
    assert {result["ruleId"] for result in run["results"]} <= {*rules}
    prints = [str(result["partialFingerprints"]) for result in run["results"]]
    assert len(prints) == len(set(prints))
    return run


def validate_officially(text: str) -> None:
    """Compare a document with the schema of the standard, if ``SARIF_SCHEMA`` names it."""
    if OFFICIAL:
        validate(json.loads(text), Path(OFFICIAL))
