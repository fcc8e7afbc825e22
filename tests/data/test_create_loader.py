"""`vitreous.create_loader`: batches for a custom training loop."""

from __future__ import annotations

import pytest
import torch

import vitreous
from tests.conftest import make_folder, make_image
from vitreous.data.modalities.images import ImagePreprocess
from vitreous.errors import DataError, UsageError


def concatenate_epoch(loader):
    """Concatenate all batches of an epoch."""
    batches = list(loader)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def test_batches_are_dicts_with_samples_first(photo_folder):
    loader = vitreous.create_loader(photo_folder, batch_size=10)
    batches = list(loader)
    assert len(loader) == len(batches) == 4 and [len(batch["labels"]) for batch in batches] == [10, 10, 10, 6]
    assert batches[0]["images"].shape == (10, 3, 16, 16) and batches[0]["images"].dtype == torch.float32
    assert loader.classes == ("ant", "bee", "cat")
    epoch = concatenate_epoch(loader)
    assert sorted(epoch["samples"].tolist()) == list(range(36))
    labels = torch.from_numpy(loader.data.split("train").labels)
    assert torch.equal(epoch["labels"], labels[epoch["samples"]])
    assert len(list(vitreous.create_loader(photo_folder, batch_size=10, drop_last=True))) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_order_and_views_depend_only_on_seed_and_epoch(photo_folder, workers):
    loader, second_loader = (
        vitreous.create_loader(photo_folder, seed=3),
        vitreous.create_loader(photo_folder, seed=3, workers=workers),
    )
    first, second = concatenate_epoch(loader), concatenate_epoch(loader)
    assert not torch.equal(first["samples"], second["samples"])
    second_loader.set_epoch(1)
    repeated_epoch = concatenate_epoch(second_loader)
    assert all(torch.equal(repeated_epoch[name], second[name]) for name in second)
    other_seed = concatenate_epoch(vitreous.create_loader(photo_folder, seed=4))
    assert not torch.equal(other_seed["samples"], first["samples"])


def test_evaluation_loaders_apply_the_preprocessing(photo_folder):
    preprocess = ImagePreprocess((12, 12), mean=(0.4,) * 3, std=(0.2,) * 3)
    loader = vitreous.create_loader(photo_folder, "test", batch_size=5, preprocess=preprocess)
    epoch = concatenate_epoch(loader)
    assert epoch["samples"].tolist() == list(range(12))
    split = loader.data.split("test")
    assert torch.equal(epoch["images"][7], preprocess.transform(split.raw(7)))
    assert len(list(vitreous.create_loader(photo_folder, "test", batch_size=5, drop_last=True))) == 2
    unaugmented_loader = vitreous.create_loader(photo_folder, "train", augment=False)
    assert torch.equal(concatenate_epoch(unaugmented_loader)["images"], concatenate_epoch(unaugmented_loader)["images"])


def test_multi_view_and_unlabelled_batches_are_loaded(tmp_path):
    for number in range(6):
        make_image(number, (24, 24)).save(tmp_path / f"{number}.png")
    batch = next(iter(vitreous.create_loader(tmp_path, recipe="dino", batch_size=2)))
    assert batch["images"].shape[:2] == (2, 2) and batch["local"].ndim == 5 and "labels" not in batch
    assert batch["images"].dtype == batch["local"].dtype == torch.float32


def test_a_custom_training_loop_learns(tmp_path):
    root = make_folder(tmp_path / "photos", {"train": 16, "val": 4})
    loader, val_loader = (vitreous.create_loader(root, split, batch_size=16) for split in ("train", "val"))
    torch.manual_seed(0)
    model = vitreous.create("ViT-32x2/8", img_size=16, num_classes=len(loader.classes))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(8):
        for batch in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch["images"]), batch["labels"]).backward()
            optimizer.step()
    val_epoch = concatenate_epoch(val_loader)
    assert (model.eval()(val_epoch["images"]).argmax(1) == val_epoch["labels"]).float().mean() > 0.8


def test_invalid_loader_options_are_rejected(photo_folder):
    with pytest.raises(DataError, match="has no valid split"):
        vitreous.create_loader(photo_folder, "valid")
    with pytest.raises(UsageError, match="perhaps you meant batch_size"):
        vitreous.create_loader(photo_folder, batchsize=3)
    with pytest.raises(UsageError, match="batch_size=0"):
        vitreous.create_loader(photo_folder, batch_size=0)
    (photo_folder / "train" / "ant" / "torn.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"torn\.png"):
        list(vitreous.create_loader(photo_folder))
    with pytest.raises(DataError, match="no such folder"):
        vitreous.create_loader(photo_folder / "nothing")
    assert concatenate_epoch(vitreous.create_loader(photo_folder, "val"))["images"].isfinite().all()
