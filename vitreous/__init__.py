"""vitreous: train, evaluate and deploy Vision Transformers. The public functions, imported on first use (PEP 562).

create(name, ...)       create a model by name, with random weights or with `weights=` a run, a file or a published name
wrap_backbone(module)   wrap an encoder of timm, transformers or your own code, to train it or to add a head
create_loader(data)     create a loader of batches for a custom training loop
train(data, ...)        train a model, as `vitreous train`; returns the run's summary
evaluate(run, ...)      evaluate a model, as `vitreous evaluate`; returns its document
inspect(run, ...)       create inspection figures of a model, as `vitreous inspect`
soup(runs, out, ...)    average runs of one model into a bundle, as `vitreous soup`
save(model, folder)     save a model as a bundle with class names and preprocessing, for all commands and `load`
load(run)               load a trained model: `.predict("dog.jpg")`, `.embed(["dog.jpg"])`, `.model`, `.transform`
build_zero_shot_classifier(run, labels) classify images by texts, with CLIP or SigLIP
sample(run, out, ...)   generate images, as `vitreous sample`
export(run, to="onnx")  export a model to a verified file for other runtimes
push(run, "hf:org/name") upload a bundle with its card to the Hugging Face Hub, as `vitreous push`
serve(run)              serve a web page and an HTTP API until stopped, as `vitreous serve`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vitreous.version import __version__ as __version__

if TYPE_CHECKING:
    from vitreous.apps.export.export import export as export
    from vitreous.apps.hub.push import push as push
    from vitreous.apps.server.start import serve as serve
    from vitreous.inference.predict import build_zero_shot_classifier as build_zero_shot_classifier
    from vitreous.inference.predict import load as load
    from vitreous.inference.samples import sample as sample
    from vitreous.jobs.loader import create_loader as create_loader
    from vitreous.jobs.soup import soup as soup
    from vitreous.jobs.train import train as train
    from vitreous.models.config import ViTConfig as ViTConfig
    from vitreous.models.foreign import wrap_backbone as wrap_backbone
    from vitreous.models.vit import ViT as ViT
    from vitreous.reports.evaluate import evaluate as evaluate
    from vitreous.reports.inspect import inspect as inspect
    from vitreous.weights.bundle import save as save
    from vitreous.weights.create import create as create

#: public name -> module that defines it
_MODULES = {
    "ViT": "vitreous.models.vit",
    "ViTConfig": "vitreous.models.config",
    "create": "vitreous.weights.create",
    "wrap_backbone": "vitreous.models.foreign",
    "create_loader": "vitreous.jobs.loader",
    "train": "vitreous.jobs.train",
    "evaluate": "vitreous.reports.evaluate",
    "inspect": "vitreous.reports.inspect",
    "soup": "vitreous.jobs.soup",
    "load": "vitreous.inference.predict",
    "build_zero_shot_classifier": "vitreous.inference.predict",
    "sample": "vitreous.inference.samples",
    "export": "vitreous.apps.export.export",
    "push": "vitreous.apps.hub.push",
    "serve": "vitreous.apps.server.start",
    "save": "vitreous.weights.bundle",
}
__all__ = [*_MODULES, "__version__"]


#: function or class of timm or transformers -> the vitreous equivalent that the error suggests
_EQUIVALENTS = {
    "create_model": "vitreous.create(NAME)",
    "from_pretrained": "vitreous.create(weights='hf:ORG/NAME'), or vitreous.load('hf:ORG/NAME')",
    "AutoModel": "vitreous.create(weights='hf:ORG/NAME')",
    "AutoImageProcessor": "vitreous.load(RUN).transform",
    "pipeline": "vitreous.load(RUN).predict(images)",
    "list_models": "vitreous.models.names.MODEL_NAMES, or the command `vitreous models`",
    "load_model": "vitreous.load(RUN)",
}

if not TYPE_CHECKING:  # type checkers use the names above and reject others

    def __getattr__(name):
        if name in _MODULES:
            return getattr(import_module(_MODULES[name]), name)
        problem = f"module 'vitreous' has no attribute '{name}'"
        if name in _EQUIVALENTS:
            raise AttributeError(f"{problem}: use {_EQUIVALENTS[name]}")
        raise AttributeError(problem, name=name, obj=import_module("vitreous"))


def __dir__() -> list[str]:
    return sorted(__all__)
