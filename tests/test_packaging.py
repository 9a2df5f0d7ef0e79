"""What is installed and what is public."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shardglass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PUBLIC = [
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "DataError",
    "EngineOptions",
    "Handle",
    "InvariantError",
    "ModelError",
    "NonFiniteError",
    "OptimizerError",
    "ShardglassError",
    "Snapshot",
    "UsageError",
    "ZeroMixin",
    "ZeroTrainer",
    "ZeroTrainingArguments",
    "__version__",
    "load_checkpoint",
    "look",
    "new_model",
    "open_model",
    "save_checkpoint",
    "shard",
    "state_of",
    "where",
]


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def declared() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    found = [Requirement(line) for group in (PROJECT["dependencies"], *extras) for line in group]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def pinned_version(name: str, python: str) -> str | None:
    """The version that constraints.txt gives a package on one version of Python."""
    found = [
        pin
        for pin in pins()
        if canonicalize_name(pin.name) == canonicalize_name(name)
        and (pin.marker is None or pin.marker.evaluate({"python_version": python}))
    ]
    assert len(found) <= 1, f"{name} is pinned {len(found)} times for Python {python}"
    return str(found[0].specifier).removeprefix("==") if found else None


def python_of(code: str) -> str:
    """Run code in a fresh interpreter that finds the package; return what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_every_line_of_constraints_is_an_exact_version():
    for pin in pins():
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), str(pin)


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_constraints_pin_every_declared_dependency_inside_its_bound(python):
    for requirement in declared():
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            version = pinned_version(requirement.name, python)
            assert version is not None, f"{requirement} has no line in constraints.txt for Python {python}"
            assert requirement.specifier.contains(version), f"{requirement} does not take {version}"


def test_dependencies_have_a_lower_bound_and_no_upper_one():
    for requirement in declared():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">="}, str(requirement)


def test_every_package_that_the_source_imports_is_declared():
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"shardglass", "pydantic_core"}  # pydantic brings its core
    declared_names = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert {canonicalize_name(name) for name in foreign} <= declared_names


def test_constraints_pin_the_data_packages_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = re.search(r"^DATA_PACKAGES := (.+)$", makefile, re.MULTILINE)
    assert names is not None
    for name in names.group(1).split():
        assert pinned_version(name, "3.11") is not None, name


def test_makefile_and_constraints_name_the_same_torch():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"TORCH_INSTALL ?= torch=={pinned_version('torch', '3.11')}\n" in makefile


def test_version_stands_in_one_place_and_is_the_installed_one():
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    source = (ROOT / "src" / "shardglass" / "__init__.py").read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [shardglass.__version__]
    try:
        installed = metadata.version("shardglass")
    except metadata.PackageNotFoundError:
        pytest.fail("the package is not installed, only on the path; `make test` installs it")
    assert installed == shardglass.__version__


def test_public_names_are_these():
    assert shardglass.__all__ == PUBLIC
    assert dir(shardglass) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name):
    value = getattr(shardglass, name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__module__.startswith("shardglass.")


def test_every_error_of_the_tree_is_public():
    from shardglass import errors

    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert classes <= set(PUBLIC)


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="module 'shardglass' has no attribute 'shrad'"):
        _ = shardglass.shrad


def test_importing_the_package_loads_neither_torch_nor_transformers():
    heavy = python_of(
        "import shardglass\n"
        "shardglass.EngineOptions, shardglass.ConfigError\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'pydantic', 'rich') if m in sys.modules])"
    )
    assert heavy == "[]"


def test_pure_modules_load_no_torch():
    heavy = python_of(
        "import shardglass.layout, shardglass.config, shardglass.resolve, shardglass.plan.memory, shardglass.report\n"
        "print([m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])"
    )
    assert heavy == "[]"


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "src" / "shardglass" / "py.typed").is_file()


def test_the_licence_is_the_one_pyproject_names():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
