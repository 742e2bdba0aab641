"""Mistakes in files and options of simulations: each is said with its file and key, and none ends in a traceback."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from talaria_cli.report import ReportOptions, run_report
from talaria_cli.simulate import CatalogOptions, SimulateOptions, groups, parse_bursts, run_simulate
from talaria_replay.generate import generate
from talaria_replay.report import spec
from talaria_replay.sim.profiles import model
from talaria_replay.sim.run import simulate
from talaria_replay.sim.scenario import Group, Scenario, ScenarioError
from talaria_replay.trace import Call, write

SCENARIO = """
[scenarios.s]
groups = [{ hardware = "paper-tp4", models = ["qwen3-32b", "qwen2.5-32b"] }]
calibration = "roofline"
"""
EXPERIMENT = """
[[experiments]]
id = "e"
title = "t"
section = "x"
scenario = "s"
"""
CATALOG = 'catalog = { hardware = "paper-tp4", base = ["qwen3-32b"], size = 8, per_instance = 2 }\n'


def experiment(text: str, scenario: str = "") -> str:
    return SCENARIO + scenario + EXPERIMENT + text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (experiment('kind = "sweep"\nchanges = { a = { slot_sm = 1.0 } }'), "experiment 'e': changes.a: .*`slot_sm`"),
        (experiment('kind = "sweep"\nchanges = { a = { gamma = 1.5 } }'), "changes.a: gamma: expected `float` < 1"),
        (experiment('kind = "sweep"\nchanges = { a = { hardware = { x = 1 } } }'), "no value 'x' to change"),
        (experiment('kind = "sweep"\nchanges = { a = { hardware = { gpus = 4.5 } } }'), "gpus: expected `int`"),
        (experiment('kind = "sweep"\nchanges = { a = { hardware = { h2d_gb_s = 0 } } }'), "h2d_gb_s: expected `float`"),
        (experiment('kind = "cost"\ncalibrations = ["aci"]'), r"experiment 'e': calibrations\[0\]: invalid .*'aci'"),
        (experiment('kind = "router"\npolicies = ["best"]'), "policies: best: no policy 'best': there are talaria"),
        (experiment('kind = "compare"\nconfigurations = ["no-sb"]'), "configurations: no-sb: no configuration"),
        (experiment('kind = "compare"').replace('scenario = "s"', ""), "no scenario '': there are s"),
        (experiment('kind = "compare"\nstarts = ["now"]'), "no start 'now': there are all at once"),
        (experiment('kind = "catalog"\nshape = "square"\n' + CATALOG), "no shape 'square': there are paper"),
        (experiment('kind = "catalog"\ninstances = 3\n' + CATALOG), "experiment 'e': 3 instances of 2 models have no"),
        (experiment('kind = "catalog"\n' + CATALOG.replace("8", "0")), "catalog.size: expected `int` >= 1"),
        (
            experiment('kind = "catalog"\ninstances = 4\n' + CATALOG.replace('["qwen3-32b"]', '["q"]')),
            "no models profile 'q'",
        ),
        (experiment('kind = "sweep"').replace('"qwen2.5-32b"', '"q"'), "experiment 'e': no models profile 'q'"),
        (experiment('kind = "catalog"'), "expected a table `catalog`"),
        (experiment('kind = "tau"\npaper = { "0.0" = 3 }'), "paper: expected numbers, 2 keys deep"),
        (experiment('kind = "tau"\ntaus = [-1]'), r"taus\[0\]: expected `float` >= 0"),
        (experiment('kind = "sweep"', "concurrent = 0"), "scenarios.s: concurrent: expected `int` >= 1"),
        (experiment('kind = "sweep"', "host_gib = 0"), "scenarios.s: host_gib: expected `float` > 0"),
        (experiment('kind = "sweep"', 'ablation = "x"'), "scenarios.s: no configuration 'x'"),
        (experiment('kind = "sweep"', "bursts = { every_s = 9, length_s = 1, factor = 2 }"), "bursts: expected a rate"),
        (
            experiment('kind = "sweep"', "sessions_per_s = 1\nbursts = { every_s = 9, length_s = 1, factor = 0.5 }"),
            "scenarios.s: bursts.factor: expected `float` >= 1",
        ),
        (experiment("kind = 3"), "kind: expected `str`"),
        ("[scenarios]\nexperiments = 1", "expected `object`|missing required field"),
        ("[scenarios", "Expected"),
    ],
)
def test_in_an_experiment_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    file = tmp_path / "e.toml"
    file.write_text(text)
    assert run_report(ReportOptions(str(file), tmp_path, None, [], 1, 0)) == 2
    error = capsys.readouterr().err
    assert f"talaria report: {file}: " in error
    assert re.search(said, error), error


def test_a_file_that_is_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e.toml"
    file.write_bytes(b"# caf\xe9\n")
    assert run_report(ReportOptions(str(file), tmp_path, None, [], 1, 0)) == 2
    assert f"{file}: expected UTF-8" in capsys.readouterr().err
    assert run_simulate(options(hardware=[f"{file}:qwen3-32b"])) == 2
    assert f"{file}: expected UTF-8" in capsys.readouterr().err


def test_numbers_of_the_hardware_keep_their_type(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(experiment('kind = "sweep"', "hardware = { gpus = 8, hbm_gib = 96 }"))
    assert spec.load(str(file)).scenarios["s"].hardware == {"gpus": 8, "hbm_gib": 96}


HARDWARE = """
name = "h"
about = "x"
gpus = 4
hbm_gib = 183
usable = 0.8
h2d_gb_s = 34.4
d2d_gb_s = 4000
host_gib = 900
phase1_ms = 1
phase2_ms = 1
phase3_ms = 1
phase4_ms = 1
phase5_ms = 1
"""
MODEL = """
name = "m"
about = "x"
weight_gb = 60
kv_bytes_per_token = 262144
kv_heads = 8
context_tokens = 131072
max_running = 64
prefill_tokens = 8192
"""
ROOFLINE = """
[roofline]
source = "x"
active_params = 32e9
attention_layers = 64
query_width = 8192
efficiency = 0.5
bandwidth_efficiency = 0.8
step_overhead_ms = 3.0
"""
MEASURED = """
[measured.h]
source = "x"
prefill_ms = { "1024" = 10.0, "8192" = 50.0 }
decode_step_ms = { "b1@1024" = 5.0, "b8@1024" = 7.0 }
"""


@pytest.mark.parametrize(
    ("hardware", "own", "said"),
    [
        (HARDWARE.replace("gpus = 4", "gpus = 0"), MEASURED, "h.toml: gpus: expected `int` >= 1"),
        (HARDWARE.replace("host_gib = 900", "host_gib = 0"), MEASURED, "h.toml: host_gib: expected `float` > 0"),
        (HARDWARE.replace("h2d_gb_s = 34.4", "h2d_gb_s = 0"), MEASURED, "h.toml: h2d_gb_s: expected `float` > 0"),
        (HARDWARE.replace("usable = 0.8", "usable = 8"), MEASURED, "h.toml: usable: expected `float` <= 1"),
        (HARDWARE, MEASURED.replace("50.0", "0.0"), r"m.toml: measured.*prefill_ms.*: expected `float` > 0"),
        (HARDWARE, MEASURED.replace("b1@1024", "b1-1024"), "m.toml: .*decode_step_ms.b1-1024: expected a key bBATCH@"),
        (HARDWARE, MEASURED.replace('"1024" =', '"1k" ='), "m.toml: .*prefill_ms.1k: expected a key TOKENS"),
        (HARDWARE, MEASURED.replace("decode_step_ms", "#"), r"m: \[measured.h\]: decode_step_ms: expected"),
        (HARDWARE, MEASURED.replace('{ "1024" = 10.0, "8192" = 50.0 }', "{}"), r"\[measured.h\]: prefill_ms: expected"),
        (HARDWARE, MEASURED.replace("measured.h", "measured.g"), r"no \[measured.h\]; there is g"),
        (HARDWARE, ROOFLINE, "hardware h: bf16_tflops, hbm_tb_s: expected"),
    ],
)
def test_in_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str], hardware: str, own: str, said: str) -> None:
    (tmp_path / "h.toml").write_text(hardware)
    (tmp_path / "m.toml").write_text(MODEL + own)
    calibration = "roofline" if own == ROOFLINE else "measured"
    given = options(hardware=[f"{tmp_path / 'h.toml'}:{tmp_path / 'm.toml'}"], calibration=calibration)
    assert run_simulate(given) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error


def test_a_host_that_is_too_small_for_kv_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_simulate(options(host_gib=0.001, ablation="talaria")) == 2
    assert "host_gib: expected" in capsys.readouterr().err


def test_the_paper_s_curve_is_made_of_two_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.toml").write_text(
        MODEL + MEASURED.replace("measured.h", "aic.paper-tp4") + '[paper]\nsource = "x"\nprefill_ms = { "1" = 1.0 }\n'
    )
    assert run_simulate(options(hardware=[f"paper-tp4:{tmp_path / 'm.toml'}"], calibration="paper")) == 2
    assert "[paper]: prefill_ms: expected two points" in capsys.readouterr().err


def options(hardware: list[str] | None = None, **scenario: Any) -> SimulateOptions:
    catalog = scenario.pop("catalog", CatalogOptions())
    return SimulateOptions(
        "paper", hardware or ["paper-tp4:qwen3-32b,qwen2.5-32b"], [], [], 2, 2,
        {"calibration": "roofline"} | scenario, None, True, catalog,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ({"calibration": "aci"}, "calibration: invalid enum value 'aci'"),
        ({"overload": "drop"}, "overload: invalid enum value 'drop'"),
        ({"policy": "best"}, "no policy 'best'"),
        ({"concurrent": 0}, "concurrent: expected `int` >= 1"),
        ({"bursts": parse_bursts("9,1,2")}, "bursts: expected a rate of sessions as well"),
        ({"bursts": parse_bursts("9,1,0"), "sessions_per_s": 1.0}, "bursts.factor: expected `float` >= 1"),
        ({"bursts": parse_bursts("0,1,2"), "sessions_per_s": 1.0}, "bursts.every_s: expected `float` > 0"),
        ({"hardware": ["paper-tp4x0:qwen3-32b"]}, r"groups\[0\].count: expected `int` >= 1"),
        ({"hardware": ["paper-tp4x2:qwen3-32b"], "catalog": CatalogOptions(-1)}, "size: expected `int` >= 1"),
    ],
)
def test_on_the_command_line(capsys: pytest.CaptureFixture[str], scenario: dict[str, Any], said: str) -> None:
    assert run_simulate(options(**scenario)) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error


@pytest.mark.timeout(20)
def test_a_scenario_of_python_s_is_checked_too() -> None:
    """Its constructor takes anything: `concurrent=0` never ended."""
    plain = Scenario(groups=(Group(hardware="paper-tp4", models=("qwen3-32b",)),), calibration="roofline", concurrent=0)
    with pytest.raises(ScenarioError, match="concurrent: expected"):
        simulate(plain, list(generate("paper", sessions=1, models=("qwen3-32b",), seed=0, max_calls=1)))


@pytest.mark.parametrize(
    ("spec", "hardware", "count", "models"),
    [
        ("h.toml:a.toml,b.toml", "h.toml", 1, ("a.toml", "b.toml")),
        ("paper-tp4x3:a.toml,qwen3-32b", "paper-tp4", 3, ("a.toml", "qwen3-32b")),
        ("dir/h.tomlx2:a:1,a:2", "dir/h.toml", 2, ("a:1", "a:2")),
        ("h.toml", "h.toml", 1, ("own",)),
    ],
)
def test_models_stand_after_the_first_colon(spec: str, hardware: str, count: int, models: tuple[str, ...]) -> None:
    (group,) = groups([spec], ["own"])
    assert (group.hardware, group.count, group.models) == (hardware, count, models)


def test_a_shipped_model_is_still_one() -> None:
    assert model("qwen3-32b:7").kv_heads == 8


def test_a_trace_without_a_session_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = [Call(session="s", call=0, model="m", prompt_tokens=500_000, completion_tokens=1)]
    write(tmp_path / "t.jsonl", long)
    assert run_report(ReportOptions("beyond", tmp_path, tmp_path / "t.jsonl", ["cost"], 1, 0)) == 2
    assert "no session of the trace stays within 190000 tokens" in capsys.readouterr().err
