"""Experiment files."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from talaria_replay.sim.catalog import Catalog
from talaria_replay.sim.scenario import Scenario

Kind = Literal["shape", "compare", "router", "tau", "signals", "sweep", "cost", "capacity", "catalog"]
Curve = Literal["", "sct", "ttft", "return_ttft", "switch", "rounds", "hbm", "composition"]


class SpecError(ValueError):
    """The experiment file is wrong; the message names the key."""


class Experiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure or table.

    A metric is a path into a result's summary: `sct_s.p50`, `switch_paths.d2d.phases_ms.1.p95`. `paper` holds the
    published values: configuration (or load and policy, or τ) → metric → value.
    """

    id: str
    title: str
    kind: Kind
    section: str
    scenario: str = ""
    metrics: list[str] = []
    relative: list[str] = []
    """Metrics that are also shown over those of the first configuration."""
    curve: Curve = ""
    """What its picture shows."""
    calibrations: list[str] = []
    configurations: list[str] = []
    starts: list[str] = []
    """Names of `Spec.starts`; none: all at once."""
    policies: list[str] = []
    loads: dict[str, float] = {}
    """Name → seconds between starts of sessions."""
    taus: list[float] = []
    stagger_s: float = 0.0
    signals: dict[str, str] = {}
    """Policy → the system whose signal it is."""
    changes: dict[str, dict[str, Any]] = {}
    """For a sweep: name → what is changed in the scenario."""
    bounds: list[float] = []
    """For capacity: on p95 SCT, seconds."""
    most: int = 32
    """Instances that the capacity question tries at most."""
    catalog: Catalog | None = None
    """For a catalog, and for capacity with one: the models; the scenario's own groups are not looked at."""
    instances: int = 1
    """That a catalog is placed on."""
    shape: str = "paper"
    """Of the sessions of a catalog, which are generated."""
    sessions: int = 100
    max_calls: int | None = None
    """Of each of those sessions."""
    paper: dict[str, Any] = {}
    why: str = ""
    """Where and why prediction and paper part."""


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When sessions start: fields of a scenario."""

    stagger_s: float = 0.0
    concurrent: int | None = None


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An experiment file."""

    scenarios: dict[str, Scenario]
    experiments: list[Experiment]
    starts: dict[str, Start] = {}


def load(name: str) -> Spec:
    """A shipped one ("paper", "beyond") or a .toml file. Raises SpecError."""
    try:
        if name.endswith(".toml"):
            text = Path(name).read_text(encoding="utf-8")
        else:
            file = resources.files("talaria_replay").joinpath("experiments", f"{name}.toml")
            text = file.read_text(encoding="utf-8")
        spec = msgspec.convert(tomllib.loads(text), Spec)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise SpecError(f"{name}: {e}") from e
    for experiment in spec.experiments:
        if experiment.scenario and experiment.scenario not in spec.scenarios:
            raise SpecError(f"{name}: experiment {experiment.id!r}: no scenario {experiment.scenario!r}")
        unknown = [start for start in experiment.starts if start != "all at once" and start not in spec.starts]
        if unknown:
            raise SpecError(f"{name}: experiment {experiment.id!r}: no start {unknown[0]!r}")
        if experiment.kind == "catalog" and experiment.catalog is None:
            raise SpecError(f"{name}: experiment {experiment.id!r}: expected a table `catalog`")
    return spec


def select(spec: Spec, ids: list[str]) -> list[Experiment]:
    """The experiments of these ids, all for none. Raises SpecError on an unknown one."""
    known = {e.id: e for e in spec.experiments}
    unknown = sorted(set(ids) - known.keys())
    if unknown:
        raise SpecError(f"no experiment {unknown[0]!r}: there are {', '.join(known)}")
    return [e for e in spec.experiments if not ids or e.id in ids]
