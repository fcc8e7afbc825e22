"""Pushing a bundle to the Hub and loading it back, with a local stand-in for the Hub's API, and failures."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml

import vitreous
from tests.conftest import make_image, parse_json_output, run_cli
from tests.jobs.hub_server import FakeHub
from vitreous.apps.hub.model_card import strip_local_folders, strip_provenance_paths
from vitreous.apps.hub.push import parse_repository
from vitreous.errors import UsageError, VitreousError
from vitreous.weights.bundle import load_bundle


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory) -> Path:
    """Return a run folder as training leaves it: a bundle and a summary."""
    folder = tmp_path_factory.mktemp("runs") / "pets"
    model = vitreous.create("ViT-32x2/8", image_size=32, num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    vitreous.save(model, folder / "model", classes=["ant", "bee", "cat: a | pipe"])
    path = folder / "model" / "model.json"
    description = json.loads(path.read_text())
    description["provenance"] = {
        "data": "/home/someone/secret/pets",
        "init": "mae-b16",
        "recipe": "finetune",
        "seed": 0,
    }
    path.write_text(json.dumps(description))
    test = {"top1": 0.75, "ece": 0.1, "images": 12, "unreadable": 0, "interval": {"top1": [0.5, 0.9]}}
    summary = {"data": "/home/someone/secret/pets", "steps": 10, "wall_seconds": 1.23456789, "test": test, "val": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def hub_address(tmp_path, monkeypatch) -> Iterator[str]:
    """Start the stand-in; yield its address, which the Hub's client uses with a write token."""
    FakeHub.reset()
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.handle_error = lambda *arguments: None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    for name in [
        name for name in os.environ if name.startswith(("HF_", "VITREOUS_")) or name.lower().endswith("_proxy")
    ]:
        monkeypatch.delenv(name)
    address = f"http://127.0.0.1:{server.server_port}"
    point_client_at(address, tmp_path / "hub", monkeypatch)
    yield address
    server.shutdown()
    server.server_close()


def point_client_at(address: str, home: Path, monkeypatch) -> None:
    """Set the variables that the Hub's client reads from its environment on import."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    settings = {"ENDPOINT": address, "HF_HUB_CACHE": str(home), "HF_HUB_DISABLE_XET": True}
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = address + "/{repo_id}/resolve/{revision}/{filename}"
    settings |= {"HF_TOKEN_PATH": str(home / "token"), "HF_HUB_DISABLE_IMPLICIT_TOKEN": False}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)


def get_result_or_error(call: Callable[[], object]) -> object:
    """Return the result of a call, or its error as (code, text)."""
    try:
        return call()
    except VitreousError as error:
        return error.code, str(error)


def test_a_pushed_bundle_loads_back_with_its_card(hub_address, trained_run, tmp_path):
    options = {"licence": "mit", "tags": ["pets"], "private": True, "transformers": True}
    pushed = vitreous.push(trained_run, "hf:me/pets", **options)
    assert pushed["commit"].startswith("c0ffee") and pushed["url"] == f"{hub_address}/me/pets"
    assert "visibility" in FakeHub.created[0] or FakeHub.created[0]["private"]
    loaded, model = vitreous.load("hf:me/pets", device="cpu"), load_bundle(trained_run / "model").model
    assert loaded.card.classes == ("ant", "bee", "cat: a | pipe")
    state = loaded.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    code, text = get_result_or_error(lambda: vitreous.push(trained_run, "hf:me/pets"))
    assert code == 2 and "already exists" in text and "update=True" in text
    assert vitreous.push(trained_run, "hf:me/pets", update=True)["commit"].startswith("c0ffee")
    files = FakeHub.repositories["me/pets"]
    assert set(files) >= {"model.json", "weights.safetensors", "README.md", "config.json", "model.safetensors"}
    sent = b"".join(content for name, content in files.items() if not name.endswith(".safetensors"))
    assert b"secret" not in sent and b"someone" not in sent


@pytest.mark.slow
def test_transformers_loads_a_pushed_bundle(hub_address, trained_run, tmp_path):
    vitreous.push(trained_run, "hf:me/pets", transformers=True)
    files, model = FakeHub.repositories["me/pets"], load_bundle(trained_run / "model").model
    from transformers import ViTForImageClassification

    folder = tmp_path / "read"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    theirs = ViTForImageClassification.from_pretrained(folder).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(theirs(images).logits, model(images), rtol=1e-4, atol=1e-4)


def test_the_model_card_has_hub_metadata_and_metrics(trained_run, tmp_path):
    from huggingface_hub import ModelCard

    result = run_cli(
        "push", str(trained_run), "hf:me/pets", "--dry-run", "--license", "mit", "--out", str(tmp_path / "out")
    )
    assert result.returncode == 0 and "nothing uploaded" in result.stdout
    assert "initialised from mae-b16 (licence CC-BY-NC-4.0)" in result.stderr
    text = (tmp_path / "out" / "README.md").read_text()
    card = ModelCard(text)
    (top1,) = [row for row in card.data.eval_results if row.metric_name == "top1"]
    assert (top1.metric_type, top1.metric_value, top1.dataset_name, top1.dataset_split) == (
        "accuracy",
        0.75,
        "pets",
        "test",
    )
    assert (card.data.license, card.data.pipeline_tag, card.data.library_name) == (
        "mit",
        "image-classification",
        "vitreous",
    )
    assert "| test | top1 | 0.7500 [0.5000, 0.9000] | 12 |" in text and "- wall seconds: 1.235" in text
    assert "install it from a checkout" in text and "\npip install '.[hub]'  # in the checkout\n" in text
    assert yaml.safe_load(text.split("---")[1])["model-index"][0]["name"] == "pets"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "model.json",
        "weights.safetensors",
    ]
    make_image(0).save(tmp_path / "a.png")
    document = parse_json_output(run_cli("predict", str(tmp_path / "out"), str(tmp_path / "a.png"), "--json"))
    assert "cat: a | pipe" in json.dumps(document)


def test_a_bundle_without_a_run_is_pushed_without_metrics(trained_run, tmp_path):
    card = parse_json_output(run_cli("push", str(trained_run / "model"), "hf:me/pets", "--dry-run", "--json"))["card"]
    assert "0.7500" in card  # the bundle is inside its run folder
    vitreous.save(vitreous.create("ViT-32x1/8", image_size=16, num_classes=0), tmp_path / "model")
    result = run_cli("push", str(tmp_path / "model"), "hf:me/encoder", "--dry-run")
    assert "No metrics were measured" in result.stdout and "image-feature-extraction" in result.stdout
    assert "headless=True" in result.stdout and "without a licence, others may not use" in result.stderr


@pytest.mark.parametrize(
    "broken,token,code,messages",
    [
        ({}, "", 2, ["no Hub token found", "HF_TOKEN"]),
        ({}, "hf_wrong", 6, ["rejected the token (401)", "nothing was uploaded"]),
        ({}, "hf_reads", 6, ["refused write access (403)", "nothing was uploaded"]),
        ({"/commit/": "cut"}, "hf_writes", 6, ["cannot connect to", "repeat the command with update=True"]),
        ({"/commit/": 409}, "hf_writes", 6, ["was changed by someone else", "push again"]),
        ({"/objects/": 413}, "hf_writes", 6, ["413"]),
    ],
)
def test_hub_errors_are_reported_with_a_fix(hub_address, trained_run, monkeypatch, broken, token, code, messages):
    FakeHub.broken = broken
    monkeypatch.setenv("HF_TOKEN", token)
    result = get_result_or_error(lambda: vitreous.push(trained_run, "hf:me/pets"))
    assert result[0] == code and all(word in result[1] for word in messages), result
    assert "weights.safetensors" not in FakeHub.repositories.get("me/pets", {})


def test_push_fails_fast_without_a_network(hub_address, trained_run, tmp_path, monkeypatch):
    monkeypatch.setenv("VITREOUS_OFFLINE", "1")
    code, text = get_result_or_error(lambda: vitreous.push(trained_run, "hf:me/pets"))
    assert code == 2 and "VITREOUS_OFFLINE disables" in text and not FakeHub.requests
    monkeypatch.delenv("VITREOUS_OFFLINE")
    point_client_at("http://127.0.0.1:9", tmp_path / "hub", monkeypatch)
    code, text = get_result_or_error(lambda: vitreous.push(trained_run, "hf:me/pets"))
    assert code == 6 and "cannot connect to" in text and "HF_ENDPOINT" in text


def test_a_missing_hub_client_is_reported_with_the_install_command(trained_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'vitreous\[hub\]'"):
        vitreous.push(trained_run, "hf:me/pets", dry_run=True)


@pytest.mark.parametrize(
    "arguments,hint",
    [
        (["RUN", "me/pets"], "use hf:ORG/NAME"),
        (["RUN", "hf:pets"], "use hf:ORG/NAME"),
        (["RUN", "hf:me/../pets"], "use hf:ORG/NAME"),
        (["RUN", "hf:me/pets", "--license", "Apache 2"], "apache-2.0"),
        (["RUN", "hf:me/pets", "--out", "x"], "add --dry-run"),
        (["nowhere", "hf:me/pets", "--dry-run"], "train one with `vitreous train`"),
        (["FOLDER", "hf:me/pets", "--dry-run"], "vitreous convert"),
    ],
)
def test_invalid_pushes_are_rejected(trained_run, tmp_path, arguments, hint):
    paths = {"RUN": str(trained_run), "FOLDER": str(tmp_path)}
    result = run_cli("push", *(paths.get(word, word) for word in arguments))
    assert result.returncode == 2 and hint in result.stderr


def test_local_paths_are_reduced_to_names():
    assert strip_provenance_paths({"a": ["/x/y", 1, {"b": "/z"}], "c": "hf:org/name"}) == {
        "a": ["y", 1, {"b": "z"}],
        "c": "hf:org/name",
    }
    assert [strip_local_folders(name) for name in ("digits", "hf:org/name", "photos/pets/", "/a/b.csv")] == [
        "digits",
        "hf:org/name",
        "pets",
        "b.csv",
    ]
    with pytest.raises(UsageError):
        parse_repository("hf:a/b--c")
