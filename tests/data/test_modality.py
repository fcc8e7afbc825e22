"""The contract of modalities: every entry of the table keeps it, and `grids.py` adds a modality in one file."""

import pickle
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from PIL import Image

import vitreous
from tests.data.films import write_clip
from tests.data.grids import GRID_MODALITIES, GridPreprocess, write_grids
from vitreous.cli.main import main
from vitreous.config import from_builtins, to_builtins
from vitreous.data.annotations.target import get_sample_noun
from vitreous.data.loader import EvalLoader
from vitreous.data.modalities.bands import BandPreprocess
from vitreous.data.modalities.clips import ClipPreprocess
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.data.modalities.native import NativePreprocess
from vitreous.data.modalities.signals import SignalPreprocess
from vitreous.data.modalities.table import MODALITIES, AnyPreprocess
from vitreous.data.modalities.volumes import VolumePreprocess
from vitreous.data.sources import open_data
from vitreous.errors import DataError, UsageError
from vitreous.weights.bundle import load_bundle

EXAMPLE_GENERATOR = np.random.default_rng(0)
RGB_PIXELS = EXAMPLE_GENERATOR.integers(0, 256, (20, 30, 3), dtype=np.uint8)
#: a preprocessing of each modality, and matching raw arrays
MODALITY_EXAMPLES = {
    "images": (ImagePreprocess((16, 24), share=0.9), RGB_PIXELS),
    "bands": (BandPreprocess((16, 24), 5, (0.4,) * 5, (0.2,) * 5, numbers="float32"), EXAMPLE_GENERATOR.random((20, 30, 5), np.float32)),
    "native": (NativePreprocess((16, 16), tokens=12, patch=(4, 4)), RGB_PIXELS),
    "clips": (ClipPreprocess((3, 16, 16), stride=2), np.stack([RGB_PIXELS] * 9)),
    "volumes": (VolumePreprocess((6, 7, 8), 1, (0.0,), (1.0,), fit="squash"), EXAMPLE_GENERATOR.random((9, 7, 8))),
    "signals": (SignalPreprocess((40,), 2, (0.0,) * 2, (1.0,) * 2, standardise="data"), EXAMPLE_GENERATOR.random((50, 2))),
    "grids": (GridPreprocess((8, 8), 1, (0.1,), (2.0,), unit_height=3.0), EXAMPLE_GENERATOR.random((10, 12))),
}  # fmt: skip


@pytest.fixture
def _register_grids(monkeypatch):
    for name, modality in GRID_MODALITIES.items():
        monkeypatch.setitem(MODALITIES, name, modality)


@pytest.mark.usefixtures("_register_grids")
def test_every_modality_has_an_example():
    assert MODALITY_EXAMPLES.keys() == MODALITIES.keys()
    assert all(type(preprocess) is MODALITIES[name] for name, (preprocess, _) in MODALITY_EXAMPLES.items())


@pytest.mark.usefixtures("_register_grids")
@pytest.mark.parametrize("name", MODALITY_EXAMPLES)
def test_a_modality_keeps_the_contract(name):
    preprocess, pixels = MODALITY_EXAMPLES[name]
    assert preprocess.name == name and len(preprocess.image) == preprocess.axes
    # serialised configs and samples are restored unchanged
    builtins = to_builtins(preprocess)
    assert from_builtins(AnyPreprocess, builtins) == preprocess and pickle.loads(pickle.dumps(preprocess)) == preprocess
    assert builtins["name"] == name and builtins.keys() == {field.name for field in fields(preprocess)}
    with pytest.raises(UsageError, match="unknown setting noun"):
        from_builtins(AnyPreprocess, builtins | {"noun": "toys"})
    with pytest.raises(UsageError, match=f"the size of {preprocess.noun} has {preprocess.axes} axes"):
        from_builtins(AnyPreprocess, builtins | {"image": [8, 8, 8, 8]})
    # shapes, dtypes and ranges match the declared ones
    array = preprocess.to_array(preprocess.decode(preprocess.from_pixels(pixels, "x")))
    assert array.dtype == preprocess.array_dtype and array.nbytes <= preprocess.nbytes
    assert array.shape[0] == preprocess.channels and array.ndim == preprocess.axes + 1
    assert not preprocess.stacks or array.shape[1:] == preprocess.image
    tensor = torch.from_numpy(array)
    assert tensor.dtype == preprocess.dtype == preprocess.blank().dtype
    batch = preprocess.collate([tensor, tensor])
    assert (batch.shape == (2, *array.shape)) if preprocess.stacks else len(batch) == 2
    # normalisation with and without PyTorch is bit-identical, and invertible
    normal = preprocess.normalise(tensor[None])
    assert normal.dtype == torch.float32 and torch.equal(
        normal, torch.from_numpy(preprocess.normalise_array(array[None]))
    )
    assert torch.allclose(preprocess.denormalise(normal), tensor[None].float(), rtol=1e-4, atol=1e-3)
    assert preprocess.noise(2).shape == (2, preprocess.channels, *preprocess.image)
    # settings of other modalities are dropped, sizes are updated
    assert preprocess.adjust(tubes=3, mean=preprocess.mean) == preprocess
    larger = preprocess.with_image(tuple(2 * side for side in preprocess.image))
    assert larger.with_image(preprocess.image) == preprocess
    assert preprocess.with_one_size().stacks


def test_decoding_needs_no_pytorch(tmp_path):
    Image.fromarray(RGB_PIXELS).save(tmp_path / "a.png")
    write_clip(tmp_path / "a.gif", np.stack([RGB_PIXELS] * 3))
    np.save(tmp_path / "a.npy", EXAMPLE_GENERATOR.random((6, 7, 8)))
    script = """
import sys
from vitreous.data.modalities.table import MODALITIES
images, clips, volumes = (MODALITIES[name] for name in ("images", "clips", "volumes"))
for preprocess, file in ((images((8, 8)), "a.png"), (clips((2, 8, 8)), "a.gif"), (volumes((8, 8, 8), 1, (0.0,), (1.0,)), "a.npy")):
    array = preprocess.to_array(preprocess.decode(file))
    preprocess.normalise_array(array[None])
    print(array.shape)
assert "torch" not in sys.modules
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert process.stdout.split("\n")[:3] == ["(3, 8, 8)", "(3, 2, 8, 8)", "(1, 8, 8, 8)"], process.stderr


@pytest.fixture(scope="module")
def grid_folder(tmp_path_factory):
    return write_grids(tmp_path_factory.mktemp("grids"), 20)


@pytest.mark.usefixtures("_register_grids")
def test_folders_of_a_new_modality_are_read(grid_folder, tmp_path):
    data = open_data(grid_folder)
    assert data.classes == ("hill", "slope") and {get_sample_noun(split) for split in data.splits.values()} == {"grids"}
    assert len(data.splits["test"]) == 20 and len(GridPreprocess.find_files(str(grid_folder))) == 60
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.grid").write_text("1 2\n3\n")
    with pytest.raises(DataError, match=r"0\.grid: no grid of numbers"):
        GridPreprocess((4, 4), 1).decode(tmp_path / "a" / "0.grid")


@pytest.mark.usefixtures("_register_grids")
def test_a_new_modality_is_trained_evaluated_and_predicted(grid_folder, tmp_path, capsys):
    """A run learns the classes of grids; workers, its bundle, and files, folders or arrays as input agree."""
    predict_options = {"device": "cpu", "precision": "fp32"}
    settings = {"preprocess.unit_height": ["0.5"]}
    options = {"model": "ViT-32x1/4", "epochs": 8, "batch_size": 8, "workers": 1, "settings": settings}
    summary = vitreous.train(grid_folder, out=tmp_path / "run", progress=False, **options, **predict_options)
    assert summary["test"]["top1"] == 1.0, summary["test"]
    bundle = load_bundle(tmp_path / "run" / "model")
    preprocess = bundle.preprocess
    assert isinstance(preprocess, GridPreprocess) and preprocess.unit_height == 0.5 and preprocess.image == (8, 12)
    document = vitreous.evaluate(tmp_path / "run", **predict_options)
    assert document["test"]["nll"] == pytest.approx(summary["test"]["nll"], abs=1e-3)
    split = open_data(grid_folder).splits["test"]
    in_process, in_workers = (next(EvalLoader(split, preprocess, workers).iterate_batches(20))[1] for workers in (0, 2))
    assert all(torch.equal(a, b) for a, b in zip(in_process, in_workers, strict=True))
    file = grid_folder / "test" / "hill" / "0.grid"
    predictor = vitreous.load(tmp_path / "run", **predict_options)
    by_path, by_array = predictor.predict([file, np.loadtxt(file, dtype=np.float32)])
    assert by_path.names[0] == by_array.names[0] == "hill"
    # the text file stores five decimals
    assert by_path.probabilities == pytest.approx(by_array.probabilities, abs=1e-5)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main(["predict", str(tmp_path / "run"), str(grid_folder / "test"), "--json", "--device", "cpu"])
    assert not exit_info.value.code and capsys.readouterr().out.count(".grid") == 20
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit):
        main(["predict", str(tmp_path / "run"), str(tmp_path / "empty"), "--device", "cpu"])
    assert "no grids in" in capsys.readouterr().err


@pytest.mark.usefixtures("_register_grids")
def test_models_of_other_modalities_reject_a_new_modality(grid_folder, tmp_path):
    vitreous.save(vitreous.create("ViT-32x1/4", 16, 2), tmp_path / "flat")
    with pytest.raises(UsageError, match=r"flat needs images, but .* contains grids\n  use a dataset of images"):
        vitreous.evaluate(tmp_path / "flat", grid_folder, device="cpu")
    with pytest.raises(UsageError, match=r"the weights of .* are for images, but the data are grids"):
        vitreous.train(grid_folder, out=tmp_path / "run", init=str(tmp_path / "flat"), progress=False, device="cpu")
    with pytest.raises(UsageError, match=r"contains grids, but mae needs images"):
        vitreous.train(grid_folder, out=tmp_path / "run", recipe="mae", progress=False, device="cpu")
