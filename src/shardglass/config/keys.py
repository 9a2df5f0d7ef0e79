"""What one key of the configuration means here: how its value is read, and what becomes of it.

Owns the status of a key and its words. Leaves the readers of single values to ``readers``, which keys exist to the
sections, and the collection of faults to ``load``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from shardglass.config.readers import Reader, flag, settled, show


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
        about: A few words for ``docs/config.md``: what it decides; with NO_EFFECT, why it decides nothing.
        read: Turns the JSON value into the field's value, or raises ValueError with a sentence on what it must be.
        fine: The values that are not refused; None means all, and with NOT_YET all that ``asks`` calls off.
        say: What to do instead of a refused value; with NO_EFFECT, a remark for the run's notes.
        known: Names that an otherwise opaque object may have; None means any.
    """

    status: Status
    about: str
    read: Reader
    fine: tuple[object, ...] | None = None
    say: str = ""
    known: tuple[str, ...] | None = None

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
        if self.known is not None:
            if not isinstance(read, Mapping):
                raise PydanticCustomError("bad_value", "{say}", {"say": f"is {show(value)}; it must be an object"})
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


def honoured(about: str, read: Reader, *, fine: tuple[object, ...] | None = None, say: str = "") -> Key:
    """A key that decides something; the arguments are those of ``Key``."""
    return Key(status=Status.HONOURED, about=about, read=read, fine=fine, say=say)


def no_effect(about: str, read: Reader = settled, *, say: str = "", known: Iterable[str] | None = None) -> Key:
    """A key without influence on the result; any value but ``auto`` is taken unless ``read`` says otherwise."""
    names = None if known is None else tuple(known)
    return Key(status=Status.NO_EFFECT, about=about, read=read, say=say, known=names)


def not_yet(about: str, read: Reader = settled, *, fine: tuple[object, ...] | None = None, say: str = "") -> Key:
    """A key that is refused unless its value asks for nothing; the arguments are those of ``Key``."""
    return Key(status=Status.NOT_YET, about=about, read=read, fine=fine, say=say)


def off(about: str, *, say: str = "") -> Key:
    """A switch that is refused unless it is false."""
    return not_yet(about, flag(), fine=(False,), say=say)


def asks(value: object) -> bool:
    """Tell whether an opaque value asks for anything: ``enabled`` decides where an object has it."""
    if isinstance(value, Mapping):
        return asks(value["enabled"]) if "enabled" in value else any(asks(item) for item in value.values())
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.strip().lower() not in ("", "none", "false")
    if isinstance(value, int | float):
        return value > 1
    return bool(value)


class Section(BaseModel):
    """An object of the JSON: its keys are checked, and it does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
