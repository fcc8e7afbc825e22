"""The tokenizer that is stored with the weights of a text encoder."""

from __future__ import annotations

from pathlib import Path

from vitreous.data.tokenizer import Tokenizer as Tokenizer
from vitreous.data.tokenizer import find_tokenizer_file
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig, TextConfig


def make_tokenizer(path: Path, text: TextConfig) -> Tokenizer:
    """Return the tokenizer of a text encoder in a file, which is read when the first text is encoded."""
    return Tokenizer(
        path,
        vocabulary=text.vocabulary,
        length=text.length,
        pad_id=text.pad_id,
        end_id=text.end_id,
        cleaning=text.cleaning,
    )


def find_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """Return the tokenizer in a folder with weights; None without a file, and for a model without a text encoder."""
    path = find_tokenizer_file(folder) if config.has_text else None
    return None if path is None else make_tokenizer(path, config.text)


def text_classes_error(config: ModelConfig) -> UsageError:
    """Build the error for a number of classes of a model with a text encoder."""
    hint = (
        f"leave it out, or use the image encoder: vitreous.create({config.encoder.name()!r}, weights=…, num_classes=N)"
    )
    return UsageError(f"{config.name()} has no classes: texts describe them", hint)
