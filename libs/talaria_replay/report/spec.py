"""Experiment files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from talaria_replay.generate import SHAPES
from talaria_replay.ranges import Amount, Count, Positive, made
from talaria_replay.sim import profiles
from talaria_replay.sim.catalog import Catalog
from talaria_replay.sim.profiles import CalibrationName
from talaria_replay.sim.scenario import Scenario, ScenarioError

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
    highest: dict[str, float] = {}
    """Metric → its published maximum over all configurations."""
    paired: dict[str, float] = {}
    """Configuration → published number of sessions that the first configuration completes sooner than it."""
    curve: Curve = ""
    """What its picture shows."""
    calibrations: list[CalibrationName] = []
    configurations: list[str] = []
    starts: list[str] = []
    """Names of `Spec.starts`; none: all at once."""
    policies: list[str] = []
    loads: dict[str, Amount] = {}
    """Name → seconds between starts of sessions."""
    taus: list[Amount] = []
    stagger_s: Amount = 0.0
    signals: dict[str, str] = {}
    """Policy → the system whose signal it is."""
    changes: dict[str, dict[str, Any]] = {}
    """For a sweep: name → what is changed in the scenario."""
    bounds: list[Positive] = []
    """For capacity: on p95 SCT, seconds."""
    most: Count = 32
    """Instances that the capacity question tries at most."""
    catalog: Catalog | None = None
    """For a catalog, and for capacity with one: the models; the scenario's own groups are not looked at."""
    instances: Count = 1
    """That a catalog is placed on."""
    shape: str = "paper"
    """Of the sessions of a catalog, which are generated."""
    sessions: Count = 100
    max_calls: Count | None = None
    """Of each of those sessions."""
    paper: dict[str, Any] = {}
    why: str = ""
    """Where and why prediction and paper part."""


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When sessions start: fields of a scenario."""

    stagger_s: Amount = 0.0
    concurrent: Count | None = None


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
        raw = tomllib.loads(text)
    except OSError as e:
        raise SpecError(f"{name}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise SpecError(f"{name}: expected UTF-8 ({e})") from e
    except tomllib.TOMLDecodeError as e:
        raise SpecError(f"{name}: {e}") from e
    tables = made(_Tables, raw, SpecError, name)
    scenarios = {key: made(Scenario, of, SpecError, f"{name}: scenarios.{key}") for key, of in tables.scenarios.items()}
    starts = {key: made(Start, of, SpecError, f"{name}: starts.{key}") for key, of in tables.starts.items()}
    experiments = []
    for n, of in enumerate(tables.experiments):
        where = f"{name}: experiment {of.get('id', n)!r}"
        experiments.append(made(Experiment, of, SpecError, where))
        try:
            _check(experiments[-1], scenarios, starts)
        except (SpecError, ScenarioError, profiles.ProfileError) as e:
            raise SpecError(f"{where}: {e}") from e
    return Spec(scenarios=scenarios, experiments=experiments, starts=starts)


class _Tables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file whose tables have not been read yet: each is read by itself, so that a mistake is named with its table."""

    scenarios: dict[str, dict[str, Any]]
    experiments: list[dict[str, Any]]
    starts: dict[str, dict[str, Any]] = {}


_PAPER_DEPTH: dict[Kind, int] = {"shape": 1, "compare": 2, "tau": 2, "router": 3}
"""Tables within tables of published values, by the kinds that show some."""


def _check(e: Experiment, scenarios: Mapping[str, Scenario], starts: Mapping[str, Start]) -> None:
    """What no type can say. Raises SpecError, ScenarioError, ProfileError."""
    depth = _PAPER_DEPTH.get(e.kind)
    if depth and not _is_paper(e.paper, depth):
        raise SpecError(f"paper: expected numbers, {depth} keys deep")
    if e.kind == "shape":
        return
    if e.scenario not in scenarios:
        raise SpecError(f"no scenario {e.scenario!r}: there are {', '.join(scenarios) or 'none'}")
    unknown = [start for start in e.starts if start != "all at once" and start not in starts]
    if unknown:
        raise SpecError(f"no start {unknown[0]!r}: there are {', '.join(['all at once', *starts])}")
    if e.shape not in SHAPES:
        raise SpecError(f"no shape {e.shape!r}: there are {', '.join(SHAPES)}")
    if e.kind == "catalog" and e.catalog is None:
        raise SpecError("expected a table `catalog`")
    _check_catalog(e)
    _check_changes(e, scenarios[e.scenario])


def _check_catalog(e: Experiment) -> None:
    if e.catalog is None:
        return
    profiles.hardware(e.catalog.hardware)
    for name in e.catalog.base:
        profiles.model(name)
    if e.kind == "catalog":
        e.catalog.groups(e.instances)


def _check_changes(e: Experiment, scenario: Scenario) -> None:
    """The scenario, and all that is made of it."""
    changes: dict[str, dict[str, Any]] = {"": {}}
    changes |= {f"changes.{name}": change for name, change in e.changes.items()}
    changes |= {f"configurations: {name}": {"ablation": name} for name in e.configurations}
    changes |= {f"policies: {name}": {"policy": name} for name in e.policies}
    for where, change in changes.items():
        changed = made(Scenario, msgspec.to_builtins(scenario) | change, SpecError, where)
        for group in changed.groups:
            profiles.changed(profiles.hardware(group.hardware), changed.hardware)
            for name in group.models:
                profiles.model(name)


def _is_paper(values: Any, depth: int) -> bool:
    if not depth:
        return isinstance(values, int | float) or values == {}
    return isinstance(values, dict) and all(_is_paper(of, depth - 1) for of in values.values())


def select(spec: Spec, ids: list[str]) -> list[Experiment]:
    """The experiments of these ids, all for none. Raises SpecError on an unknown one."""
    known = {e.id: e for e in spec.experiments}
    unknown = sorted(set(ids) - known.keys())
    if unknown:
        raise SpecError(f"no experiment {unknown[0]!r}: there are {', '.join(known)}")
    return [e for e in spec.experiments if not ids or e.id in ids]
