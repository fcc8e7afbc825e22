from dataclasses import replace

import pytest

from tests.training.test_loop import make_session
from vitreous.config import (
    change_fields,
    from_builtins,
    from_yaml,
    list_differences,
    list_paths,
    nest_paths,
    set_dotted_paths,
    to_builtins,
    to_yaml,
)
from vitreous.errors import UsageError
from vitreous.models.config import ModelConfig, SwinConfig, ViTConfig
from vitreous.training.run import OptimizerConfig, RampConfig, Run


@pytest.fixture
def run_config(tmp_path):
    return make_session(tmp_path)[0].run


def test_a_run_survives_a_yaml_round_trip(run_config):
    assert from_yaml(Run, to_yaml(run_config)) == run_config


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("lr: 0.003", "lr: 3e-3", None),
        ("lr: 0.003", "lr: fast", "optimizer.lr"),
        ("lr: 0.003", "learning: 0.003", "unknown setting optimizer.learning"),
        ("seed: 0", "seed: !!python/object/apply:os.system [id]", "not valid YAML"),
        ("seed: 0", "seed: &a 0\nkeep: *a", "anchors"),
        ("precision: fp32", "precision: fp8", "precision"),
    ],
)
def test_invalid_configs_are_rejected(run_config, old, new, message):
    text = to_yaml(run_config).replace(old, new, 1)
    assert new in text
    if message is None:
        assert from_yaml(Run, text) == run_config
        return
    with pytest.raises(UsageError, match=message):
        from_yaml(Run, text)


def test_all_errors_are_reported_together(run_config):
    with pytest.raises(UsageError) as error:
        from_yaml(Run, to_yaml(run_config).replace("lr: 0.003", "lr: x").replace("seed: 0", "seed: y"))
    assert "optimizer.lr" in error.value.message and "seed" in error.value.message


def test_dotted_paths_set_one_value(run_config):
    changed = set_dotted_paths(run_config, {"optimizer.betas": ["0.8", "0.9"], "schedule.warmup-steps": ["7"]})
    assert changed.optimizer.betas == (0.8, 0.9) and changed.schedule.warmup_steps == 7
    assert list_differences(run_config, changed) == [
        "optimizer.betas: (0.9, 0.999) -> (0.8, 0.9)",
        "schedule.warmup_steps: 2 -> 7",
    ]
    assert set_dotted_paths(run_config, {"optimizer.lr": ["1e-4"]}) == replace(
        run_config, optimizer=replace(run_config.optimizer, lr=1e-4)
    )


def test_a_schedule_is_set_by_its_name(run_config):
    run_config = replace(
        run_config, schedules={"momentum": RampConfig(0.99, 1.0), "weight_decay": RampConfig(0.04, 0.4)}
    )
    changed = set_dotted_paths(
        run_config, {"schedules.momentum.start": ["0.95"], "schedules.weight-decay.end": ["0.04"]}
    )
    assert changed.schedules == {"momentum": RampConfig(0.95, 1.0), "weight_decay": RampConfig(0.04, 0.04)}
    assert run_config.schedules["momentum"].start == 0.99 and list_differences(run_config, changed) == [
        "schedules.momentum.start: 0.99 -> 0.95",
        "schedules.weight_decay.end: 0.4 -> 0.04",
    ]
    with pytest.raises(UsageError, match=r"unknown setting schedules\.speed\.start"):
        set_dotted_paths(run_config, {"schedules.speed.start": ["0.95"]})


def test_dependent_fields_are_set_together(run_config):
    words = {"model.pool": ["mean"], "model.axial": ["true"], "model.class-token": ["false"]}
    assert set_dotted_paths(run_config, words).model.axial
    with pytest.raises(UsageError, match="without prefix tokens"):
        set_dotted_paths(run_config, {"model.axial": ["true"]})


def test_unknown_settings_are_reported_with_their_path():
    from vitreous.data.modalities.images import ImagePreprocess
    from vitreous.data.options import DataOptions
    from vitreous.models.config import ViTConfig
    from vitreous.training.run import Run

    run = Run(DataOptions("d", ("a", "b"), 8, ""), ViTConfig(classes=2), ImagePreprocess((224, 224)), batch_size=2)
    with pytest.raises(UsageError, match="unknown setting smoothing"):
        from_builtins(Run, to_builtins(run) | {"smoothing": 0.1})
    with pytest.raises(UsageError, match=r"unknown setting augment\.flip"):
        set_dotted_paths(run, {"augment.flip": ["0.25"]})
    with pytest.raises(UsageError, match="unknown name 'supervized'"):
        from_builtins(Run, to_builtins(run) | {"objective": {"name": "supervized"}})
    with pytest.raises(UsageError, match=r"objective\.smothing"):
        from_builtins(Run, to_builtins(run) | {"objective": {"smothing": 0.1}})


def test_the_family_selects_the_config_class():
    swin = from_builtins(ModelConfig, {"family": "swin", "width": 48})
    assert type(swin) is SwinConfig and swin.width == 48 and from_builtins(ModelConfig, to_builtins(swin)) == swin
    assert type(from_builtins(ModelConfig, {"width": 48, "heads": 4})) is ViTConfig  # the default family
    with pytest.raises(UsageError, match="unknown family 'swim'\n  did you mean swin"):
        from_builtins(ModelConfig, {"family": "swim"})
    for family in (["swin"], 3):
        with pytest.raises(UsageError, match="unknown family"):
            from_builtins(ModelConfig, {"family": family})
    head = {"family": "segmenter", "backbone": to_builtins(replace(swin, classes=0))}
    assert type(from_builtins(ModelConfig, head).backbone) is SwinConfig


def test_attributes_that_are_not_fields_are_rejected():
    for name in ("module", "has_attention", "tagged"):
        with pytest.raises(UsageError, match=f"unknown setting model.{name}"):
            set_dotted_paths(SwinConfig(), {name: ["1"]}, "model.")
        with pytest.raises(UsageError, match=f"unknown setting {name}"):
            from_builtins(ModelConfig, {"family": "swin", name: 1})


def test_setting_groups_are_set_field_by_field():
    words = {"attention.window": ["7"], "attention.global-blocks": ["2", "5"], "norm.eps": ["1e-5"], "depth": ["6"]}
    config = set_dotted_paths(ViTConfig(), words, "model.")
    changes = {"depth": 6, "attention": {"window": 7, "global_blocks": (2, 5)}, "norm": {"eps": 1e-5}}
    assert config == ViTConfig().with_options(**changes) == change_fields(ViTConfig(), changes)
    assert (config.attention.qkv_bias, config.norm.final) == (True, "tokens"), (
        "the other fields of a group must not change"
    )
    assert from_builtins(ModelConfig, to_builtins(config)) == config
    assert list_differences(ViTConfig(depth=6), config)[0] == "attention.window: 0 -> 7"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("attention", "model.attention is a group of settings\n  set one of model.attention.kind, "),
        ("window", "unknown setting model.window\n  perhaps you meant model.attention.window"),
        ("attention.windw", "unknown setting model.attention.windw\n  did you mean window?"),
        ("attention.kind", "model.attention.kind cannot be 7 (Input should be 'plain', 'relative', "),
    ],
)
def test_unknown_settings_of_a_group_are_rejected(path, message):
    with pytest.raises(UsageError) as error:
        set_dotted_paths(ViTConfig(), {path: ["7"]}, "model.")
    assert str(error.value).startswith(message)


def test_fields_without_their_group_are_unknown():
    with pytest.raises(UsageError, match=r"unknown setting window\n  perhaps you meant attention\.window"):
        from_builtins(ModelConfig, {"window": 7})
    for config_class in (ViTConfig, SwinConfig):
        with pytest.raises(
            UsageError, match="attention is a dict, but the constructor of a config requires a config object"
        ):
            config_class(attention={"window": 7})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"unknown setting mlp\.size\n  use one of hidden, kind, gelu"):
        ViTConfig().with_options(mlp={"size": 7})


def test_paths_are_nested_and_listed():
    nested = {"depth": 6, "attention": {"window": 7, "kind": "plain"}, "stem": {}}
    paths = {"depth": 6, "attention.window": 7, "attention.kind": "plain", "stem": {}}
    assert list_paths(nested) == paths and nest_paths(paths) == nested


def test_the_word_none_stands_for_no_value_or_an_empty_list():
    settings = {"clip": ["none"], "rates": ["none"]}
    changed = set_dotted_paths(OptimizerConfig(rates=(("head", 2.0),)), settings)
    assert changed.clip is None and changed.rates == ()
    with pytest.raises(UsageError, match="lr cannot be none"):
        set_dotted_paths(OptimizerConfig(), {"lr": ["none"]})
