"""How messages name arguments: what is a flag on the command line is an argument in Python.

Owns the two ways. Whoever is called from both is handed the one that the user took.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """One of the two.

    Attributes:
        whole: All of them.
        one: One of them.
        dashes: What stands before a name.
        drop: How one is not given.
        model: What takes the model's name.
    """

    whole: str
    one: str
    dashes: str
    drop: str
    model: str

    def named(self, name: str) -> str:
        """An argument as the user writes it: ``--learning_rate``, or ``learning_rate`` in Python."""
        return f"{self.dashes}{name}"

    def given(self, name: str, *, value: object) -> str:
        """An argument with its value: ``--optim sgd``, or ``optim='sgd'`` in Python."""
        if not self.dashes:
            return f"{name}={value!r}"
        return f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"

    def spoken(self, text: str) -> str:
        """A text that names flags, as those of the config's table do."""
        return re.sub(r"(?<!\S)--(?=[a-z])", self.dashes, text)


ON_A_COMMAND_LINE = Words(
    whole="the command line", one="flag", dashes="--", drop="drop the flag", model="--model_name_or_path"
)
IN_PYTHON = Words(
    whole="the training arguments", one="argument", dashes="", drop="leave the argument out", model="open_model"
)
