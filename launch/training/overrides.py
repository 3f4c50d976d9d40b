"""`key=value` on a command line. A value is YAML, unless the schema has a string there: then it is taken literally."""

import re
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from training.refusal import Refusal


def parse_overrides(overrides: list[str], schema: type[BaseModel]) -> DictConfig:
    """The overrides as a configuration, unchecked. Raises what OmegaConf raises, or a Refusal."""
    given, strings = OmegaConf.create(), _strings(schema)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise Refusal(f"expected key=value, got {override!r}")
        optional = strings.get(key.replace("[", ".").replace("]", ""))  # OmegaConf's other way of writing a key
        if optional is None:
            given.merge_with_dotlist([override])
        else:
            OmegaConf.update(given, key, None if optional and value == "null" else _literal(value))
    return given


def literal_strings(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with their strings escaped, so that OmegaConf reads the same strings from them."""
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = literal_strings(value)
        found[key] = _literal(value) if isinstance(value, str) else value
    return found


def _literal(value: str) -> str:
    """Escapes `${x}`, which OmegaConf would look up."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)


def _strings(section: type[BaseModel], prefix: str = "") -> dict[str, bool]:
    """The dotted keys whose values are strings, and whether each may be None."""
    found = {}
    for name, field in section.model_fields.items():
        kinds = _kinds(field.annotation)
        if str in kinds:
            found[prefix + name] = type(None) in kinds
        elif issubclass(kinds[0], BaseModel):
            found |= _strings(kinds[0], f"{prefix}{name}.")
    return found


def _kinds(annotation: Any) -> list[type]:
    """The types in an annotation: `str` and `NoneType` in `Name | None`."""
    if hasattr(annotation, "__metadata__"):
        return _kinds(annotation.__origin__)
    return [kind for part in get_args(annotation) for kind in _kinds(part)] or [annotation]
