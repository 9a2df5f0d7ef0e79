"""The batch numbers: ``train_batch_size = micro × accumulation × world size``, checked or completed.

Owns them, and what becomes of data that does not fill one step.
"""

from shardglass.config import AUTO, DeepSpeedConfig
from shardglass.errors import ConfigError
from shardglass.resolve.filler import Filler
from shardglass.resolve.values import BatchNumbers, Source

_MICRO = ("train_micro_batch_size_per_gpu", "per_device_train_batch_size")
_ACCUMULATION = ("gradient_accumulation_steps", "gradient_accumulation_steps")


def fill_batch(config: DeepSpeedConfig, filler: Filler, world_size: int) -> BatchNumbers:
    """Decide the batch numbers; a number from the JSON or from a given flag is fixed, the others follow.

    With ``train_batch_size`` fixed, the one other number that is not fixed is derived; if neither is, the
    accumulation is the flag's default and the micro-batch is derived.
    """
    args = filler.args
    micro_json = _number(config.train_micro_batch_size_per_gpu)
    accum_json = _number(config.gradient_accumulation_steps)
    train = _number(config.train_batch_size)
    micro = int(filler.take(_MICRO[0], micro_json, _MICRO[1], args.per_device_train_batch_size))
    accumulation = int(filler.take(_ACCUMULATION[0], accum_json, _ACCUMULATION[1], args.gradient_accumulation_steps))
    source: Source = "derived" if train is None else "json"
    if train is None or micro * accumulation * world_size == train:
        train = micro * accumulation * world_size
    else:
        micro_fixed = micro_json is not None or filler.gave(_MICRO[1])
        accum_fixed = accum_json is not None or filler.gave(_ACCUMULATION[1])
        if micro_fixed and accum_fixed:
            _contradiction(filler, train, (micro, accumulation, world_size))
        elif micro_fixed:
            accumulation = _divided(filler, _ACCUMULATION, train, (micro, world_size))
        else:
            micro = _divided(filler, _MICRO, train, (accumulation, world_size))
    filler.put("train_batch_size", train, source)
    return BatchNumbers(micro=micro, accumulation=accumulation, world_size=world_size, train=train)


def _number(value: int | str | None) -> int | None:
    """``auto`` and a missing key both leave the number to the flag."""
    return None if value is None or value == AUTO else int(value)


def _contradiction(filler: Filler, train: int, factors: tuple[int, int, int]) -> None:
    product = factors[0] * factors[1] * factors[2]
    text = f"{factors[0]} × {factors[1]} × {factors[2]} = {product}"
    if filler.gave(_MICRO[1], _ACCUMULATION[1]):
        flags = f"{filler.named(_MICRO[1])} × {filler.named(_ACCUMULATION[1])} × world size"
        filler.contradict("train_batch_size", train, flags, text)
    else:
        filler.faults.append(
            f"train_batch_size is {train}, but micro-batch × accumulation × world size is {text}; "
            'write "auto" for one of them'
        )


def _divided(filler: Filler, names: tuple[str, str], train: int, factors: tuple[int, int]) -> int:
    product = factors[0] * factors[1]
    key, flag = names
    if train % product:
        other = "accumulation" if names == _MICRO else "micro-batch"
        filler.faults.append(
            f"train_batch_size is {train}, which {other} × world size = {factors[0]} × {factors[1]} = {product} "
            f"does not divide; {key} cannot be derived"
        )
        return 1
    filler.put(key, train // product, "derived", flag=flag)
    return train // product


def note_of_short_data(samples: int, batch: BatchNumbers, *, drops_last: bool) -> str | None:
    """Say what a step trains on when the data does not fill it; None if it does.

    The counts are those of the Trainer's data loader: whole micro-batches, dealt to the ranks in turn; with more than
    one rank, samples are drawn again until each has equally many full ones.

    Args:
        samples: Length of the data.
        batch: The numbers of the run.
        drops_last: Whether what fills no batch is left out.

    Raises:
        ConfigError: Without what is left out there is nothing.
    """
    if samples >= batch.train:
        return None
    ranks = batch.world_size
    batches = samples // batch.micro if drops_last else -(-samples // batch.micro)
    batches = batches // ranks if drops_last else -(-batches // ranks)
    if batches == 0:
        raise ConfigError(
            f"dataloader_drop_last leaves nothing: the data has {_samples(samples)}, and {batch.micro} × {ranks} ranks "
            "are needed for one batch; give a smaller per_device_train_batch_size or more data"
        )
    drawn = batches * batch.micro * ranks if ranks > 1 or drops_last else samples
    if drawn == samples:
        what = ""
    elif drawn < samples:
        what = f"; {samples - drawn} are left out (dataloader_drop_last)"
    else:
        what = f", {drawn - samples} of them drawn again so that every rank has a full batch"
    return f"the data has {_samples(samples)} and a step takes {batch.train}: an epoch is one step of {drawn}{what}"


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"
