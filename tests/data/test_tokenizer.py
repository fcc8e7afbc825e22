"""Tokenizers of text encoders: cleaning, padding, truncation, refusals. Small tokenizers are made by the library."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from vitreous.data.tokenizer import Tokenizer, clean_text, find_tokenizer_file
from vitreous.errors import DataError, ResourceError, WeightsError

TEXTS = ["a photo of a cat", "a photo of a dog", "two birds on a wire, in the rain"]


def save_siglip_tokenizer(folder, size: int = 60):
    """Save a Unigram tokenizer with `<pad>` 0 and `</s>` 1, which adds the end, in the layout of SigLIP's repository."""
    tokenizer = LibraryTokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>")
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.enable_truncation(3)  # published files have settings for training
    tokenizer.enable_padding(length=5)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path, tokenizer.get_vocab_size()


def save_clip_tokenizer(folder):
    """Save the two files of a byte-level BPE with the special tokens of CLIP at the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("c", "a"), ("ca", "t</w>"), ("d", "o"), ("do", "g</w>")]
    words = [*alphabet, *(f"{letter}</w>" for letter in alphabet), *("".join(pair) for pair in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines))
    return folder / "vocab.json", len(words)


def make_siglip(folder, **changes) -> Tokenizer:
    path, count = save_siglip_tokenizer(folder)
    fields = {"vocabulary": count, "length": 24, "pad_id": 1, "end_id": 1, "cleaning": "canonicalise"}
    return Tokenizer(path, **(fields | changes))


@pytest.mark.parametrize(
    ("text", "cleaning", "cleaned"),
    [
        ("  A  Cat,\n sitting. ", "lower", "a cat, sitting."),
        ("  A_Cat,\n (sitting)! ", "canonicalise", "a cat sitting"),
        (" A ", "none", " A "),
        ("Ärger – «Übung»", "canonicalise", "ärger – «übung»"),
    ],
)
def test_cleaning(text, cleaning, cleaned):
    assert clean_text(text, cleaning) == cleaned


def test_texts_end_and_are_padded_on_the_right(tmp_path):
    for pad in (0, 1):
        tokenizer = make_siglip(tmp_path, pad_id=pad)
        tokens = tokenizer.encode_texts(["A photo of a CAT!", ""])
        ids = tokenizer.library_tokenizer.encode("a photo of a cat").ids
        assert tokens.dtype == np.int64 and tokens.shape == (2, 24)
        assert tokens[0].tolist() == ids + [pad] * (24 - len(ids)) and ids[-1] == 1
        assert tokens[1].tolist() == [1] + [pad] * 23


def test_long_texts_are_rejected_or_truncated_with_their_end(tmp_path):
    tokenizer = make_siglip(tmp_path, length=4)
    with pytest.raises(
        DataError, match=r"the text 'two birds on a wire, in the rain' has \d+ tokens.* supports 4"
    ) as e:
        tokenizer.encode_texts([TEXTS[2]])
    assert "truncate=True" in e.value.hint
    full = replace(tokenizer, length=100).encode_texts([TEXTS[2]])[0]
    assert tokenizer.encode_texts([TEXTS[2]], truncate=True)[0].tolist() == [*full[:3], 1]


def test_another_vocabulary_is_rejected(tmp_path):
    tokenizer = make_siglip(tmp_path, vocabulary=32_000)
    with pytest.raises(WeightsError, match=r"tokenizer.json has \d+ tokens, but the text encoder has 32,000"):
        tokenizer.encode_texts(["a"])


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "BPE"}}'])
def test_damaged_files_are_rejected(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(WeightsError, match="is not a tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json", vocabulary=9, length=5, pad_id=0, end_id=1).encode_texts(["a"])


def test_a_missing_library_is_reported(tmp_path, monkeypatch):
    tokenizer = make_siglip(tmp_path)
    monkeypatch.setattr("vitreous.errors.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="tokenizers is not installed") as e:
        tokenizer.encode_texts(["a"])
    assert "vitreous[text]" in e.value.hint


def test_files_of_clip_equal_the_tokenizer_of_transformers(tmp_path):
    assert find_tokenizer_file(tmp_path) is None
    path, count = save_clip_tokenizer(tmp_path)
    assert find_tokenizer_file(tmp_path) == path
    tokenizer = Tokenizer(path, vocabulary=count, length=40, pad_id=0, end_id=count - 1, cleaning="lower")
    theirs = transformers.CLIPTokenizer(vocab=str(path), merges=str(tmp_path / "merges.txt"))
    for text in ("a photo of a cat", "The DOG's  12 cats,\nétude!", "x" * 30, ""):
        ids = theirs(text)["input_ids"]
        assert tokenizer.encode_texts([text])[0].tolist() == ids + [0] * (40 - len(ids))
    tokenizer.write(tmp_path / "tokenizer.json")
    written = Tokenizer(
        tmp_path / "tokenizer.json", vocabulary=count, length=40, pad_id=0, end_id=count - 1, cleaning="lower"
    )
    assert np.array_equal(written.encode_texts(TEXTS), tokenizer.encode_texts(TEXTS))
