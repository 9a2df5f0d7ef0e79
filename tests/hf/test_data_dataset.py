"""Data set, statistics and collator, and a Trainer that takes them as they are."""

import json
import logging
import pickle

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from shardglass.errors import ConfigError, DataError
from shardglass.hf.data import (
    ConversationDataset,
    DataOptions,
    PadToLongest,
    build_collator,
    build_dataset,
    load_conversations,
)

WORDS = ["<|im_start|>", "<|im_end|>", "\n", "system", "user", "assistant", *"abcdefgh", "?", "<pad>"]
START, END, NEWLINE, _, USER, ASSISTANT = range(6)


@pytest.fixture(scope="module")
def tokenizer():
    """One token a letter, role or newline, and ChatML's control tokens."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    pattern = Regex("system|user|assistant|\n|[^ ]| +")
    core.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert len(made) == len(WORDS)
    return made


def record(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def save(folder, *records):
    path = folder / "data.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def ids(text):
    return [WORDS.index(letter) for letter in text]


def rendered(question, answer):
    """Ids of one record in ChatML, and the number of tokens before the answer."""
    head = [START, USER, NEWLINE, *ids(question), END, NEWLINE, START, ASSISTANT, NEWLINE]
    return [*head, *ids(answer), END, NEWLINE], len(head)


@pytest.mark.parametrize("lazy", [False, True])
def test_an_item_holds_ids_labels_and_a_mask_of_ones_as_int64(tokenizer, tmp_path, lazy):
    dataset = build_dataset(save(tmp_path, record("ab", "cd")), tokenizer, DataOptions(lazy=lazy))
    expected, head = rendered("ab", "cd")
    item = dataset[0]
    assert {key: value.dtype for key, value in item.items()} == dict.fromkeys(item, torch.int64)
    assert item["input_ids"].tolist() == expected
    assert item["labels"].tolist() == [-100] * head + [*ids("cd"), END, -100]
    assert item["attention_mask"].tolist() == [1] * len(expected)


def test_lazy_and_eager_give_the_same_items_and_statistics(tokenizer, tmp_path):
    path = save(tmp_path, *[record("ab"[: i % 3], "cdefgh"[: 1 + i % 5]) for i in range(20)])
    eager = build_dataset(path, tokenizer, DataOptions(model_max_length=13))
    lazy = build_dataset(path, tokenizer, DataOptions(model_max_length=13, lazy=True))
    assert lazy.statistics().num_counted == 0
    for _ in range(2):  # a second epoch counts nothing again
        for mine, other in zip(eager, lazy, strict=True):
            assert all(torch.equal(mine[key], other[key]) for key in mine)
    assert lazy.statistics() == eager.statistics()
    assert eager[-1]["input_ids"].tolist() == eager[19]["input_ids"].tolist()


def test_statistics_count_cut_samples_tokens_and_labels(tokenizer, tmp_path, caplog):
    dataset = build_dataset(
        save(tmp_path, record("a", "b"), record("a", "bcdefgh")), tokenizer, DataOptions(model_max_length=12)
    )
    counts = dataset.statistics()
    assert (counts.num_records, counts.num_samples, counts.num_counted, counts.num_cut) == (2, 2, 2, 1)
    assert (counts.num_tokens, counts.num_label_tokens) == (12 + 12, 2 + 3)
    assert counts.cut_share == 0.5
    assert counts.label_share == 5 / 24
    assert "1 of 2 samples cut at model_max_length 12" in caplog.text


def test_shares_are_zero_before_anything_was_drawn(tokenizer, tmp_path):
    counts = build_dataset(save(tmp_path, record("a", "b")), tokenizer, DataOptions(lazy=True)).statistics()
    assert (counts.cut_share, counts.label_share) == (0.0, 0.0)


def test_eager_drops_samples_that_have_no_label_after_cutting_and_says_how_many(tokenizer, tmp_path, caplog):
    path = save(tmp_path, record("abcdefgh", "a"), record("a", "b"), record("abcdefgh", "c"))
    dataset = build_dataset(path, tokenizer, DataOptions(model_max_length=12))
    counts = dataset.statistics()
    assert (len(dataset), counts.num_unlabelled, counts.num_counted, counts.num_cut) == (1, 2, 1, 0)
    assert "2 samples dropped: nothing that counts in the loss within model_max_length 12" in caplog.text
    caplog.clear()
    build_dataset(path, tokenizer, DataOptions(model_max_length=12), is_main=False)
    assert caplog.text == ""


def test_lazy_gives_the_next_sample_with_labels_in_place_of_one_without_and_says_it_once(tokenizer, tmp_path, caplog):
    path = save(tmp_path, record("a", "b"), record("abcdefgh", "a"))
    dataset = build_dataset(path, tokenizer, DataOptions(model_max_length=12, lazy=True))
    first, _ = rendered("a", "b")
    for _ in range(2):
        assert dataset[1]["input_ids"].tolist() == first  # the end wraps around
    assert len(dataset) == 2
    assert (dataset.statistics().num_unlabelled, dataset.statistics().num_counted) == (1, 1)
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING]
    assert "record 1 is replaced by the next record" in caplog.text


def test_a_file_in_which_no_sample_has_labels_is_refused(tokenizer, tmp_path):
    path = save(tmp_path, record("abcdefgh", "a"))
    with pytest.raises(DataError, match="no sample has anything that counts in the loss within"):
        build_dataset(path, tokenizer, DataOptions(model_max_length=12))
    lazy = build_dataset(path, tokenizer, DataOptions(model_max_length=12, lazy=True))
    with pytest.raises(DataError, match="raise --model_max_length"):
        lazy[0]


@pytest.mark.parametrize("lazy", [False, True])
def test_records_that_the_policy_or_template_refuses_are_all_reported_before_training(tokenizer, tmp_path, lazy):
    only = {"id": "x", "messages": [{"role": "assistant", "content": "a"}]}
    path = save(tmp_path, record("a", "b"), only, record("c", "d"), only)
    with pytest.raises(DataError) as caught:
        build_dataset(path, tokenizer, DataOptions(label_policy="qwen", lazy=lazy))
    first, second, third = str(caught.value).splitlines()
    assert "2 of 4 records cannot be used" in first
    assert second == "  record 1 (id 'x'): its only assistant turn is the first turn, which label policy 'qwen' drops"
    assert third.startswith("  record 3 (id 'x'): ")
    options = DataOptions(label_policy="qwen", lazy=lazy, skip_bad_records=True)
    dataset = build_dataset(path, tokenizer, options)
    assert (len(dataset), dataset.statistics().num_bad_records, dataset.statistics().num_records) == (2, 2, 4)


PICKY = (
    "{% for m in messages %}{% if m['content'] == 'h' %}{{ raise_exception('no h') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


def test_a_lazy_record_that_the_template_refuses_only_for_its_content_names_itself_when_drawn(tokenizer, tmp_path):
    picky = pickle.loads(pickle.dumps(tokenizer))
    picky.chat_template = PICKY
    path = save(tmp_path, record("a", "b"), record("h", "b"))
    with pytest.raises(DataError, match=r"record 1: the chat template refuses it: no h"):
        build_dataset(path, picky, DataOptions(lazy=True))[1]
    skipping = build_dataset(path, picky, DataOptions(lazy=True, skip_bad_records=True))
    assert skipping[1]["input_ids"].tolist() == ids("ab")


def test_a_lazy_data_set_tries_every_record_of_a_sequence_of_roles_whose_first_is_refused(tokenizer, tmp_path):
    picky = pickle.loads(pickle.dumps(tokenizer))
    picky.chat_template = PICKY
    path = save(tmp_path, record("h", "b"), record("a", "b"), record("h", "c"))
    with pytest.raises(DataError, match=r"2 of 3 records.*\n  record 0: .*\n  record 2: "):
        build_dataset(path, picky, DataOptions(lazy=True))


def test_records_read_before_the_model_are_taken_as_they_are(tokenizer, tmp_path):
    conversations = load_conversations(save(tmp_path, 3, record("a", "b")), skip_bad_records=True)
    dataset = build_dataset(conversations, tokenizer, DataOptions())
    assert isinstance(dataset, ConversationDataset)
    assert (len(dataset), dataset.statistics().num_bad_records) == (1, 1)


def test_repr_tells_file_size_kind_and_policy(tokenizer, tmp_path):
    path = save(tmp_path, record("a", "b"))
    assert repr(build_dataset(path, tokenizer, DataOptions(lazy=True))) == (
        f"ConversationDataset({str(path)!r}, 1 samples, lazy, assistant)"
    )


def test_an_index_out_of_range_is_an_index_error(tokenizer, tmp_path):
    dataset = build_dataset(save(tmp_path, record("a", "b")), tokenizer, DataOptions())
    for index in (1, -2):
        with pytest.raises(IndexError):
            dataset[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_policy": "qwn"}, "did you mean 'qwen'"),
        ({"model_max_length": 1}, "model_max_length is 1; it must be at least 2"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DataOptions(**options)


def sample(*tokens):
    values = torch.tensor(tokens)
    return {"input_ids": values, "attention_mask": torch.ones_like(values), "labels": values}


def test_the_collator_pads_right_to_the_longest_and_masks_by_length_not_by_id():
    batch = PadToLongest(pad_token_id=9)([sample(1, 9), sample(1, 2, 9)])
    assert batch["input_ids"].tolist() == [[1, 9, 9], [1, 2, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[1, 9, -100], [1, 2, 9]]
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_the_collator_rounds_the_length_up_when_asked():
    for multiple, length in ((1, 3), (4, 4), (3, 3), (8, 8)):
        batch = PadToLongest(pad_token_id=0, pad_to_multiple_of=multiple)([sample(1, 2, 3)])
        assert batch["labels"].shape == (1, length)


def test_the_collator_pads_with_the_pad_token_or_the_end_token_or_zero(tokenizer):
    options = DataOptions(pad_to_multiple_of=8)
    assert build_collator(tokenizer, options) == PadToLongest(pad_token_id=len(WORDS) - 1, pad_to_multiple_of=8)
    bare = pickle.loads(pickle.dumps(tokenizer))
    bare.pad_token = None
    assert build_collator(bare, options).pad_token_id == 0
    bare.eos_token = "<|im_end|>"
    assert build_collator(bare, options).pad_token_id == END


def test_padding_changes_no_loss(tokenizer, tmp_path):
    model = LlamaForCausalLM(tiny_config()).eval()
    dataset = build_dataset(save(tmp_path, record("a", "bc"), record("abcd", "efgh")), tokenizer, DataOptions())
    collator = build_collator(tokenizer, DataOptions(pad_to_multiple_of=32))
    with torch.no_grad():
        together = model(**collator([dataset[0], dataset[1]])).loss
        alone = [model(**PadToLongest(pad_token_id=0)([item])).loss for item in dataset]
    shares = [3 / 8, 5 / 8]  # label tokens of each, with the end of turn
    # fp32 sums over another number of columns: a few units in the last place
    torch.testing.assert_close(
        together, sum(s * loss for s, loss in zip(shares, alone, strict=True)), rtol=1e-5, atol=0
    )


def tiny_config():
    return LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_a_trainer_learns_from_data_set_and_collator_as_they_are(tokenizer, tmp_path):
    torch.manual_seed(0)
    dataset = build_dataset(save(tmp_path, *[record("ab", "cd")] * 8), tokenizer, DataOptions(lazy=True))
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        max_steps=40,
        learning_rate=1e-2,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(tiny_config()),
        args=arguments,
        train_dataset=dataset,
        data_collator=build_collator(tokenizer, DataOptions()),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[1] < losses[0] / 2
    assert dataset.statistics().num_counted == 8


def test_the_data_set_can_be_sent_to_the_workers_of_a_data_loader(tokenizer, tmp_path):
    dataset = build_dataset(save(tmp_path, *[record("a", "b")] * 4), tokenizer, DataOptions(lazy=True))
    copy = pickle.loads(pickle.dumps(dataset))
    loader = DataLoader(copy, batch_size=2, collate_fn=build_collator(tokenizer, DataOptions()))
    expected, _ = rendered("a", "b")
    assert [batch["input_ids"].tolist() for batch in loader] == [[expected] * 2] * 2
