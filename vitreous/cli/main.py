"""`vitreous VERB …`: find the verb, parse its options, run it, and convert errors to a message and an exit code."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

from vitreous.cli.console import Console, format_json_line, prepare_streams, reserve_stdout
from vitreous.cli.help import format_help, wants_help
from vitreous.errors import (
    Interrupted,
    UsageError,
    VitreousError,
    escape_unprintable,
    is_out_of_memory,
    suggest_nearest,
)
from vitreous.progress import ABANDONED_THREADS, is_main_process, redirect_to_null, write_line
from vitreous.system.cores import limit_thread_pools

IMAGE_VERBS = ("predict", "embed", "evaluate", "inspect")  # verbs with images or data after the model
VERBS_WITH_MORE_ARGUMENTS = ("predict", "embed", "sample", "push")  # verbs that need more than a model
MAX_HINT_WORDS = 3  # words after the model that a hint repeats

#: verb -> (module, summary); the module has a frozen dataclass `Options` and a function `run(options, console)`
VERBS = {
    "train": ("vitreous.cli.train", "train, evaluate and save a model"),
    "evaluate": ("vitreous.cli.evaluate", "evaluate a model on a split, or compare two models"),
    "predict": ("vitreous.cli.predict", "predictions for images"),
    "embed": ("vitreous.cli.embed", "features of images, as npz, Parquet or JSONL"),
    "sample": ("vitreous.cli.sample", "images or clips from a generative model"),
    "serve": ("vitreous.cli.serve", "web page and HTTP API for a model"),
    "export": ("vitreous.cli.export", "ONNX, OpenVINO and other files, verified against the PyTorch model"),
    "inspect": ("vitreous.cli.inspect", "figures of attention, filters, position embeddings and features"),
    "study": ("vitreous.cli.study", "reproduce a table or figure of a paper"),
    "soup": ("vitreous.cli.soup", "average the weights of several runs"),
    "watch": ("vitreous.cli.watch", "curves of a run in a browser"),
    "data check": ("vitreous.cli.data_check", "find problems of a dataset before training"),
    "data dedup": ("vitreous.cli.data_dedup", "find images that another dataset contains too"),
    "data convert": ("vitreous.cli.data_convert", "convert boxes and masks between formats"),
    "data pack": ("vitreous.cli.data_pack", "pack a dataset into shards for training"),
    "convert": ("vitreous.cli.convert", "convert weights between formats"),
    "push": ("vitreous.cli.push", "publish a model on the Hugging Face Hub"),
    "recipes": ("vitreous.cli.recipes", "list recipes, or show one with its hyperparameters"),
    "models": ("vitreous.cli.models", "list models, or published weights"),
    "bench": ("vitreous.cli.bench", "compare the speed with other libraries on this machine"),
    "completion": ("vitreous.cli.completion", "shell completion script"),
    "doctor": ("vitreous.cli.doctor", "what this machine has and supports"),
}
OUT_OF_MEMORY_HINT = "use --micro-batch auto, --recompute, or a smaller model"


def needs_model(kind: type[Any]) -> bool:
    """Return whether a verb has a model argument without a default."""
    return any(field.name == "run" and field.default is MISSING for field in fields(kind))


def require_model(verb: str, kind: type[Any], words: list[str]) -> None:
    """Raise UsageError if a verb needs a model and has none."""
    if not words and needs_model(kind):
        raise make_missing_model_error(verb, "", [])


def check_model_argument(verb: str, options: Any) -> None:
    """Raise UsageError if the model argument is an image or a folder of images."""
    from vitreous.weights.model_paths import is_finished_run, is_image_source

    if not needs_model(type(options)) or is_finished_run(run := options.run) or not is_image_source(run):
        return
    others = [*getattr(options, "images", ()), *filter(None, (getattr(options, "data", None),))]
    if verb in IMAGE_VERBS:
        if named := next((word for word in others if is_finished_run(word)), None):
            words = shlex.join(["vitreous", verb, named, run])
            raise UsageError(f"the model must come first: {escape_unprintable(run)} contains images", f"try {words}")
        raise make_missing_model_error(verb, run, [run, *others])
    raise make_missing_model_error(verb, run, [])


def make_missing_model_error(verb: str, path: str, others: list[str]) -> UsageError:
    """Make the error for a command without a model: `path` is in its place, `others` follow it."""
    from vitreous.weights.model_paths import find_newest_run

    problem = "no model given"
    if path:
        problem += f": {escape_unprintable(path)} {'contains images' if os.path.isdir(path) else 'is not a model'}"
    if not (newest := find_newest_run()):
        hint = f"there is no run in this folder; train one with vitreous train DATA, then vitreous {verb} RUN …"
        return UsageError(problem, hint)
    shown = [escape_unprintable(word) for word in others[:MAX_HINT_WORDS]]
    words = shlex.join(["vitreous", verb, newest, *shown]) + " …" * (
        len(others) > MAX_HINT_WORDS or (verb in VERBS_WITH_MORE_ARGUMENTS and not others)
    )
    return UsageError(problem, f"try {words}; {newest} is the newest run in this folder")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    limit_thread_pools()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # training handles SIGTERM differently
    try:
        code = run_command(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = print_error(Interrupted("stopped"), words, 130)
    except BrokenPipeError:  # the reader closed the pipe
        redirect_to_null(sys.stdout)
        code = 0
    except VitreousError as error:
        code = print_error(error, words, error.code)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror or error}"
        code = print_error(VitreousError(message, "free some space, or write to another disk"), words, 6)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        code = print_error(VitreousError("out of memory", OUT_OF_MEMORY_HINT), words, 6)
    sys.stdout.flush()
    if any(thread.name in ABANDONED_THREADS for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code)  # everything is saved, and a tracker without response could block for minutes
    sys.exit(code)


def run_command(words: list[str]) -> int:
    """Run one verb. Returns the exit code: 1 for a failed check, 3 for unreadable images."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(format_overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from vitreous.version import __version__

        print(f"vitreous {__version__}")
        return 0
    verb, arguments = split_verb(words)
    module = import_module(VERBS[verb][0])
    if wants_help(arguments):
        print(format_help(module.Options, verb, "--help-all" in arguments))
        return 0
    rest, settings = split_settings(arguments) if "settings" in module.Options.__dataclass_fields__ else (arguments, {})
    require_model(verb, module.Options, [word for word in rest if word != "--json"])
    options, documented = parse_options(module.Options, verb, rest)
    if settings:
        options = dataclasses.replace(options, settings=settings)
    with reserve_stdout() if documented else nullcontext() as stream:
        console = Console(stream)
        check_model_argument(verb, options)
        document = module.run(options, console)
        console.close()
        if document is not None:
            console.document(document)
    return console.code or int(isinstance(document, dict) and document.get("passed") is False)


def split_verb(words: list[str]) -> tuple[str, list[str]]:
    """Split off the verb, one or two words (`data check`). Raises UsageError for an unknown one."""
    for count in (2, 1):
        verb = " ".join(words[:count])
        if verb in VERBS:
            return verb, words[count:]
    family = [verb for verb in VERBS if verb.split()[0] == words[0]]
    if family and (len(words) == 1 or words[1] in ("-h", "--help")):
        raise UsageError(f"incomplete verb {words[0]}", f"use one of {', '.join(family)}")
    named = " ".join(words[: 2 if family else 1])
    raise UsageError(
        f"unknown verb {named}", suggest_nearest(named, VERBS) or f"use one of {', '.join(family or VERBS)}"
    )


def split_settings(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Separate `--path.to.field WORDS…` from the other words: `--optimizer.betas 0.9 0.95`."""
    rest: list[str] = []
    settings: dict[str, list[str]] = {}
    into = rest
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if "." in name:
                into = settings.setdefault(name, [])
                into += [value] if equals else []
                continue
            into = rest
        into.append(word)
    return rest, settings


def parse_options(kind: type[Any], verb: str, words: list[str]) -> tuple[Any, bool]:
    """Parse a verb's options, and whether `--json` is set. Exits with 2 and a suggestion for invalid options."""
    import tyro
    from tyro.conf import DisallowNone

    hide_empty_defaults(kind)
    documented = "--json" in words
    words = [word for word in words if word != "--json"]
    try:
        options = tyro.cli(kind, prog=f"vitreous {verb}", args=words, config=(DisallowNone,))
        return options, documented
    except SystemExit as end:
        if documented and end.code == 2:
            print_json_error("invalid options, see stderr", f"vitreous {verb} --help", 2)
        raise


@cache
def hide_empty_defaults(kind: type[Any]) -> None:
    """Hide defaults that are None, False or empty in a verb's help. Changes the annotations, so call it once."""
    from typing import Annotated, ClassVar, get_origin, get_type_hints

    from tyro.conf import arg

    empty = ("None", "False", "", "''")
    hint = arg(help_behavior_hint=lambda default: "" if default in empty else f"(default: {default})")
    hinted = get_type_hints(kind, include_extras=True)
    kind.__annotations__ = {
        name: one if get_origin(one) is ClassVar else Annotated[one, hint] for name, one in hinted.items()
    }


def format_overview() -> str:
    """Format the output of `vitreous` without a verb."""
    rows = "\n".join(f"  {verb:10} {text}" for verb, (_, text) in VERBS.items())
    advice = "`vitreous VERB --help` shows the options of a verb. To start: `vitreous train digits`"
    return f"usage: vitreous VERB [OPTIONS]\n\n{rows}\n\n{advice}"


def print_json_error(message: str, hint: str, code: int) -> None:
    """Print the JSON document of a failed command."""
    write_line(format_json_line({"error": {"message": message, "hint": hint, "code": code}}), sys.stdout)


def print_error(error: VitreousError, words: list[str], code: int) -> int:
    """Print an error: two lines on stderr and, for `--json`, a document on stdout; only rank 0 prints."""
    if is_main_process():
        Console().error(error)
        if "--json" in words:
            print_json_error(error.message, error.hint, code)
    return code
