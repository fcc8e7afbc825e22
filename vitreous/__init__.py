"""vitreous: the Vision Transformer system. Everything public, on one page; imported when first used (PEP 562).

create(name, ...)       a model by name, freshly initialised, or with `weights=` of a run, a file or another library
wrap_backbone(module)   an encoder of timm, transformers or your own, for our objectives, heads and engines
create_loader(data)     batches of a data set for a training loop of your own
train(data, ...)        what `vitreous train` does; returns the run's summary
evaluate(run, ...)      what `vitreous evaluate` does; returns its document
inspect(run, ...)       what `vitreous inspect` does: figures of what a model looks at
soup(runs, out, ...)    what `vitreous soup` does: runs of one model averaged into a bundle
save(model, folder)     a model as a bundle: with class names and preprocessing, for every command and `load`
load(run)               a trained model: `.predict("dog.jpg")`, `.embed(["dog.jpg"])`, `.model`, `.transform`
sample(run, out, ...)   what `vitreous sample` does: images of a model that makes them
export(run, to="onnx")  what `vitreous export` does: a file for other programs, checked against the original
push(run, "hf:org/name") what `vitreous push` does: a bundle on the Hugging Face Hub, with its card
serve(run)              what `vitreous serve` does: the page and HTTP, until it is stopped
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vitreous.version import __version__ as __version__

if TYPE_CHECKING:
    from vitreous.apps.export.export import export as export
    from vitreous.apps.hub.push import push as push
    from vitreous.apps.server.start import serve as serve
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

_HOMES = {
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
    "sample": "vitreous.inference.samples",
    "export": "vitreous.apps.export.export",
    "push": "vitreous.apps.hub.push",
    "serve": "vitreous.apps.server.start",
    "save": "vitreous.weights.bundle",
}
__all__ = [*_HOMES, "__version__"]


#: functions and classes of timm and transformers -> what to use here
_ELSEWHERE = {
    "create_model": "vitreous.create(NAME)",
    "from_pretrained": "vitreous.create(weights='hf:ORG/NAME'), or vitreous.load('hf:ORG/NAME')",
    "AutoModel": "vitreous.create(weights='hf:ORG/NAME')",
    "AutoImageProcessor": "vitreous.load(RUN).transform",
    "pipeline": "vitreous.load(RUN).predict(images)",
    "list_models": "vitreous.models.names.MODEL_NAMES, or the command `vitreous models`",
    "load_model": "vitreous.load(RUN)",
}

if not TYPE_CHECKING:  # type checkers know the names above, and refuse others

    def __getattr__(name):
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        problem = f"module 'vitreous' has no attribute '{name}'"
        if name in _ELSEWHERE:
            raise AttributeError(f"{problem}: use {_ELSEWHERE[name]}")
        raise AttributeError(problem, name=name, obj=import_module("vitreous"))


def __dir__() -> list[str]:
    return sorted(__all__)
