"""The generated pages are up to date, and say something of everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria_common import docs, errors

KEYS = list(docs.keys())
UNITS = ("_s", "_ms", "_bytes", "_tokens", "_mib")
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", docs.PAGES)
def test_the_page_is_up_to_date(page: str):
    assert (DOCS / page).read_text(encoding="utf-8") == docs.PAGES[page](), "run: python -m talaria_common.docs docs"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_every_setting_says_what_it_is(key: docs.Key):
    assert key.says
    assert key.default


@pytest.mark.parametrize("key", [k for k in KEYS if k.path.endswith(UNITS)], ids=lambda key: key.path)
def test_what_has_a_unit_in_its_name_has_it_in_the_page(key: docs.Key):
    assert key.unit


@pytest.mark.parametrize("code", errors.HTTP)
def test_every_error_is_in_the_page(code: str):
    assert f"| `{code}` |" in (DOCS / "errors.md").read_text(encoding="utf-8")
