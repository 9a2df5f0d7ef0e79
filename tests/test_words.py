"""How arguments are named: as flags to whoever wrote a command, as arguments to whoever called a function."""

import ast
import re
from pathlib import Path

import pytest

import shardglass
from shardglass.words import IN_PYTHON, ON_A_COMMAND_LINE

SOURCES = Path(shardglass.__file__).parent

CALLED_FROM_PYTHON = (
    *(f"{package}/*.py" for package in ("checkpoint", "compat", "engine")),
    *("options.py", "resolve/batch.py", "resolve/filler.py", "resolve/run.py", "resolve/scheduler.py"),
    *(f"hf/{name}.py" for name in ("checkpoints", "generation", "load", "losses", "model_files", "open_options")),
    *(f"hf/{name}.py" for name in ("random_start", "resuming", "sample_order", "schedule", "sharded_start", "trainer")),
)
"""Modules whose messages anyone may meet; they leave the naming of an argument to ``words``."""

_FLAG = re.compile(r"(?<![\w-])--[a-z]\w+")


def texts_of(path):
    """Every text of a module that is no docstring, with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def test_an_argument_is_named_as_it_was_given():
    assert ON_A_COMMAND_LINE.named("optim") == "--optim"
    assert IN_PYTHON.named("optim") == "optim"
    assert ON_A_COMMAND_LINE.given("optim", value="sgd") == "--optim sgd"
    assert ON_A_COMMAND_LINE.given("report_to", value=["a", "b"]) == "--report_to a b"
    assert IN_PYTHON.given("optim", value="sgd") == "optim='sgd'"
    text = "use --torch_compile -- or a--b, --x"
    assert ON_A_COMMAND_LINE.spoken(text) == text
    assert IN_PYTHON.spoken(text) == "use torch_compile -- or a--b, x"


@pytest.mark.parametrize("pattern", CALLED_FROM_PYTHON)
def test_no_message_that_python_can_raise_writes_a_flag_itself(pattern):
    paths = sorted(SOURCES.glob(pattern))
    assert paths
    found = [f"{path.name}:{line}: {text}" for path in paths for line, text in texts_of(path) if _FLAG.search(text)]
    assert not found
