from __future__ import annotations

import pytest

from ccq.model import CCQConfig, presets
from ccq.systems import SIZES, SYSTEMS


def test_presets_are_systems_times_sizes():
    assert len(presets()) == len(SYSTEMS) * len(SIZES)
    for system in SYSTEMS:
        for size in SIZES:
            assert CCQConfig.preset(f"{system}-{size}").mixer == SYSTEMS[system].options["mixer"]


def test_presets_of_the_design():
    for system in ("transformer", "mamba2", "gla", "gla-hedgehog", "gated-deltanet", "ccq-gla", "ccq-gated-deltanet"):
        for size in ("500m", "1.3b", "nano", "pico", "tiny"):
            assert f"{system}-{size}" in presets()
    for size in SIZES:
        assert f"gla-unit-{size}" in presets()
    layers = {name: CCQConfig.preset(name).num_hidden_layers for name in presets()}
    assert [layers[f"{s}-500m"] for s in ("transformer", "mamba2", "gla", "ccq-gated-deltanet")] == [35, 65, 21, 21]
    assert [layers[f"{s}-1.3b"] for s in ("transformer", "mamba2", "gla", "ccq-gated-deltanet")] == [24, 48, 21, 21]


def test_a_cleaned_preset_differs_from_its_backbone_by_one_value():
    for system in ("gla", "gated-deltanet", "linear-attention", "retnet", "deltanet", "mamba2", "gla-hedgehog"):
        plain, cleaned = (CCQConfig.preset(f"{name}-nano").to_dict() for name in (system, f"ccq-{system}"))
        assert {key for key in plain if plain[key] != cleaned[key]} == {"clean"}


def test_hedgehog_has_the_state_of_gla():
    for size in SIZES:
        config = CCQConfig.preset(f"gla-hedgehog-{size}")
        assert 2 * config.feature_map_size == config.key_size


def test_changes_of_a_preset():
    assert CCQConfig.preset("gla-tiny", num_hidden_layers=5).num_hidden_layers == 5


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match=r"there is no 'ccq-gla-1\.3B'\. Did you mean 'ccq-gla-1\.3b'\?"):
        CCQConfig.preset("ccq-gla-1.3B")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mixr": "gla"}, TypeError, "there is no option 'mixr'. Did you mean 'mixer'?"),
        ({"num_attention_heads": 4}, TypeError, "num_attention_heads"),
        ({"max_length": 4}, TypeError, "there is no option 'max_length'"),  # transformers drops it in silence
        ({"mixer": "gated_deltanett"}, ValueError, "Did you mean 'gated_deltanet'?"),
        ({"mixer": 3}, TypeError, "mixer: expected a name, got 3"),
        ({"feature_map": "hedgehogs"}, ValueError, "Did you mean 'hedgehog'?"),
        ({"normalize": "none"}, ValueError, "normalize: expected one of unit, stats, got 'none'"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of auto, chunk, triton"),
        ({"num_heads": 0}, ValueError, "num_heads: expected at least 1, got 0"),
        ({"hidden_size": 64.0}, TypeError, "hidden_size: expected an integer, got 64.0"),
        ({"clean": 1}, TypeError, "clean: expected True or False, got 1"),
        ({"conv_size": True}, TypeError, "conv_size: expected an integer"),
        ({"gate_init": 0.0}, ValueError, "gate_init: expected a number above 0 and below 1, got 0.0"),
        ({"fixed_lam": 1.5}, ValueError, "fixed_lam: expected None or a number from 0 to 1, got 1.5"),
        ({"norm_eps": "small"}, TypeError, "norm_eps: expected a number"),
        ({"rope_theta": -1.0}, ValueError, "rope_theta: expected a positive number"),
        ({"eos_token_id": [1, -2]}, ValueError, "eos_token_id: expected at least 0"),
        ({"mixer": "attention", "num_heads": 7}, ValueError, "expected a divisor of hidden_size = 1024, got 7"),
        ({"mixer": "attention", "num_heads": 1024}, ValueError, "even size"),
        ({"mixer": "attention", "num_heads": 4, "num_kv_heads": 3}, ValueError, "divisor of num_heads = 4, got 3"),
        ({"mixer": "attention", "num_heads": 4, "clean": True}, ValueError, "attention has no key-value state"),
        ({"mixer": "mamba2", "head_size": 100}, ValueError, "head_size: expected a divisor"),
        ({"mixer": "mamba2", "num_groups": 3}, ValueError, "num_groups: expected a divisor of 32 heads"),
        ({"clean": True, "current_key_read": True}, ValueError, "current_key_read"),
    ],
)
def test_mistakes_are_named(options, error, words):
    with pytest.raises(error) as raised:
        CCQConfig(**options)
    assert words in str(raised.value)


def test_saved_and_loaded(tmp_path):
    config = CCQConfig.preset("ccq-gla-nano", eos_token_id=7, fixed_lam=0.3)
    config.save_pretrained(tmp_path)
    loaded = CCQConfig.from_pretrained(tmp_path)
    for key, value in config.to_dict().items():
        assert getattr(loaded, key) == value, key


def test_loading_a_config_with_a_typo_raises(tmp_path):
    CCQConfig.preset("gla-tiny").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"clean"', '"cleaned"'))
    with pytest.raises(TypeError, match="Did you mean 'clean'"):
        CCQConfig.from_pretrained(tmp_path)


def test_mamba2_without_a_convolution_is_refused():
    with pytest.raises(ValueError, match="conv_size: Mamba2"):
        CCQConfig.preset("mamba2-tiny", conv_size=None)
