"""What a session costs in GPU-seconds: time-shared groups against one group per model, and against loading on request.

GPU-seconds are all GPUs of the cluster for the whole window, divided by the sessions that were answered to the end:
what is rented, busy or not. Where none was there is no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from talaria_replay.report.outcome import Row, metric
from talaria_replay.sim.profiles import CalibrationName
from talaria_replay.sim.run import SimResult
from talaria_replay.sim.scenario import Group, Scenario
from talaria_replay.trace import Call

METRICS = ("gpu_s_per_session", "sct_s.p50", "sct_s.p95", "ttft_s.p95")
_NOTES = """\
dedicated: one group of the same hardware for each model, pinned, so that nothing is ever switched
on request: groups that load a model for whichever call comes, placed by least pressure, without session-prefill, host \
KV and staging: a returning session is a fresh request, as with request-level autoscaling
rented GPUs count whether they are busy or not; an autoscaler that gives idle groups back would pay less, and wait \
longer for the next call""".splitlines()
Simulate = Callable[[str, Scenario, Sequence[Call]], "SimResult | str"]


def cost(
    scenario: Scenario, calls: Sequence[Call], simulate: Simulate, calibrations: Sequence[CalibrationName]
) -> tuple[list[Row], list[str]]:
    """Rows and notes. The scenario's first group names hardware and models."""
    first = scenario.groups[0]
    several = msgspec.structs.replace(first, count=len(first.models))
    dedicated = tuple(Group(hardware=first.hardware, models=(m,), pool="hot") for m in first.models)
    setups: dict[str, Scenario] = {}
    for n in range(1, len(first.models) + 1):
        setups[f"talaria, {n} group{'s' if n > 1 else ''}"] = _with(
            scenario, (msgspec.structs.replace(first, count=n),)
        )
    setups[f"dedicated, {len(dedicated)} groups"] = _with(scenario, dedicated)
    setups["on request, 1 group"] = _on_request(scenario, (first,))
    setups[f"on request, {several.count} groups"] = _on_request(scenario, (several,))
    rows: list[Row] = []
    for calibration in calibrations:
        for name, setup in setups.items():
            what = f"{name}, {calibration}"
            changed = msgspec.structs.replace(setup, calibration=calibration)
            result = simulate(what, changed, calls)
            if isinstance(result, str):
                rows.append(Row(what, METRICS[0], None, note=result))
            else:
                rows += [Row(what, name, metric(result.summary, name)) for name in METRICS]
    return rows, list(_NOTES)


def _with(scenario: Scenario, groups: tuple[Group, ...]) -> Scenario:
    return msgspec.structs.replace(scenario, groups=groups)


def _on_request(scenario: Scenario, groups: tuple[Group, ...]) -> Scenario:
    return msgspec.structs.replace(scenario, groups=groups, policy="least-pressure", ablation="round-only")
