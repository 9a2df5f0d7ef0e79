"""How one JSON value is read: numbers as strings, booleans, choices, dtypes, ``auto``.

Owns the readers. Each takes the JSON value and returns the field's value, or raises ValueError with a sentence on what
it must be. Leaves which key has which reader to the sections.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Literal

from shardglass.errors import suggestion
from shardglass.options import STAGES

Auto = Literal["auto"]
"""The value that stands for "take it from the training arguments"."""

AUTO: Auto = "auto"

MAX_WHOLE = 2**63 - 1
"""The largest whole number: torch counts elements and steps in 64 bits."""

Reader = Callable[[object], object]


def show(value: object) -> str:
    """Write a JSON value as it would stand in the file, cut to a readable length."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, Mapping):
        text = "an object"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(show(item) for item in value[:10]) + (", ...]" if len(value) > 10 else "]")
    elif isinstance(value, int) and abs(value) > 10**60:
        text = "a whole number of more than 60 digits"  # Python refuses to write very long ones
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def anything(value: object) -> object:
    """Take a value as it is."""
    return value


def settled(value: object) -> object:
    """Take any value without an ``auto`` in it, which nothing would fill here."""
    if is_auto(value):
        raise ValueError('is "auto", which is not allowed here; write a value')
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in items:
            try:
                settled(item)
            except ValueError:
                raise ValueError(f'holds "auto" ({name}), which is not allowed here; write a value') from None
    return value


def flag(*, auto: bool = False) -> Reader:
    """A reader of true and false; the words may stand in quotes, numbers may not be meant as booleans."""

    def read(value: object) -> object:
        word = value.strip().lower() if isinstance(value, str) else value
        if auto and word == AUTO:
            return AUTO
        if isinstance(value, bool):
            return value
        if word == "true":
            return True
        if word == "false":
            return False
        raise ValueError(f"is {show(value)}; it must be true or false" + (' or "auto"' if auto else ""))

    return read


def whole(*, low: int = 0, auto: bool = False) -> Reader:
    """A reader of whole numbers from ``low`` on; 2e8 and "2e8" are whole numbers."""

    def read(value: object) -> object:
        if auto and is_auto(value):
            return AUTO
        number = _number(value)
        if number is None or number != int(number) or number < low:
            raise ValueError(f"is {show(value)}; it must be a whole number >= {low}{_or_auto(value, auto=auto)}")
        if number > MAX_WHOLE:
            raise ValueError(f"is {show(value)}; it must be a whole number below 2^63")
        return int(number)

    return read


def real(*, low: float = 0.0, high: float | None = None, auto: bool = False) -> Reader:
    """A reader of finite numbers from ``low`` to ``high``, both included."""
    span = f"a number >= {low:g}" if high is None else f"a number from {low:g} to {high:g}"

    def read(value: object) -> object:
        if auto and is_auto(value):
            return AUTO
        number = _number(value)
        if isinstance(number, int) and abs(number) > sys.float_info.max:
            number = None
        if number is None or number < low or (high is not None and number > high):
            extra = " (one value per parameter group is not supported yet)" if isinstance(value, list) else ""
            raise ValueError(f"is {show(value)}; it must be {span}{_or_auto(value, auto=auto)}{extra}")
        return float(number)

    return read


def adam_betas(value: object) -> object:
    """Read the two decay rates of Adam, each in [0, 1), or ``auto``."""
    if is_auto(value):
        return AUTO
    rates = [_number(item) for item in value] if isinstance(value, list | tuple) else []
    numbers = [float(rate) for rate in rates if rate is not None and 0 <= rate < 1]
    if len(rates) != 2 or len(numbers) != 2:
        raise ValueError(f'is {show(value)}; it must be two numbers in [0, 1), like [0.9, 0.999], or "auto"')
    return (numbers[0], numbers[1])


def decay_rate(value: object) -> object:
    """Read one decay rate of Adam, in [0, 1)."""
    number = _number(value)
    if number is None or not 0 <= number < 1:
        raise ValueError(f"is {show(value)}; it must be a number in [0, 1)")
    return float(number)


def word(*choices: str) -> Reader:
    """A reader of one of ``choices``; upper and lower case do not matter, the canonical spelling comes back."""
    spelled = {choice.lower(): choice for choice in choices}

    def read(value: object) -> object:
        found = spelled.get(value.strip().lower()) if isinstance(value, str) else None
        if found is None:
            hint = suggestion(value, choices) if isinstance(value, str) else ""
            raise ValueError(f"is {show(value)}; it must be one of {', '.join(choices)}{hint}")
        return found

    return read


def stage_number(value: object) -> object:
    """Read a ZeRO stage."""
    number = whole()(value)
    if number not in STAGES:
        raise ValueError(f"is {show(value)}; it must be one of {', '.join(str(stage) for stage in STAGES)}")
    return number


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype(value: object) -> object:
    """Read a dtype under DeepSpeed's or torch's name; return torch's name."""
    spelled = word(*_DTYPES, *_DTYPES.values())(value)
    return _DTYPES.get(str(spelled), spelled)


def is_auto(value: object) -> bool:
    """Tell whether a JSON value is the word ``auto``."""
    return isinstance(value, str) and value.strip().lower() == AUTO


def _or_auto(value: object, *, auto: bool) -> str:
    if auto:
        return ' or "auto"'
    return ' ("auto" is not allowed here)' if is_auto(value) else ""


def _number(value: object) -> int | float | None:
    """Return a finite number, read from a string if need be; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            # int first: a float would lose the low digits of a long whole number
            value = int(value) if value.strip().lstrip("+-").isdigit() else float(value)
        except ValueError:
            return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return None
