"""What a number in a file may be, and how a wrong value is named: "key: what was expected"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Amount = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]

_AT = re.compile(r" - at `\$\.?(.*)`$")
T = TypeVar("T", bound=msgspec.Struct)


def made(cls: type[T], values: Mapping[str, Any], wrong: type[ValueError], where: str = "") -> T:
    """`cls` of plain values. Raises `wrong`, "where: key: what was expected"."""
    try:
        return msgspec.convert(values, cls)
    except msgspec.ValidationError as e:
        raise wrong(f"{where}: {named(e)}" if where else named(e)) from e


def checked(value: T, wrong: type[ValueError]) -> T:
    """`value`, with ranges and types as in a file: Python's constructors take anything. Raises `wrong`."""
    return made(type(value), msgspec.to_builtins(value), wrong)


def named(e: msgspec.ValidationError) -> str:
    """The message, its key first."""
    text = str(e)
    at = _AT.search(text)
    said = text[: at.start()] if at else text
    said = said[0].lower() + said[1:]
    return f"{at[1]}: {said}" if at and at[1] else said
