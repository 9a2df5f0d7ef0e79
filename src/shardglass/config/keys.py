"""What one key of the configuration means here: how its value is read, and whether it is honoured.

Owns the status of a key and the readers of single values (numbers as strings, booleans, choices, ``auto``). Leaves to
``sections`` which keys exist and to ``load`` the collection of faults.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from shardglass.errors import suggestion
from shardglass.options import STAGES

Auto = Literal["auto"]
"""The value that stands for "take it from the training arguments"."""

AUTO: Auto = "auto"

Reader = Callable[[object], object]


class Status(Enum):
    """What becomes of a key that a file gives.

    HONOURED: its value decides something in the run.
    NO_EFFECT: understood, and without influence on the result here; the run says so once.
    NOT_YET: understood, and refused when its value asks for something.
    """

    HONOURED = "honoured"
    NO_EFFECT = "no effect here"
    NOT_YET = "not supported yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The rule of one key; stands in the ``Annotated`` of a section's field and is run by pydantic.

    Attributes:
        status: What becomes of the key.
        read: Turns the JSON value into the field's value, or raises ValueError with a sentence on what it must be.
        fine: The values that are not refused; None means all, and with NOT_YET all that ``asks`` calls off.
        say: What to do instead of a refused value; with NO_EFFECT, a remark for the run's notes.
        known: Names that an otherwise opaque object may have; None means any.
    """

    status: Status
    read: Reader
    fine: tuple[object, ...] | None = None
    say: str = ""
    known: frozenset[str] | None = None

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Replace pydantic's own reading of the field's type by ``check``, so that no coercion happens unseen."""
        return core_schema.no_info_plain_validator_function(self.check)

    def check(self, value: object) -> object:
        """Read ``value``; null counts as absent.

        Raises:
            PydanticCustomError: ``value`` cannot be read, holds unknown names, or asks for what is not supported.
        """
        if value is None:
            return None
        try:
            read = self.read(value)
        except ValueError as error:
            raise PydanticCustomError("bad_value", "{say}", {"say": str(error)}) from None
        if self.known is not None and isinstance(read, Mapping):
            unknown = [name for name in read if name not in self.known]
            if unknown:
                raise PydanticCustomError("unknown_names", "unknown names", {"names": unknown})
        if self._refuses(read):
            text = f"is {show(value)}: not supported yet" + (f"; {self.say}" if self.say else "")
            raise PydanticCustomError("not_yet", "{say}", {"say": text})
        return read

    def _refuses(self, value: object) -> bool:
        if self.fine is None:
            return self.status is Status.NOT_YET and asks(value)
        return not any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in self.fine
        )


def honoured(read: Reader, *, fine: tuple[object, ...] | None = None, say: str = "") -> Key:
    """A key that decides something; ``fine`` and ``say`` as in ``Key``."""
    return Key(status=Status.HONOURED, read=read, fine=fine, say=say)


def no_effect(read: Reader | None = None, *, say: str = "", known: Iterable[str] | None = None) -> Key:
    """A key without influence on the result; any value is taken unless ``read`` says otherwise."""
    names = None if known is None else frozenset(known)
    return Key(status=Status.NO_EFFECT, read=read or anything, say=say, known=names)


def not_yet(read: Reader | None = None, *, fine: tuple[object, ...] | None = None, say: str = "") -> Key:
    """A key that is refused unless its value asks for nothing; ``fine`` and ``say`` as in ``Key``."""
    return Key(status=Status.NOT_YET, read=read or anything, fine=fine, say=say)


def asks(value: object) -> bool:
    """Tell whether an opaque value asks for anything: ``enabled`` decides where an object has it."""
    if isinstance(value, Mapping):
        return asks(value["enabled"]) if "enabled" in value else any(asks(item) for item in value.values())
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.strip().lower() not in ("", "none", "auto", "false")
    if isinstance(value, int | float):
        return value > 1
    return bool(value)


def show(value: object) -> str:
    """Write a JSON value as it would stand in the file, cut to a readable length."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, Mapping):
        text = "an object"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(show(item) for item in value) + "]"
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def anything(value: object) -> object:
    """Take a value as it is."""
    return value


def settled(value: object) -> object:
    """Take any value but ``auto``, which nothing would fill here."""
    if _is_auto(value):
        raise ValueError('is "auto", which is not allowed here; write a value')
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
        if auto and _is_auto(value):
            return AUTO
        number = _number(value)
        if number is None or number != int(number) or number < low:
            raise ValueError(f"is {show(value)}; it must be a whole number >= {low}{_or_auto(value, auto=auto)}")
        return int(number)

    return read


def real(*, low: float = 0.0, high: float | None = None, auto: bool = False) -> Reader:
    """A reader of finite numbers from ``low`` to ``high``, both included."""
    span = f"a number >= {low:g}" if high is None else f"a number from {low:g} to {high:g}"

    def read(value: object) -> object:
        if auto and _is_auto(value):
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
    if _is_auto(value):
        return AUTO
    rates = [_number(item) for item in value] if isinstance(value, list | tuple) else []
    numbers = [float(rate) for rate in rates if rate is not None and 0 <= rate < 1]
    if len(rates) != 2 or len(numbers) != 2:
        raise ValueError(f'is {show(value)}; it must be two numbers in [0, 1), like [0.9, 0.999], or "auto"')
    return (numbers[0], numbers[1])


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


NoEffect = Annotated[object, no_effect(settled)]
OffSwitch = Annotated[bool | None, not_yet(flag(), fine=(False,))]


class Section(BaseModel):
    """An object of the JSON: its keys are checked, and it does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() == AUTO


def _or_auto(value: object, *, auto: bool) -> str:
    if auto:
        return ' or "auto"'
    return ' ("auto" is not allowed here)' if _is_auto(value) else ""


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
