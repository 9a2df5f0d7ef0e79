"""Which files the weights of a model are in, and what is wrong with one that cannot be read.

Owns finding them in a folder, in the cache or on the hub, by transformers' own look-up, and telling a broken one.
Leaves reading safetensors in part to ``weight_files``, and loading whole to ``load``.
"""

import zipfile
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers.utils.hub import cached_file

from shardglass.checkpoint.weight_files import COPY_AGAIN, check_header, named_in
from shardglass.errors import ModelError
from shardglass.hf.mistakes import OF_A_FILE, one_line

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names that transformers gives pickled weights; as ``SAFETENSORS``."""

HUB = ("cache_dir", "revision", "token", "local_files_only", "subfolder")
"""Arguments of ``from_pretrained`` that say where a model's files are; each of transformers' look-ups takes them."""

_POINTER = b"version https://git-lfs"
"""Begins what git leaves in place of a large file until git-lfs fetches it."""

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""Begins what torch.save wrote before it wrote zip files (source: ``torch.serialization.MAGIC_NUMBER``, pickled)."""

_FOREIGN = "GLOBAL"
"""Stands in torch's message on a pickle that holds more than tensors."""


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that say where files are."""
    return {key: options[key] for key in HUB if options.get(key) is not None}


def weight_files(
    name: str, names: tuple[str, ...], hub: Mapping[str, Any], variant: str | None = None
) -> list[Path] | None:
    """The files that one of ``names`` stands for; None if none of them is there, or can be reached.

    Args:
        name: A folder or a hub id.
        names: Names of files and indexes.
        hub: Where to look, as transformers' ``cached_file`` takes it.
        variant: As ``from_pretrained`` takes it.

    Raises:
        ModelError: An index is broken, or a file that it names cannot be had.
    """
    for wanted in names:
        path = _found(name, _of_variant(wanted, variant), hub)
        if path is None:
            continue
        if not wanted.endswith(".index.json"):
            return [path]
        files = named_in(path)
        if Path(name).is_dir():
            return [path.parent / file for file in files]
        return [_found(name, file, hub) or path.parent / file for file in files]
    return None


def gguf_path(name: str, gguf_file: str, hub: Mapping[str, Any]) -> Path | None:
    """The GGUF file; None if it is not there."""
    return Path(gguf_file) if Path(gguf_file).is_file() else _found(name, gguf_file, hub)


def _found(name: str, file: str, hub: Mapping[str, Any]) -> Path | None:
    try:
        path = cached_file(name, file, **hub)
    except OSError:  # not there, or out of reach; whoever needs it says why
        return None
    return None if path is None else Path(path)


def _of_variant(name: str, variant: str | None) -> str:
    """A file's name with the variant before its ending, as transformers writes it."""
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def check_file(path: Path, *, thoroughly: bool = False) -> None:
    """See that a file of weights is what its name says, and is all there.

    Args:
        path: The file.
        thoroughly: Also read what only reading all of it tells, of an old pickle or a GGUF file.

    Raises:
        ModelError: It cannot be read; says what it is, and what to do.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_POINTER))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if head == _POINTER:
        raise ModelError(f"{path}: only git's pointer to the weights: fetch them with `git lfs pull`")
    if path.suffix == ".safetensors":
        check_header(path)
    elif path.suffix == ".gguf":
        _check_gguf(path, head, thoroughly=thoroughly)
    else:
        _check_pickled(path, head, thoroughly=thoroughly)


def _check_gguf(path: Path, head: bytes, *, thoroughly: bool) -> None:
    fault = "" if head.startswith(b"GGUF") else "it does not begin as one"
    if thoroughly and not fault and find_spec("gguf") is not None:
        try:
            import_module("gguf").GGUFReader(str(path))
        except OF_A_FILE as error:
            fault = one_line(error)
    if fault:
        raise ModelError(f"{path}: not a GGUF file, or cut off: {COPY_AGAIN} ({fault})")


def _check_pickled(path: Path, head: bytes, *, thoroughly: bool) -> None:
    is_zip = zipfile.is_zipfile(path)
    if not is_zip and not head.startswith(_LEGACY):
        was_zip = head.startswith(b"PK")
        what = "a file of torch.save that was cut off" if was_zip else "not a file that torch.save wrote, or cut off"
        raise ModelError(f"{path}: {what}: {COPY_AGAIN}")
    if not is_zip and not thoroughly:
        return
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)  # maps, reads no values
    except OF_A_FILE as error:
        if _FOREIGN in str(error):
            raise ModelError(
                f"{path}: holds more than tensors, which would run code when it is read: open it where you trust it, "
                "and save model.state_dict() or model.save_pretrained(folder) instead"
            ) from error
        raise ModelError(f"{path}: a file of torch.save that is broken: {COPY_AGAIN} ({one_line(error)})") from error
    if not isinstance(content, Mapping):
        raise ModelError(f"{path}: holds a {type(content).__name__} and not tensors by name: save model.state_dict()")
