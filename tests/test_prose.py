"""Prose of the package: messages, help texts, docstrings and comments use the field's terms and short sentences.

`PREFERRED_TERMS` has words that were once used here in place of a standard term. A word that is right in one place is listed in
`ALLOWED_WORDS` with the reason. Sentences are limited to `MAX_WORDS` words; tables, code blocks and lists are not sentences.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vitreous"
MAX_WORDS = 40
PREFERRED_TERMS = {
    r"pictures?": "image",
    r"answer(?:s|ed)?": "prediction, output, logits or response",
    r"judg(?:e|es|ed|ing)": "evaluate",
    r"readings": "evaluations",
    r"foretell\w*": "predict",
    r"mend\w*": "fix",
    r"says?|said|tells?|told|hears?|heard": "set, print, log, report or contain",
    r"(?<!standard )(?<!absolute )deviations?": "standard deviation",
    r"nobody|anybody": "name the subject",
    r"alike": "similar or near-duplicate",
    r"in vain": "unnecessarily",
    r"sooner": "faster or earlier",
    r"(?:goes|go|went|going) on": "continue",
    r"of (?:its|their|his) own": "separate",
    r"as it comes|as they come": "with default settings",
    r"beside": "compared with or next to",
    r"makes? images": "generate images",
    r"held back": "frozen",
    r"same bits|to the last bit": "bit-identical",
    r"tilt\w*": "rotate",
    r"images a second": "images/s",
    r"so many|so much": "the number or amount",
    r"that which|those which": "the noun",
    r"what (?:is|was|has|had|a|an|the|it|they|we|you)": "the noun",
    r"whatever": "regardless of",
}
WORD_PATTERN = re.compile(rf"(?<![\w`'-])(?:{'|'.join(PREFERRED_TERMS)})(?![\w`'-])", re.IGNORECASE)

# path -> {word: why it is the right one there}
ALLOWED_WORDS: dict[str, dict[str, str]] = {
    "errors.py": {"what is": "of the three contents of an error", "words": "`OPTION_VALUES` is a list of words"}
}


def list_texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string with a space (docstrings and messages) and of every comment of a module."""
    parents = {child: node for node in ast.walk(ast.parse(source)) for child in ast.iter_child_nodes(node)}
    for node in parents:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def split_sentences(text: str) -> Iterator[str]:
    """Sentences of a text, without its tables, code blocks and formulas; every item of a list counts on its own."""
    margin = min((len(line) - len(line.lstrip()) for line in text.split("\n")[1:] if line.strip()), default=0)
    paragraphs: list[str] = [""]
    for number, line in enumerate(text.split("\n")):
        content = line if number == 0 else line[margin:]
        if not content.strip() or content.startswith(("    ", "|")):
            paragraphs.append("")
        elif re.match(r"(?:-|\d+\.) |\S.*\S {3,}\S", content):
            paragraphs.append(content)
        else:
            paragraphs[-1] += " " + content
    for paragraph in paragraphs:
        yield from re.split(r"(?<=[.;:!?])\s+", " ".join(paragraph.split()))


def find_faults(path: Path) -> Iterator[str]:
    """Words of `PREFERRED_TERMS` without a reason in `ALLOWED_WORDS`, and sentences of more than `MAX_WORDS` words."""
    name = path.relative_to(PACKAGE).as_posix()
    allowed = {word.lower() for word in ALLOWED_WORDS.get(name, {})}
    for line, text in list_texts(path.read_text(encoding="utf-8")):
        for sentence in split_sentences(text):
            for found in WORD_PATTERN.findall(sentence):
                if found.lower() not in allowed:
                    yield f"{name}:{line}: {found!r} in: {sentence[:120]}"
            if len(sentence.split()) > MAX_WORDS and "words" not in allowed:
                yield f"{name}:{line}: {len(sentence.split())} words: {sentence[:120]}"


def test_the_package_uses_the_terms_of_the_field_and_short_sentences() -> None:
    faults = [fault for path in sorted(PACKAGE.rglob("*.py")) for fault in find_faults(path)]
    assert not faults, "\n".join(faults)
