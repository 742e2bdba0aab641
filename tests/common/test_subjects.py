from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_common import subjects
from talaria_common.bus.names import check_filter, check_subject, matches

BY_NAME: list[Callable[[str], str]] = [
    subjects.forward,
    subjects.cancel,
    subjects.tokens,
    subjects.completion,
    subjects.snapshot,
    lambda name: subjects.control(name, "open"),
    lambda name: subjects.event("switch", name),
]


@pytest.mark.parametrize("make", BY_NAME)
@given(name=st.text(max_size=70))
def test_no_name_can_smuggle_a_dot_or_a_wildcard(make: Callable[[str], str], name: str):
    length = make("x").count(".")
    try:
        subject = make(name)
    except ValueError:
        return
    assert check_subject(subject).count(".") == length
    assert name in subject.split(".")


@pytest.mark.parametrize("partition", [-1, 256, 1000])
def test_partitions_have_a_range(partition: int):
    with pytest.raises(ValueError, match="partition"):
        subjects.route(partition)


def test_verbs_and_kinds_are_closed_lists():
    with pytest.raises(ValueError, match="verb"):
        subjects.control("cold-0", "forward")
    with pytest.raises(ValueError, match="kind"):
        subjects.event("other", "cold-0")


def test_the_filters_cover_what_they_say():
    assert matches(subjects.completion("a"), check_filter(subjects.ALL_COMPLETIONS))
    assert matches(subjects.snapshot("a"), check_filter(subjects.ALL_SNAPSHOTS))
    assert matches(subjects.event("round", "a"), check_filter(subjects.ALL_EVENTS))


def test_all_subjects_differ():
    made = [subjects.route(0), subjects.route(1), subjects.CLUSTER, *(make("x") for make in BY_NAME)]
    made += [subjects.control("x", verb) for verb in subjects.CONTROL_VERBS if verb != "open"]
    assert len(set(made)) == len(made)


def test_every_constructor_is_documented():
    """A new subject needs its row in docs/subjects.md."""
    arguments = {"partition": 7, "iid": "IID", "api": "API", "source": "SOURCE", "kind": "switch", "verb": "open"}
    rows = [d.subject for d in subjects.DOCS]
    rows = [r.replace("KIND", "switch").replace("{health,open,close,drain,resume}", "open") for r in rows]
    rows = [r.replace("route.P", "route.7") for r in rows]
    made = [subjects.CLUSTER]
    for name, function in inspect.getmembers(subjects, inspect.isfunction):
        if function.__module__ == subjects.__name__ and name != "markdown":
            made.append(function(**{p: arguments[p] for p in inspect.signature(function).parameters}))
    assert sorted(made) == sorted(rows)
