"""What many tests need: small image folders, a tiny run, and a command line in a fresh process."""

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

os.environ["VITREOUS_ENGINE_CHOICE"] = "0"  # by PyTorch, whatever is installed and however busy the machine is
settings.register_profile("steady", deadline=None, derandomize=True)  # the same examples everywhere, however slow
settings.load_profile("steady")

#: a run of seconds: a small ViT, every kind of randomness, more than two epochs, a short last step
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


#: the only reasons for which a test may be skipped, as regular expressions, and why each is allowed; any other skip fails
ALLOWED_SKIPS = {
    "no GPU on this machine": "the base case is one processor",
    "is not on the machine with a GPU": "a library that the machine with a GPU may lack",
    "no Chromium on this machine": "a browser is not a Python package; `.ci/run` installs it",
    "not a checkout": "an archive of the sources has no .ci",
    "read from /proc": "Linux alone has it",
    "other systems do not hold a process to its limit": "a property of Linux",
    "could not import 'fcntl'": "a system without fork",
    "root writes anywhere": "permissions do not hold for root",
    "only root can become another user": "the other half of the tests of permissions",
    "a library of the page on interoperability": "the extra `test` brings those that are small",
    "pyright is not installed": "the extra `dev` brings it",
    "the extra `docs` is not installed": "it builds the site and does nothing else",
    "the extra `geotiff` is not installed": "codecs of 26 MB, without which files are refused with its name",
    "SCIPY_ARRAY_API is not set": "one check of scikit-learn's, of arrays that are not numpy's",
    "a file system that takes these names for one": "a property of the file system",
    "(tensorboard|wandb|mlflow|flask) is not installed": "an extra for a program that shows runs",
}


#: files of few tests that take longest: begun first, so that no worker is left alone with one at the end
SLOWEST_FILES = ("reliability/test_reliability.py", "training/test_ranks.py", "test_readme.py")


def pytest_configure(config):
    """xdist would begin with the files of most tests."""
    config.option.loadscopereorder = False


def pytest_itemcollected(item):
    """What makes choices as on each kind of processor belongs to the tests that another kind runs too."""
    if "processor" in getattr(item, "fixturenames", ()):
        item.add_marker("processor")


def pytest_runtest_setup(item):
    """Tests marked `gpu` run where there is a GPU, or on the CPU with VITREOUS_GPU_TESTS=cpu."""
    on_cpu = os.environ.get("VITREOUS_GPU_TESTS") == "cpu"
    if item.get_closest_marker("gpu") and not (on_cpu or torch.cuda.is_available()):
        pytest.skip("no GPU on this machine")


def fail_unexpected_skip(report):
    """Make a failure of a skip, of a test or of a whole file, for a reason that is not in `ALLOWED_SKIPS`."""
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
    """The files of `FIRST` first, everything else in its order."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(SLOWEST_FILES))


#: the two kinds of processor between which choices differ, as VITREOUS_CPU_ISA names them: the precision is fp32 or
#: bf16 by default
PRECISION_BY_ISA = {"AVX2": "fp32", "AVX512_CORE_BF16": "bf16"}


@pytest.fixture(params=PRECISION_BY_ISA)
def processor(request, monkeypatch) -> str:
    """Choices as on a processor of each kind in turn, wherever the test runs; returns the precision that is then the
    default."""
    monkeypatch.setenv("VITREOUS_CPU_ISA", request.param)
    return PRECISION_BY_ISA[request.param]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors on two cores are slower than on one, and the number of threads changes the last bits."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def without_neighbours():
    """Tests run side by side: no output may depend on whether another one was felt."""
    ContentionMonitor.SECONDS = math.inf


@pytest.fixture(autouse=True, scope="session")
def without_sync():
    """No machine loses power here: nothing waits for the disk but the processes of tests/reliability."""
    sync, os.fsync = os.fsync, lambda descriptor: None
    yield
    os.fsync = sync


@pytest.fixture(autouse=True, scope="session")
def without_default_weights():
    """No run starts from weights that this machine happens to have, or asks a server for them."""
    find, default_weights.find_available_weights = default_weights.find_available_weights, lambda rows, probe: None
    yield
    default_weights.find_available_weights = find


@pytest.fixture(autouse=True, scope="session")
def forked_readers():
    """A pickled file is read by a forked child (`tests/forked.py`); tests/weights/test_pickled.py has the real one."""
    if hasattr(os, "fork"):
        pickled.run_unpickle_child, run_child = ForkingReader(), pickled.run_unpickle_child
        yield
        pickled.run_unpickle_child.close()
        pickled.run_unpickle_child = run_child
    else:
        yield


@pytest.fixture(autouse=True, scope="module")
def without_drawings(request):
    """Pages are without curves and diagrams, which take longer to draw than a tiny run to train, but in modules marked
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
    """A noisy picture (width, height) with a tint that a model can learn."""
    pixels = np.random.default_rng(seed).integers(0, 128, (size[1], size[0], 3), dtype=np.uint8)
    pixels[..., tint % 3] += 100
    return Image.fromarray(pixels)


def make_folder(root: Path, counts: dict[str, int], classes=("ant", "bee", "cat"), size=(16, 16)) -> Path:
    """Images as root/SPLIT/CLASS/*.png, or root/CLASS/*.png where the split is called ''."""
    for number, (split, count) in enumerate(counts.items()):
        for label, name in enumerate(classes):
            home = root / split / name
            home.mkdir(parents=True)
            for index in range(count):
                make_image(1000 * number + 100 * label + index, size, label).save(home / f"{index}.png")
    return root


@pytest.fixture(scope="session")
def published_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for VITREOUS_MIRROR with a small random ViT of 224 pixels and 5 classes as `vit-s16-augreg`."""
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
    """Three classes, 12 training, 4 validation and 4 test images each."""
    return make_folder(tmp_path / "photos", {"train": 12, "val": 4, "test": 4})


def run_cli(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`vitreous WORDS` in this process, which has imported everything."""
    out, err, before, home = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM), Path.cwd()
    os.chdir(cwd or home)
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
        os.chdir(home)
        signal.signal(signal.SIGTERM, before)
    return subprocess.CompletedProcess(words, int(end.value.code or 0), out.getvalue(), err.getvalue())  # type: ignore[arg-type]


def run_command(
    *words: str, timeout: float = 120, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`vitreous WORDS` in a process of its own, which imports for 3 s: for what a process of its own is needed for."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", "vitreous", *words], capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env
    )


def parse_json_output(result: subprocess.CompletedProcess[str]) -> dict:
    """The one JSON document that `--json` promises on stdout."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
