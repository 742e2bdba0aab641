from __future__ import annotations

import pytest

from talaria_common import errors
from talaria_common.errors import HTTP, TalariaError
from talaria_common.wire import decode, encode
from talaria_common.wire.error import ErrorInfo, from_info, info_of


def tree(cls: type[TalariaError] = TalariaError) -> list[type[TalariaError]]:
    return [cls] + [sub for child in cls.__subclasses__() if child.__module__ == errors.__name__ for sub in tree(child)]


def test_every_class_has_a_code_of_its_own():
    codes = [cls.code for cls in tree()]
    assert len(set(codes)) == len(codes)
    assert set(HTTP) == set(codes)


@pytest.mark.parametrize("cls", tree())
def test_every_class_is_drawn_at_the_top_of_its_module_with_status_and_code(cls: type[TalariaError]):
    drawn = [line for line in (errors.__doc__ or "").splitlines() if cls.__name__ in line.split()]
    if cls is TalariaError:
        return
    (line,) = [d for d in drawn if cls.code in d]
    assert str(cls.status) in line


@pytest.mark.parametrize("cls", tree())
def test_an_error_survives_the_wire(cls: type[TalariaError]):
    error = cls("no: ü", param="messages", retry_after_s=1.5)
    back = from_info(decode(encode(info_of(error)), ErrorInfo))
    assert type(back) is cls
    assert (back.message, back.param, back.retry_after_s) == ("no: ü", "messages", 1.5)


def test_an_unknown_code_of_a_newer_part_is_a_plain_500():
    back = from_info(ErrorInfo(code="of_tomorrow", message="?"))
    assert (type(back), back.status, back.message) == (TalariaError, 500, "?")


@pytest.mark.parametrize("cls", tree())
def test_statuses_are_kinds_that_clients_know(cls: type[TalariaError]):
    assert 400 <= cls.status < 600
    assert (cls.kind == "server_error") == (cls.status >= 500)
    assert cls.status != 409  # openai-python would retry it
