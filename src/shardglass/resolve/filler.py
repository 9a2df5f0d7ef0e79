"""Filling one value after another: ``auto`` and missing keys from the flags, contradictions kept for one report.

Owns the rule who wins: a number in the JSON against a flag that was given must be equal; without the flag the JSON
wins.
"""

from dataclasses import dataclass
from typing import TypeVar

from shardglass.config.readers import show
from shardglass.errors import ConfigError
from shardglass.resolve.values import ResolvedValue, RunArguments, Source, Used
from shardglass.words import IN_PYTHON, ON_A_COMMAND_LINE, Words

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A value of the JSON against a flag that the user gave, each as text; ``remedy`` where the usual one is none."""

    key: str
    json_value: str
    flag: str
    flag_value: str
    remedy: str = ""


class Filler:
    """Collects the values of one run, and every fault on the way; ``finish`` raises them together."""

    def __init__(self, args: RunArguments, source: str | None) -> None:
        self.args = args
        self.words = ON_A_COMMAND_LINE if args.from_command else IN_PYTHON
        self.source = self.words.whole if source is None else source
        self.values: dict[str, ResolvedValue] = {}
        self.contradictions: list[Contradiction] = []
        self.faults: list[str] = []
        self.pending: list[str] = []
        self.notes: list[str] = []

    def put(self, key: str, value: object, source: Source, used: Used = "honoured", *, flag: str | None = None) -> None:
        """Record a value for the table; ``flag`` is the argument that fills ``auto`` and a missing key."""
        name = None if flag is None else f"--{flag}"
        self.values[key] = ResolvedValue(key=key, value=value, source=source, used=used, flag=name)

    def named(self, flag: str) -> str:
        """An argument as the user wrote it: ``--learning_rate``, or ``learning_rate`` in Python."""
        return self.words.named(flag)

    def note_idle(self, why: str, *flags: str) -> None:
        """Say that those of ``flags`` that the user gave do nothing."""
        idle = [self.named(flag) for flag in flags if self.gave(flag)]
        if idle:
            self.notes.append(f"{' and '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect: {why}")

    def gave(self, *flags: str) -> bool:
        """Tell whether the user gave one of ``flags``."""
        return not self.args.explicit.isdisjoint(flags)

    def put_flag(self, key: str, value: object, *flags: str) -> None:
        """Record a value that only flags decide."""
        self.put(key, value, "flag" if self.gave(*flags) else "default", flag=", --".join(flags))

    def take(
        self, key: str, json_value: float | str | None, flag: str, flag_value: float, missing: float | None = None
    ) -> float:
        """Decide a value that a flag and a key share, and record it.

        Args:
            key: Dotted path in the config.
            json_value: What the config says: a value, ``auto``, or None when the key is missing.
            flag: Name of the argument.
            flag_value: Its value.
            missing: What a missing key means when the flag was not given either; None means the flag's default.
        """
        given = self.gave(flag)
        if json_value is None or isinstance(json_value, str):  # the schema lets no string but auto through
            value = missing if missing is not None and json_value is None and not given else flag_value
            self.put(key, value, "flag" if given else "default", flag=flag)
            return value
        if given and json_value != flag_value:
            self.contradict(key, json_value, self.named(flag), flag_value)
        self.put(key, json_value, "json", flag=flag)
        return json_value

    def own(self, key: str, json_value: T | None, missing: T) -> T:
        """Decide a value that no flag speaks of, and record it."""
        value = missing if json_value is None else json_value
        self.put(key, value, "default" if json_value is None else "json")
        return value

    def contradict(self, key: str, json_value: object, flag: str, flag_value: object, remedy: str = "") -> None:
        """Keep a contradiction for the report; ``flag`` as ``named`` gives it."""
        self.contradictions.append(
            Contradiction(
                key=key, json_value=_plain(json_value), flag=flag, flag_value=_plain(flag_value), remedy=remedy
            )
        )

    def wait(self, key: str, flag: str | None = None) -> None:
        """Keep a key whose value is not known yet."""
        self.pending.append(key)
        self.put(key, None, "derived", flag=flag)

    def finish(self, *, final: bool) -> None:
        """Raise what was found.

        Raises:
            ConfigError: A table of all contradictions, and all other faults; with ``final``, also values that are
                still unknown.
        """
        faults = list(self.faults)
        if final:
            faults += [f"{key} needs {_missing(key)}, which is not known; write a number" for key in self.pending]
        parts = []
        if self.contradictions:
            parts.append(_table(self.source, self.contradictions, self.words))
        if faults:
            count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
            parts.append(f"{self.source}: {count}\n" + "\n".join(f"  {fault}" for fault in faults))
        if parts:
            raise ConfigError("\n".join(parts))


def _plain(value: object) -> str:
    return value if isinstance(value, str) else show(value)


def _missing(key: str) -> str:
    return "the hidden size of the model" if key.startswith("zero_optimization") else "the total number of steps"


def _table(source: str, rows: list[Contradiction], words: Words) -> str:
    cells = [("key", "JSON", words.one, f"{words.one}'s value")]
    cells += [(row.key, row.json_value, row.flag, row.flag_value) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    count = "1 value" if len(rows) == 1 else f"{len(rows)} values"
    remedies = [] if all(row.remedy for row in rows) else ['write "auto" in the JSON']
    head = f"{source} contradicts {words.whole} in {count}; {', or '.join([*remedies, words.drop])}:"
    more = [f"  {row.key}: {row.remedy}" for row in rows if row.remedy]
    return "\n".join([head, *(line.rstrip() for line in lines), *more])
