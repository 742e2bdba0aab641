"""Model files are compared with their headers before anything is built from them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from talaria_common.errors import EngineError
from talaria_gpu.weights import checkpoint


@pytest.fixture
def directory(tmp_path):
    save_file({"a": torch.zeros(100), "b": torch.ones(7, 3)}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file({"c": torch.zeros(0)}, tmp_path / "model-2.safetensors")
    return tmp_path


def test_whole_files_pass(directory):
    assert checkpoint.check(directory) == sum(f.stat().st_size for f in directory.iterdir())
    checkpoint.read_ahead(directory)


@pytest.mark.parametrize("keep", [0, 4, 30, 300])
def test_a_file_cut_anywhere_is_named(directory, keep):
    file = directory / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(EngineError, match=r"model-1\.safetensors"):
        checkpoint.check(directory)
    with pytest.raises(EngineError, match=r"model-1\.safetensors"):
        checkpoint.read_ahead(directory)


def test_other_bytes_are_refused(directory):
    (directory / "model-2.safetensors").write_bytes(b"<html>not found</html>" * 20)
    with pytest.raises(EngineError, match="no whole safetensors file"):
        checkpoint.check(directory)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(EngineError, match="no safetensors files"):
        checkpoint.check(tmp_path)
