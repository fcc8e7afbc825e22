"""Shared fixtures and helpers: small image folders, a tiny run, and the command line in this or a new process."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

from tests.forked import ForkingReader
from vitreous.cli.main import main
from vitreous.jobs import default_weights
from vitreous.models.config import MlpConfig
from vitreous.reports.pages import report
from vitreous.system.cores import ContentionMonitor
from vitreous.weights import pickled

os.environ["VITREOUS_ENGINE_CHOICE"] = "0"  # PyTorch, regardless of installed engines and the load of the machine
# the same examples everywhere, without a time limit
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

#: a run of seconds: a small ViT, all sources of randomness, more than two epochs, a short last step
TINY_RUN = {
    "model": "ViT-32x2/8",
    "epochs": 2.5,
    "batch_size": 8,
    "accumulate": 2,
    "precision": "fp32",
    "ema": 0.9,
    "drop_path": 0.1,
    "mixup": 0.2,
    "log_every": 1,
    "evaluate_every": 4,
    "save_every": 1,
    "device": "cpu",
}


#: the only allowed reasons for skipping a test, as regular expressions, with explanations; other skips fail
ALLOWED_SKIPS = {
    "no GPU on this machine": "most machines have only a CPU",
    "is not on the machine with a GPU": "an optional library on that machine",
    "no Chromium on this machine": "a browser is not a Python package; `.ci/run` installs it",
    "not a checkout": "an archive of the sources has no .ci",
    "read from /proc": "Linux only",
    "other systems do not hold a process to its limit": "Linux only",
    "could not import 'fcntl'": "a system without fork",
    "root writes anywhere": "permissions do not hold for root",
    "only root can become another user": "the other half of the tests of permissions",
    "a library of the page on interoperability": "the extra `test` contains only the small libraries",
    "pyright is not installed": "part of the extra `dev`",
    "the extra `docs` is not installed": "only needed to build the site",
    "the extra `geotiff` is not installed": "26 MB of codecs; without them an error names the extra",
    "SCIPY_ARRAY_API is not set": "one scikit-learn check, for arrays other than numpy's",
    "a file system that takes these names for one": "a property of the file system",
    "(tensorboard|wandb|mlflow|flask) is not installed": "an extra for an experiment tracker",
    r"tiles \(AMX\): ": "native kernels of Intel processors with AMX",
    "only for x86-64 processors with AVX512-BF16 on Linux": "native kernels of such processors",
}


#: slow files with few tests: started first, so that no worker is left with one of them at the end
SLOWEST_FILES = ("reliability/test_reliability.py", "training/test_ranks.py", "test_readme.py")


def pytest_configure(config):
    """By default xdist would start with the files that have the most tests."""
    config.option.loadscopereorder = False


def pytest_itemcollected(item):
    """Mark tests that use the fixture `processor`, so that they can be run as another processor."""
    if "processor" in getattr(item, "fixturenames", ()):
        item.add_marker("processor")


def pytest_runtest_setup(item):
    """Run tests marked `gpu` only if there is a GPU, or on the CPU with VITREOUS_GPU_TESTS=cpu."""
    on_cpu = os.environ.get("VITREOUS_GPU_TESTS") == "cpu"
    if item.get_closest_marker("gpu") and not (on_cpu or torch.cuda.is_available()):
        pytest.skip("no GPU on this machine")


def fail_unexpected_skip(report):
    """Turn a skip of a test or file into a failure if its reason is not in `ALLOWED_SKIPS`."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(re.search(allowed, reason) for allowed in ALLOWED_SKIPS):
            report.outcome, report.longrepr = "failed", f"{reason}\nThis is not in ALLOWED_SKIPS of tests/conftest.py."
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return fail_unexpected_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return fail_unexpected_skip((yield))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Move the files of `SLOWEST_FILES` to the front and keep the order of the others."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(SLOWEST_FILES))


#: processor levels with different defaults, as values of VITREOUS_CPU_ISA, and their default precision
PRECISION_BY_ISA = {"AVX2": "fp32", "AVX512_CORE_BF16": "bf16"}


@pytest.fixture(params=PRECISION_BY_ISA)
def processor(request, monkeypatch) -> str:
    """Run a test with the defaults of each processor level, on any machine; returns the default precision."""
    monkeypatch.setenv("VITREOUS_CPU_ISA", request.param)
    return PRECISION_BY_ISA[request.param]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors are slower on two cores than on one, and the number of threads changes rounding."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def without_contention_checks():
    """Tests run in parallel: no output may depend on detected contention."""
    ContentionMonitor.SECONDS = math.inf


@pytest.fixture(autouse=True, scope="session")
def without_sync():
    """Skip fsync to save time; only the processes of tests/reliability need it."""
    sync, os.fsync = os.fsync, lambda descriptor: None
    yield
    os.fsync = sync


@pytest.fixture(autouse=True, scope="session")
def without_default_weights():
    """No run starts from weights cached on this machine, or requests them from a server."""
    find, default_weights.find_available_weights = default_weights.find_available_weights, lambda rows, probe: None
    yield
    default_weights.find_available_weights = find


@pytest.fixture(autouse=True, scope="session")
def forked_readers():
    """Read pickled files in a forked child (`tests/forked.py`); tests/weights/test_pickled.py tests the real one."""
    if hasattr(os, "fork"):
        pickled.run_unpickle_child, run_child = ForkingReader(), pickled.run_unpickle_child
        yield
        pickled.run_unpickle_child.close()
        pickled.run_unpickle_child = run_child
    else:
        yield


@pytest.fixture(autouse=True, scope="module")
def without_drawings(request):
    """Pages have no curves and diagrams, which take longer to draw than a tiny run trains, except in modules marked
    `drawn`."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("drawn"):
            for name in (
                "draw_metric_curves",
                "build_loss_panel",
                "draw_scatter",
                "draw_confusion_plot",
                "draw_reliability_plot",
            ):
                patch.setattr(report, name, lambda *parts, **named: "")
        yield


@pytest.fixture(scope="module")
def without_pages():
    """No `train` or `evaluate` of this module writes its page: for modules that repeat them many times."""
    write_report, report.write_report = report.write_report, lambda *parts, **named: None
    yield
    report.write_report = write_report


def make_image(seed: int, size: tuple[int, int] = (16, 16), tint: int = 0) -> Image.Image:
    """A noisy image (width, height) with a tint that a model can learn."""
    pixels = np.random.default_rng(seed).integers(0, 128, (size[1], size[0], 3), dtype=np.uint8)
    pixels[..., tint % 3] += 100
    return Image.fromarray(pixels)


def make_folder(root: Path, counts: dict[str, int], classes=("ant", "bee", "cat"), size=(16, 16)) -> Path:
    """Write images as root/SPLIT/CLASS/*.png, or root/CLASS/*.png if the split is called ''."""
    for split_index, (split, count) in enumerate(counts.items()):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                make_image(1000 * split_index + 100 * label + index, size, label).save(folder / f"{index}.png")
    return root


@pytest.fixture(scope="session")
def published_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for VITREOUS_MIRROR with a small random ViT for 224 pixels and 5 classes as `vit-s16-augreg`."""
    from vitreous.data.modalities.images import ImagePreprocess
    from vitreous.models.config import ViTConfig
    from vitreous.models.vit import ViT
    from vitreous.tasks.classification import Classification
    from vitreous.weights.bundle import Bundle
    from vitreous.weights.convert import convert
    from vitreous.weights.published import PUBLISHED_BY_NAME

    mirror = tmp_path_factory.mktemp("mirror")
    file = mirror / PUBLISHED_BY_NAME["vit-s16-augreg"].source.partition("://")[2]
    file.parent.mkdir(parents=True)
    torch.manual_seed(0)
    model = ViT(
        ViTConfig(image=(224, 224), patch=(16, 16), width=32, depth=1, heads=1, classes=5, mlp=MlpConfig(hidden=64))
    )
    Bundle(model, Classification(tuple("abcde")), ImagePreprocess((224, 224))).save(mirror / "bundle")
    convert(mirror / "bundle", file, "google-npz")
    return mirror


@pytest.fixture
def photo_folder(tmp_path: Path) -> Path:
    """Three classes with 12 training, 4 validation and 4 test images each."""
    return make_folder(tmp_path / "photos", {"train": 12, "val": 4, "test": 4})


def run_cli(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `vitreous WORDS` in this process, without the time for imports."""
    out, err, handler, working_directory = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM), Path.cwd()
    os.chdir(cwd or working_directory)
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(out),
            redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            patch.setattr(sys, "argv", ["vitreous", *words])
            main(words)
    finally:
        os.chdir(working_directory)
        signal.signal(signal.SIGTERM, handler)
    return subprocess.CompletedProcess(words, int(end.value.code or 0), out.getvalue(), err.getvalue())  # type: ignore[arg-type]


def run_command(
    *words: str, timeout: float = 120, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `vitreous WORDS` in a new process, which takes 3 s to import: only for tests that need one."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", "vitreous", *words], capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env
    )


def parse_json_output(result: subprocess.CompletedProcess[str]) -> dict:
    """Parse the one JSON document that `--json` prints on stdout."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
