"""What lies around a simulation: kept results, the capacity question, catalogs, arrivals, and many sessions."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_cli.main import app
from talaria_cli.simulate import CatalogOptions, SimulateOptions, run_simulate
from talaria_replay import trace
from talaria_replay.generate import generate
from talaria_replay.report.cost import cost
from talaria_replay.sim import catalog, profiles, store
from talaria_replay.sim.arrivals import Bursts, offsets
from talaria_replay.sim.capacity import search
from talaria_replay.sim.run import SimResult, encode, simulate, simulate_sessions
from talaria_replay.sim.scenario import Group, Scenario, ScenarioError
from talaria_replay.sim.store import ResultStore
from talaria_replay.trace import Call

SMALL = ("qwen3-32b", "qwen2.5-32b", "qwen3.5-35b-a3b")
TWO = Scenario(groups=(Group(hardware="paper-tp4", models=SMALL, count=2),), calibration="roofline")


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return list(generate("paper", sessions=4, models=SMALL, seed=1, max_calls=3, max_context_tokens=60_000))


class TestStore:
    def test_a_kept_result_is_the_same_and_is_not_simulated_again(self, tmp_path: Path, calls: list[Call]) -> None:
        results = ResultStore(tmp_path)
        first = results.simulate(TWO, calls)
        second = results.simulate(TWO, calls)
        assert results.reused == 1
        assert encode(first) == encode(second)
        results.simulate(msgspec.structs.replace(TWO, tau_s=2.0), calls)
        results.simulate(TWO, calls[:-1])
        assert results.reused == 1
        assert len(list(tmp_path.iterdir())) == 3

    @pytest.mark.parametrize("keep", [0, 1, 0.3, 0.999])
    def test_a_part_of_a_result_is_none(self, tmp_path: Path, calls: list[Call], keep: float) -> None:
        """Whatever was written of it: it is simulated again, and is whole then."""
        results = ResultStore(tmp_path)
        whole = results.simulate(TWO, calls)
        (path,) = tmp_path.iterdir()
        text = path.read_bytes()
        path.write_bytes(text[: int(len(text) * keep) if keep != 1 else 40])
        assert store.read(path) is None
        assert encode(results.simulate(TWO, calls)) == encode(whole)
        assert results.reused == 0
        assert path.read_bytes() == text

    def test_a_changed_one_is_none(self, tmp_path: Path, calls: list[Call]) -> None:
        ResultStore(tmp_path).simulate(TWO, calls)
        (path,) = tmp_path.iterdir()
        path.write_text(path.read_text().replace('"simulated": true', '"simulated": fals', 1))
        assert store.read(path) is None

    def test_other_code_is_another_result(self, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
        before = store.key(TWO, calls, "")
        assert store.key(TWO, calls, "") == before
        monkeypatch.setattr(store, "code_digest", lambda: b"other")
        assert store.key(TWO, calls, "") != before

    def test_the_code_of_a_result_is_all_of_ours_that_a_simulation_loads(self) -> None:
        program = "import sys, talaria_replay.sim.store; print(*sys.modules)"
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        loaded = {name for name in done.stdout.split() if name.startswith("talaria_")} - {"talaria_gpu"}
        assert "talaria_gpu.text" in loaded
        assert not {name for name in loaded if not f"{name}.".startswith(tuple(f"{code}." for code in store.CODE))}

    def test_another_profile_in_the_same_file_is_another_result(self, tmp_path: Path, calls: list[Call]) -> None:
        hardware, model = tmp_path / "hw.toml", tmp_path / "m.toml"
        shipped = Path(profiles.__file__).parents[1] / "profiles"
        hardware.write_text((shipped / "hardware" / "paper-tp4.toml").read_text())
        model.write_text((shipped / "models" / f"{SMALL[0]}.toml").read_text())
        mine = Group(hardware=str(hardware), models=(str(model), *SMALL[1:]))
        scenario = msgspec.structs.replace(TWO, groups=(mine,))
        keys = [store.key(scenario, calls, "")]
        for file, old, new in (
            (hardware, "h2d_gb_s = 34.4", "h2d_gb_s = 17.2"),
            (model, "64 # assumed", "32 # assumed"),
        ):
            text = file.read_text()
            assert old in text
            file.write_text(text.replace(old, new))
            keys.append(store.key(scenario, calls, ""))
        assert len(set(keys)) == 3
        assert profiles.hardware(str(hardware)).h2d_gb_s == 17.2
        assert profiles.model(str(model)).max_running == 32

    def test_a_stopped_series_goes_on(self, tmp_path: Path, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
        scenarios = [msgspec.structs.replace(TWO, seed=n) for n in range(3)]
        made = 0

        def stops(*args: Any, **kwargs: Any) -> SimResult:
            nonlocal made
            made += 1
            if made == 3:
                raise KeyboardInterrupt
            return simulate(*args, **kwargs)

        monkeypatch.setattr(store, "simulate", stops)
        for scenario in scenarios[:2]:
            ResultStore(tmp_path).simulate(scenario, calls)
        with pytest.raises(KeyboardInterrupt):
            ResultStore(tmp_path).simulate(scenarios[2], calls)
        again = ResultStore(tmp_path)
        for scenario in scenarios:
            again.simulate(scenario, calls)
        assert (again.reused, made) == (2, 4)


class TestCapacity:
    @pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 13])
    def test_the_least_number_is_found(self, needed: int) -> None:
        asked = []

        def run(scenario: Scenario) -> Any:
            count = scenario.groups[0].count
            asked.append(count)
            good = count >= needed

            class Result:
                summary = {
                    "sct_s": {"p95": 10.0 if good else 99.0},
                    "failed_calls": 0,
                    "gpu_s_per_session": 1.0,
                }

            return Result()

        found = search(TWO, 50.0, run, most=16)
        assert found.instances == needed
        assert len(asked) == len(set(asked)) <= 8

    def test_failures_are_never_enough(self) -> None:
        class Result:
            summary = {"sct_s": {"p95": 1.0}, "failed_calls": 1, "gpu_s_per_session": 1.0}

        found = search(TWO, 50.0, lambda _: Result(), most=4)  # type: ignore[arg-type,return-value]
        assert found.instances is None
        assert [t.instances for t in found.tried] == [1, 2, 4]

    def test_where_nobody_is_answered_there_is_no_cost(
        self, calls: list[Call], capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        result = simulate(msgspec.structs.replace(TWO, deadline_s=0.01), calls)
        assert result.summary["failed_sessions"] == result.summary["sessions"]
        assert result.summary["gpu_s_per_session"] is None
        rows, _ = cost(TWO, calls, lambda *_: result, ["roofline"])
        assert {row.predicted for row in rows if row.metric == "gpu_s_per_session"} == {None}
        trace.write(tmp_path / "t.jsonl", calls)
        hasty = {"calibration": "roofline", "deadline_s": 0.01}
        asked = SimulateOptions(
            str(tmp_path / "t.jsonl"), ["paper-tp4"], list(SMALL), [], None, None, hasty, None, as_json=False
        )
        assert run_simulate(asked) == 1
        assert "- GPU-s per session on 4 GPUs" in capsys.readouterr().out
        assert run_simulate(replace(asked, capacity_s=1.0, most_instances=1)) == 1
        assert re.search(r"│ 4 +│ - +│", capsys.readouterr().out)

    def test_one_kind_only(self) -> None:
        with pytest.raises(ScenarioError, match="single kind"):
            search(msgspec.structs.replace(TWO, groups=TWO.groups * 2), 1.0, lambda _: None, most=2)  # type: ignore[arg-type,return-value]

    def test_all_of_a_file_is_asked_about_unless_less_is_said(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        file = tmp_path / "t.jsonl"
        trace.write(file, generate("paper", sessions=33, models=SMALL, seed=1, max_calls=2, max_context_tokens=60_000))
        calls = len(trace.read(file))

        def said(*options: str) -> Any:
            command = ["simulate", str(file), "--hardware", f"paper-tp4:{','.join(SMALL)}", "--calibration", "roofline"]
            with pytest.raises(SystemExit):
                app([*command, "--no-admission", "--json", *options])
            return json.loads(capsys.readouterr().out)

        whole = said()
        assert (whole["trace"]["sessions"], whole["trace"]["calls"]) == (33, calls)
        assert not any("of the trace's" in note for note in whole["notes"])
        assert said("--sessions", "4")["notes"][-1] == f"of the trace's 33 sessions, 4; of its {calls} calls, 8"
        assert said("--max-calls", "1")["notes"][-1] == f"of the trace's 33 sessions, 33; of its {calls} calls, 33"
        answer = said("--capacity", "9999", "--sessions", "4")
        assert (answer["instances"], answer["notes"][-1][:31]) == (1, "of the trace's 33 sessions, 4; ")
        with pytest.raises(SystemExit):
            app(["simulate", "paper", "--max-calls", "1", "--json"])
        assert json.loads(capsys.readouterr().out)["trace"]["sessions"] == 30

    def test_from_the_command_line(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        options = SimulateOptions(
            "paper", ["paper-tp4"], list(SMALL), [], 6, 3, {"calibration": "roofline", "admission": False},
            tmp_path / "r.json", True, capacity_s=1000.0,
        )  # fmt: skip
        assert run_simulate(options) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["instances"] == 1
        assert answer["simulated"] is True
        assert json.loads((tmp_path / "r.json").read_text())["summary"]["sct_s"]["p95"] <= 1000

    def test_a_stopped_one_goes_on_with_what_was_kept(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = SimulateOptions(
            "paper", ["paper-tp4"], list(SMALL), [], 6, 3, {"calibration": "roofline", "admission": False}, None, True,
            capacity_s=0.001, most_instances=4, keep=tmp_path,
        )  # fmt: skip
        counts = []

        def stops_at_four(scenario: Scenario, *args: Any, **kwargs: Any) -> SimResult:
            counts.append(scenario.groups[0].count)
            if counts == [1, 2, 4]:
                raise KeyboardInterrupt
            return simulate(scenario, *args, **kwargs)

        monkeypatch.setattr(store, "simulate", stops_at_four)
        with pytest.raises(KeyboardInterrupt):
            run_simulate(options)
        for _ in range(2):
            assert run_simulate(options) == 1
            assert [t["instances"] for t in json.loads(capsys.readouterr().out)["tried"]] == [1, 2, 4]
        assert counts == [1, 2, 4, 4], "what was whole was not simulated again"


class TestCatalog:
    @given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 6), st.floats(0, 2))
    @settings(max_examples=60, deadline=None)
    def test_every_model_has_a_place_and_no_instance_too_many(
        self, size: int, instances: int, per_instance: int, exponent: float
    ) -> None:
        models, shares = catalog.names(SMALL, size), catalog.zipf(size, exponent)
        assert sum(shares) == pytest.approx(1.0)
        assert shares == sorted(shares, reverse=True)
        if size > instances * per_instance:
            with pytest.raises(ScenarioError, match="no place"):
                catalog.place(models, shares, hardware="h", instances=instances, per_instance=per_instance)
            return
        groups = catalog.place(models, shares, hardware="h", instances=instances, per_instance=per_instance)
        held = [m for g in groups for m in g.models]
        assert set(held) == set(models)
        assert all(len(set(g.models)) == len(g.models) <= per_instance for g in groups)
        replicas = [held.count(m) for m in models]
        assert replicas[0] >= replicas[-1]

    def test_an_alias_is_the_same_model_under_another_name(self) -> None:
        plain, alias = profiles.model("qwen3-32b"), profiles.model("qwen3-32b:7")
        assert alias.name == "qwen3-32b:7"
        assert msgspec.structs.replace(alias, name=plain.name) == plain

    def test_popular_models_get_the_calls(self) -> None:
        models, shares = catalog.names(SMALL, 20), catalog.zipf(20, 1.0)
        made = trace.grouped(generate("paper", sessions=400, models=models, seed=3, max_calls=1, shares=shares))
        counts = dict.fromkeys(models, 0)
        for session in made:
            counts[session[0].model] += 1
        assert counts[models[0]] / 400 == pytest.approx(shares[0], rel=0.3)
        assert counts[models[0]] > 5 * counts[models[-1]]

    def test_a_catalog_on_a_cluster(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = SimulateOptions(
            "mini-swe-agent", ["paper-tp4x6"], list(SMALL), [], 20, 4,
            {"calibration": "roofline", "sessions_per_s": 2.0, "detail": False, "page_tokens": 256,
             "kv_block_tokens": 256}, None, True, CatalogOptions(size=12, exponent=1.0, per_instance=3),
        )  # fmt: skip
        assert run_simulate(options) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["summary"]["sessions"] == 20
        assert "12 models, Zipf 1" in said["trace"]["generated"]

    def test_how_many_instances_a_catalog_needs(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = SimulateOptions(
            "mini-swe-agent", ["paper-tp4x9"], list(SMALL), [], 10, 2,
            {"calibration": "roofline", "sessions_per_s": 2.0, "detail": False, "page_tokens": 256}, None, True,
            CatalogOptions(size=12, exponent=1.0, per_instance=3), capacity_s=1000.0,
        )  # fmt: skip
        assert run_simulate(options) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["instances"] == 4, "fewer have no place for twelve models"


class TestArrivals:
    def test_staggered(self) -> None:
        at = offsets(stagger_s=2.5, sessions_per_s=None, bursts=None, seed=0)
        assert list(itertools.islice(at, 3)) == [0.0, 2.5, 5.0]

    def test_a_rate(self) -> None:
        at = list(itertools.islice(offsets(stagger_s=0, sessions_per_s=4.0, bursts=None, seed=1), 4000))
        assert at == sorted(at)
        assert at[-1] == pytest.approx(1000, rel=0.1)
        assert at == list(itertools.islice(offsets(stagger_s=0, sessions_per_s=4.0, bursts=None, seed=1), 4000))

    def test_bursts(self) -> None:
        bursts = Bursts(every_s=100.0, length_s=10.0, factor=5.0)
        at = list(
            itertools.takewhile(lambda t: t < 2000.0, offsets(stagger_s=0, sessions_per_s=2.0, bursts=bursts, seed=1))
        )
        inside = sum(t % 100 < 10 for t in at)
        assert inside / 200 == pytest.approx(10.0, rel=0.15)
        assert (len(at) - inside) / 1800 == pytest.approx(2.0, rel=0.15)


def test_without_detail_the_figures_are_the_same(calls: list[Call]) -> None:
    whole = simulate(TWO, calls)
    short = simulate_sessions(msgspec.structs.replace(TWO, detail=False), trace.sessions(calls).values())
    assert short.summary == whole.summary
    assert short.trace == whole.trace
    assert whole.calls
    assert whole.slots
    assert (short.calls, short.slots, short.switches) == ([], [], [])


def test_sessions_are_made_when_they_start() -> None:
    """A million of them would not fit into memory."""
    ahead = 0

    def sessions() -> Any:
        nonlocal ahead
        for session in trace.grouped(generate("paper", sessions=30, models=SMALL, seed=2, max_calls=2)):
            ahead += 1
            yield session

    scenario = msgspec.structs.replace(TWO, concurrent=2, admission=False)
    lead = []
    made = sessions()

    def watched() -> Any:
        for n, session in enumerate(made):
            lead.append(ahead - n)
            yield session

    assert simulate_sessions(scenario, watched()).summary["sessions"] == 30
    assert max(lead) == 1
