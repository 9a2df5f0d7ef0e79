"""Whether what is installed beside shardglass is recent enough.

Owns the comparison of installed versions with the lower bounds of our own metadata. pip keeps them when it installs
us, and nobody keeps them afterwards.
"""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from shardglass.errors import ConfigError


def check_versions() -> None:
    """See that every package we need is installed in a version that we know to work.

    Raises:
        ConfigError: Names every package that is too old or missing, and the command that mends it.
    """
    try:
        lines = requires("shardglass") or []
    except PackageNotFoundError:
        return  # run from a source tree
    faults, wanted = [], []
    for line in lines:
        fault = version_fault(line)
        if fault is not None:
            faults.append(fault)
            wanted.append(f"'{line.partition(';')[0].strip()}'")
    if faults:
        raise ConfigError(f"{'; '.join(faults)}; mend it with: pip install {' '.join(wanted)}")


def version_fault(line: str) -> str | None:
    """Say in what an installed package falls short of one line of requirements; None if it does not.

    A line for another Python or of an extra is fulfilled, and so is a version that no rule can read.
    """
    try:
        need = Requirement(line)
    except InvalidRequirement:
        return None
    if need.marker is not None and not need.marker.evaluate({"extra": ""}):
        return None
    try:
        installed = version(need.name)
        is_enough = need.specifier.contains(Version(installed).base_version)
    except PackageNotFoundError:
        return f"{need.name} is not installed and shardglass needs {need.name}{need.specifier}"
    except InvalidVersion:
        return None
    return None if is_enough else f"{need.name} {installed} is installed and shardglass needs {need.specifier}"
