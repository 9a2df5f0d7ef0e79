"""Which releases of DeepSpeed the layout read here is that of.

Owns the span of releases, and what is said of others. FIRST: up to 0.16.3 only the last rank records its padding (PR
6974), so what a rank's file says of padding means something else; it is not read here, so such files are read with a
warning. LAST: the release whose checkpoints the tests hold this reader against.
"""

from pathlib import Path

from packaging.version import InvalidVersion, Version

FIRST, LAST = Version("0.16.4"), Version("0.19.8")


def version_warning(path: Path, text: str | None) -> str | None:
    """What to warn of, given the ``ds_version`` of a file; None if it is a release known to be read right."""
    if text is None:
        return f"{path}: no ds_version says which DeepSpeed wrote it; it is read as one of {FIRST} to {LAST}"
    try:
        version = Version(text)
    except InvalidVersion:
        return f"{path}: {text!r} is no version of DeepSpeed; it is read as one of {FIRST} to {LAST}"
    if Version(version.base_version) < FIRST:
        return (
            f"{path}: DeepSpeed {text} wrote it; releases before {FIRST} record padding otherwise (DeepSpeed PR 6974) "
            f"and this reader is not tested with them: compare a few weights with those of the model"
        )
    if Version(version.base_version) > LAST:
        return (
            f"{path}: DeepSpeed {text} wrote it, and {LAST} is the newest release this reader is tested with: compare "
            "a few weights with those of the model"
        )
    return None
