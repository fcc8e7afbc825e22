"""Tokenizers of runs on image-text pairs: that of the initial weights, or one that is trained on the captions."""

from __future__ import annotations

from dataclasses import replace

from vitreous.data.caption_tokenizer import TrainedTokenizer, train_tokenizer
from vitreous.data.pairs import PairSplit, tokenize_pairs
from vitreous.data.split import Data
from vitreous.data.tokenizer import Tokenizer, missing_tokenizer_error
from vitreous.errors import WeightsError
from vitreous.recipes.recipe import DatasetInfo
from vitreous.training.folder import RunFolder
from vitreous.training.run import Run
from vitreous.weights.adopt import WeightsInfo, open_weights
from vitreous.weights.bundle import find_tokenizer, make_tokenizer
from vitreous.weights.options import WeightsSource


def train_caption_tokenizer(dataset: Data) -> TrainedTokenizer:
    """Train a tokenizer on the captions of the training split, or load it from the cache."""
    train = dataset.split("train")
    assert isinstance(train, PairSplit), "require_pairs was called"
    return train_tokenizer(train.captions())


def add_text_info(info: DatasetInfo, dataset: Data, start: WeightsInfo | None) -> DatasetInfo:
    """Return the properties of a dataset of pairs with the vocabulary and text length of a tokenizer that is trained on
    its captions; unchanged if the initial weights have a text encoder."""
    if start is not None and start.config.has_text:
        return info
    trained = train_caption_tokenizer(dataset)
    return replace(info, vocabulary=trained.vocabulary, text_length=trained.length)


def choose_tokenizer(dataset: Data, run: Run, folder: RunFolder | None) -> Tokenizer:
    """Return the tokenizer of a run: that in the folder of a run to resume, that of initial weights with a text
    encoder, or one that is trained on the captions. Raises WeightsError if the first two do not exist."""
    if folder is not None:
        tokenizer = find_tokenizer(folder.path, run.model)
        if tokenizer is None:
            raise WeightsError(f"{folder.path} has no tokenizer.json", "restore it from the run's bundle")
        return tokenizer
    if run.init:
        weights = open_weights(WeightsSource(run.init))
        if weights.config.has_text:
            if weights.tokenizer is None:
                raise missing_tokenizer_error(run.init)
            return make_tokenizer(weights.tokenizer.path, run.model.text)
    return make_tokenizer(train_caption_tokenizer(dataset).path, run.model.text)


def encode_captions(dataset: Data, run: Run, folder: RunFolder | None) -> Data:
    """Return the dataset of a run with the token ids of its captions, which are cut at the length of the text encoder.
    Raises WeightsError without a tokenizer."""
    return tokenize_pairs(dataset, choose_tokenizer(dataset, run, folder))
