"""The entry point of `vitreous VERB …`: parse the verb and its options, run the verb, and report errors."""

from __future__ import annotations

import dataclasses
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any, NoReturn

from vitreous.cli.console import Console, format_json_line, prepare_streams, reserve_stdout
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

IMAGE_VERBS = ("predict", "embed", "evaluate", "inspect")  # verbs that take images or data after the model
# verbs that need another argument or option after the model
VERBS_WITH_MORE_ARGUMENTS = ("predict", "embed", "sample", "push")
MAX_HINT_WORDS = 3  # arguments after the model that a hint repeats

#: verb -> (module, summary); the module has a frozen dataclass `Options` and a function `run(options, console)`
VERBS = {
    "train": ("vitreous.cli.train", "train, evaluate and save a model"),
    "evaluate": ("vitreous.cli.evaluate", "evaluate a model on a split, or compare two models"),
    "predict": ("vitreous.cli.predict", "predict classes, masks, objects or values for images"),
    "embed": ("vitreous.cli.embed", "compute features of images, as npz, Parquet or JSONL"),
    "sample": ("vitreous.cli.sample", "generate images or clips with a generative model"),
    "serve": ("vitreous.cli.serve", "serve a model as a web page and an HTTP API"),
    "export": ("vitreous.cli.export", "export to ONNX, OpenVINO and others, verified against the PyTorch model"),
    "inspect": ("vitreous.cli.inspect", "draw figures of attention, filters, position embeddings and features"),
    "study": ("vitreous.cli.study", "reproduce a table or figure of a paper"),
    "soup": ("vitreous.cli.soup", "average the weights of several runs"),
    "watch": ("vitreous.cli.watch", "show the training curves of a run in a browser"),
    "data check": ("vitreous.cli.data_check", "find problems of a dataset before training"),
    "data dedup": ("vitreous.cli.data_dedup", "find images that another dataset contains too"),
    "data convert": ("vitreous.cli.data_convert", "convert boxes and masks between formats"),
    "data pack": ("vitreous.cli.data_pack", "pack a dataset into shards for training"),
    "convert": ("vitreous.cli.convert", "convert weights between formats"),
    "push": ("vitreous.cli.push", "publish a model on the Hugging Face Hub"),
    "recipes": ("vitreous.cli.recipes", "list recipes, or show one with its hyperparameters"),
    "models": ("vitreous.cli.models", "list models, or published weights"),
    "bench": ("vitreous.cli.bench", "compare the speed with other libraries on this machine"),
    "completion": ("vitreous.cli.completion", "print a shell completion script"),
    "doctor": ("vitreous.cli.doctor", "print versions, devices and supported dtypes"),
}
OUT_OF_MEMORY_HINT = "use --micro-batch auto, --recompute, or a smaller model"


def needs_model(options_type: type[Any]) -> bool:
    """Return whether a verb has a required model argument `run`."""
    return any(field.name == "run" and field.default is MISSING for field in fields(options_type))


def require_model(verb: str, options_type: type[Any], arguments: list[str]) -> None:
    """Raise UsageError if a verb needs a model and has no arguments."""
    if not arguments and needs_model(options_type):
        raise make_missing_model_error(verb, "", [])


def check_model_argument(verb: str, options: Any) -> None:
    """Raise UsageError if the model argument is an image or a folder of images."""
    from vitreous.weights.model_paths import is_finished_run, is_image_source

    if not needs_model(type(options)) or is_finished_run(run := options.run) or not is_image_source(run):
        return
    other_arguments = [*getattr(options, "images", ()), *filter(None, (getattr(options, "data", None),))]
    if verb in IMAGE_VERBS:
        if run_argument := next((argument for argument in other_arguments if is_finished_run(argument)), None):
            command = shlex.join(["vitreous", verb, run_argument, run])
            raise UsageError(f"the model must come first: {escape_unprintable(run)} contains images", f"try {command}")
        raise make_missing_model_error(verb, run, [run, *other_arguments])
    raise make_missing_model_error(verb, run, [])


def make_missing_model_error(verb: str, path: str, other_arguments: list[str]) -> UsageError:
    """Return the error for a command without a model; its hint is a command with the newest run.

    `path` is the argument at the position of the model, or empty. `other_arguments` are repeated in the hint.
    """
    from vitreous.weights.model_paths import find_newest_run

    problem = "no model given"
    if path:
        problem += f": {escape_unprintable(path)} {'contains images' if os.path.isdir(path) else 'is not a model'}"
    if not (newest := find_newest_run()):
        hint = f"there is no run in this folder; train one with vitreous train DATA, then vitreous {verb} RUN …"
        return UsageError(problem, hint)
    escaped = [escape_unprintable(argument) for argument in other_arguments[:MAX_HINT_WORDS]]
    command = shlex.join(["vitreous", verb, newest, *escaped]) + " …" * (
        len(other_arguments) > MAX_HINT_WORDS or (verb in VERBS_WITH_MORE_ARGUMENTS and not other_arguments)
    )
    return UsageError(problem, f"try {command}; {newest} is the newest run in this folder")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, print any error, and exit with the exit code."""
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    limit_thread_pools()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # training handles SIGTERM differently
    try:
        code = run_command(command_line)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = print_error(Interrupted("stopped"), command_line, 130)
    except BrokenPipeError:  # the process that reads the output closed the pipe
        redirect_to_null(sys.stdout)
        code = 0
    except VitreousError as error:
        code = print_error(error, command_line, error.code)
    except OSError as error:
        path_prefix = f"{error.filename}: " if error.filename else ""
        message = f"{path_prefix}{error.strerror or error}"
        code = print_error(VitreousError(message, "free some space, or write to another disk"), command_line, 6)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        code = print_error(VitreousError("out of memory", OUT_OF_MEMORY_HINT), command_line, 6)
    sys.stdout.flush()
    if any(thread.name in ABANDONED_THREADS for thread in threading.enumerate()):
        sys.stderr.flush()
        # all files are written, and the thread of a tracker that does not respond could block for minutes
        os._exit(code)
    sys.exit(code)


def run_command(command_line: list[str]) -> int:
    """Run one verb, `--help` or `--version`. Returns the exit code: 1 for a failed check, 3 for unreadable images."""
    if not command_line or command_line[0] in ("-h", "--help", "help"):
        print(format_overview())
        return 0 if command_line else 2
    if command_line[0] in ("-V", "--version"):
        from vitreous.version import __version__

        print(f"vitreous {__version__}")
        return 0
    verb, arguments = split_verb(command_line)
    module = import_module(VERBS[verb][0])
    from vitreous.cli.help import format_help, wants_help  # imports tyro, which the overview and --version do not need

    if wants_help(arguments):
        print(format_help(module.Options, verb, "--help-all" in arguments))
        return 0
    remaining, settings = (
        split_settings(arguments) if "settings" in module.Options.__dataclass_fields__ else (arguments, {})
    )
    require_model(verb, module.Options, [argument for argument in remaining if argument != "--json"])
    options, prints_json = parse_options(module.Options, verb, remaining)
    if settings:
        options = dataclasses.replace(options, settings=settings)
    with reserve_stdout() if prints_json else nullcontext() as stream:
        console = Console(stream)
        check_model_argument(verb, options)
        document = module.run(options, console)
        console.close()
        if document is not None:
            console.document(document)
    return console.code or int(isinstance(document, dict) and document.get("passed") is False)


def split_verb(command_line: list[str]) -> tuple[str, list[str]]:
    """Split a command line into the verb, of one or two words (`data check`), and its arguments.

    Raises UsageError for an unknown verb.
    """
    for count in (2, 1):
        verb = " ".join(command_line[:count])
        if verb in VERBS:
            return verb, command_line[count:]
    family = [verb for verb in VERBS if verb.split()[0] == command_line[0]]
    if family and (len(command_line) == 1 or command_line[1] in ("-h", "--help")):
        raise UsageError(f"incomplete verb {command_line[0]}", f"use one of {', '.join(family)}")
    unknown = " ".join(command_line[: 2 if family else 1])
    raise UsageError(
        f"unknown verb {unknown}", suggest_nearest(unknown, VERBS) or f"use one of {', '.join(family or VERBS)}"
    )


def split_settings(arguments: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Separate config settings, such as `--optimizer.betas 0.9 0.95`, from the other arguments.

    Returns the other arguments, and the values of each setting by its path.
    """
    remaining: list[str] = []
    settings: dict[str, list[str]] = {}
    target = remaining
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            if "." in name:
                target = settings.setdefault(name, [])
                target += [value] if equals else []
                continue
            target = remaining
        target.append(argument)
    return remaining, settings


def parse_options(options_type: type[Any], verb: str, arguments: list[str]) -> tuple[Any, bool]:
    """Parse the arguments of a verb. Returns its options, and whether `--json` is set. Raises UsageError for the first
    invalid option, value or argument."""
    import tyro
    from tyro.conf import DisallowNone

    prints_json = "--json" in arguments
    arguments = [argument for argument in arguments if argument != "--json"]
    try:
        with redirect_stderr(io.StringIO()):
            options = tyro.cli(options_type, prog=f"vitreous {verb}", args=arguments, config=(DisallowNone,))
    except SystemExit:
        from vitreous.cli.usage_errors import explain_usage_error

        raise explain_usage_error(options_type, verb, arguments) from None
    return options, prints_json


def format_overview() -> str:
    """Format the output of `vitreous` without a verb: usage and the list of verbs."""
    verb_lines = "\n".join(f"  {verb:10} {text}" for verb, (_, text) in VERBS.items())
    advice = "`vitreous VERB --help` shows the options of a verb. To start: `vitreous train digits`"
    return f"usage: vitreous VERB [OPTIONS]\n\n{verb_lines}\n\n{advice}"


def print_json_error(message: str, hint: str, code: int) -> None:
    """Print the JSON document of a failed command."""
    write_line(format_json_line({"error": {"message": message, "hint": hint, "code": code}}), sys.stdout)


def print_error(error: VitreousError, command_line: list[str], code: int) -> int:
    """Print an error with its hint on stderr and, with `--json`, as a document on stdout. Returns `code`.

    Only the process of rank 0 prints.
    """
    if is_main_process():
        Console().error(error)
        if "--json" in command_line:
            print_json_error(error.message, error.hint, code)
    return code
