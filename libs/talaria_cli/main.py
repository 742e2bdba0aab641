"""The command line itself: options and help; each command's work is in a module of its own, imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="talaria",
    help="Session-aware serving of many language models on few GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Work with talaria.toml.", no_args_is_help=True)
app.add_typer(config_app, name="config")
trace_app = typer.Typer(help="Make and check traces of agent sessions (docs/traces.md).", no_args_is_help=True)
app.add_typer(trace_app, name="trace")

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration; default: $TALARIA_CONFIG, else ./talaria.toml.")
]
StateDir = Annotated[
    Path, typer.Option("--state-dir", help="Where `talaria up` keeps its logs, run file and NATS store.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
BusUrl = Annotated[
    str, typer.Option("--bus", help="NATS URL; default: the running `talaria up` of this directory, else [bus] url.")
]
STATE = Path(".talaria")


@app.command()
def up(
    config: Config = None,
    models_only: Annotated[bool, typer.Option("--models-only", help="Prepare the models, then stop.")] = False,
    port: Annotated[int | None, typer.Option("--port", help="HTTP port of the api instead of [api] port.")] = None,
    external_nats: Annotated[
        bool, typer.Option("--external-nats", help="Use the server at [bus] url; start none.")
    ] = False,
    state_dir: StateDir = STATE,
) -> None:
    """Start everything that talaria.toml names on this machine and keep it running until Ctrl-C."""
    from talaria_cli.up.run import UpOptions, run_up

    raise SystemExit(run_up(UpOptions(config, models_only, port, external_nats, state_dir)))


@app.command()
def status(config: Config = None, bus: BusUrl = "", as_json: Json = False, state_dir: StateDir = STATE) -> None:
    """Parts, instances, models, queues and the age of what is known. Exit code 1 unless all is ready."""
    from talaria_cli.status import run_status

    raise SystemExit(run_status(config, bus, state_dir, as_json))


@app.command()
def chat(  # noqa: PLR0917 - typer makes each argument an option
    model: Annotated[str, typer.Argument(help="Model; default: the first that /v1/models lists.")] = "",
    message: Annotated[str, typer.Option("--message", "-m", help="Say this one thing and leave.")] = "",
    system: Annotated[str, typer.Option("--system", help="A system message.")] = "",
    url: Annotated[
        str, typer.Option("--url", help="Where the api is; default: this directory's `up`, else port 8000.")
    ] = "",
    key: Annotated[str, typer.Option("--key", envvar="OPENAI_API_KEY", help="API key.", show_envvar=True)] = "",
    session: Annotated[str, typer.Option("--session", help="Session id; default: a fresh one.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    state_dir: StateDir = STATE,
) -> None:
    """Talk to a model; one session, streamed, with the tokens that its cache saved."""
    from talaria_cli.chat import ChatOptions, run_chat

    options = ChatOptions(model, message, system, url, key, session, max_tokens, temperature, state_dir)
    raise SystemExit(run_chat(options))


@app.command()
def tap(  # noqa: PLR0917 - typer makes each argument an option
    kinds: Annotated[
        str, typer.Option("--kinds", "-k", help="Comma-separated: route, forward, completion, snapshot, switch, …")
    ] = "",
    subject: Annotated[str, typer.Option("--subject", help="A raw NATS subject filter instead of kinds.")] = "",
    config: Config = None,
    bus: BusUrl = "",
    as_json: Json = False,
    state_dir: StateDir = STATE,
) -> None:
    """Watch what happens on the bus, live: routes, forwards, completions, snapshots, switches. Changes nothing."""
    from talaria_cli.tap import run_tap

    raise SystemExit(run_tap(kinds, subject, config, bus, state_dir, as_json))


@app.command()
def explain(  # noqa: PLR0917 - typer makes each argument an option
    rid: Annotated[str, typer.Argument(metavar="RID", help="Request id (X-Talaria-Request), or how it begins.")],
    since: Annotated[
        float | None, typer.Option("--since", min=0.1, help="Look at the last so many seconds only.")
    ] = None,
    config: Config = None,
    bus: BusUrl = "",
    as_json: Json = False,
    state_dir: StateDir = STATE,
) -> None:
    """Why a call went where it went: candidates with each cost term, what ruled others out, the lease's fate."""
    from talaria_cli.explain import run_explain

    raise SystemExit(run_explain(rid, since, config, bus, state_dir, as_json))


@app.command()
def sessions(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show so many, the last used first.")] = 50,
    config: Config = None,
    bus: BusUrl = "",
    as_json: Json = False,
    state_dir: StateDir = STATE,
) -> None:
    """Sessions with their place, the state of their KV, and their lease."""
    from talaria_cli.sessions import run_sessions

    raise SystemExit(run_sessions(limit, config, bus, state_dir, as_json))


@config_app.command("check")
def config_check(
    file: Annotated[Path | None, typer.Argument(help="File; default: $TALARIA_CONFIG, else ./talaria.toml.")] = None,
) -> None:
    """Name every mistake in the configuration: key, value, what was expected. Exit code 1 if there is one."""
    from talaria_cli.config_check import run_config_check

    raise SystemExit(run_config_check(file))


@app.command()
def doctor(config: Config = None, as_json: Json = False, state_dir: StateDir = STATE) -> None:
    """What this machine can and cannot do, and what to do about it. Exit code 1 if something necessary is missing."""
    from talaria_cli.doctor import run_doctor

    raise SystemExit(run_doctor(config, state_dir, as_json))


@app.command()
def key(tenant: Annotated[str, typer.Argument(metavar="NAME", help="The tenant that the key stands for.")]) -> None:
    """Make an API key: print it once, with the lines for talaria.toml that let it in."""
    from talaria_cli.key import run_key

    raise SystemExit(run_key(tenant))


@app.command()
def replay(  # noqa: PLR0917 - typer makes each argument an option
    trace: Annotated[Path, typer.Argument(help="A trace: docs/traces.md.")],
    url: Annotated[str, typer.Option("--url", help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model_map: Annotated[
        list[str] | None,
        typer.Option("--model-map", help="TRACE_MODEL=SERVER_MODEL; '*=M' for all others. Repeatable."),
    ] = None,
    scale: Annotated[float, typer.Option("--scale", min=0.0001, help="Factor on all token counts.")] = 1.0,
    max_calls: Annotated[int | None, typer.Option("--max-calls", min=1, help="Per session.")] = None,
    sessions: Annotated[int | None, typer.Option("--sessions", min=1, help="The first so many.")] = None,
    gap_cap: Annotated[float, typer.Option("--gap-cap", min=0.0, help="Longest gap, seconds.")] = 10.0,
    stagger: Annotated[float, typer.Option("--stagger", min=0.0, help="Seconds between starts of sessions.")] = 0.0,
    concurrent: Annotated[
        int | None, typer.Option("--concurrent", min=1, help="Sessions at once; the next starts when one has ended.")
    ] = None,
    warmup: Annotated[int, typer.Option("--warmup", min=2, help="Calls per model before the window.")] = 2,
    plain: Annotated[bool, typer.Option("--plain", help="No extensions: no session header, no ignore_eos.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="For one call, seconds.")] = 600.0,
    salt: Annotated[str, typer.Option("--salt", help="Other made texts, so that no earlier run's cache helps.")] = "",
    made_texts: Annotated[
        bool, typer.Option("--made-texts", help="Make texts of the recorded lengths where the trace has its own.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Result file (JSON).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in --out.")] = False,
    key: Annotated[str, typer.Option("--key", envvar="OPENAI_API_KEY", help="API key.", show_envvar=True)] = "",
    as_json: Json = False,
) -> None:
    """Replay a trace's agent sessions, closed-loop, against a live server; prints SCT and TTFT."""
    from talaria_cli.replay import ReplayOptions, run_replay
    from talaria_cli.replay import model_map as parse
    from talaria_replay.live.run import Plan

    try:
        models = parse(model_map or [])
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    plan = Plan(
        url, models, scale, max_calls, sessions, gap_cap, stagger, concurrent, warmup, plain, timeout, salt, made_texts
    )
    raise SystemExit(run_replay(ReplayOptions(trace, plan, out, resume, key, as_json)))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A result of `talaria replay --out`.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another, of the same trace.")],
    as_json: Json = False,
) -> None:
    """Two replay results side by side: the same bodies? SCT and TTFT of both, and B's to A's."""
    from talaria_cli.compare import run_compare

    raise SystemExit(run_compare(first, second, as_json=as_json))


@app.command()
def capture(  # noqa: PLR0917 - typer makes each argument an option
    file: Annotated[Path, typer.Argument(help="The trace to write; .gz packs it.")],
    config: Config = None,
    bus: BusUrl = "",
    texts: Annotated[bool, typer.Option("--texts", help="Record the prompts as well.")] = False,
    calls: Annotated[int | None, typer.Option("--calls", min=1, help="Stop after so many.")] = None,
    seconds: Annotated[float | None, typer.Option("--for", min=0.1, help="Stop after so many seconds.")] = None,
    state_dir: StateDir = STATE,
) -> None:
    """Record a live mesh's agent sessions from the bus into a trace, until Ctrl-C; texts are left out."""
    from talaria_cli.capture import CaptureOptions, run_capture

    raise SystemExit(run_capture(CaptureOptions(file, config, bus, state_dir, texts, calls, seconds)))


@app.command()
def simulate(  # noqa: PLR0917 - typer makes each argument an option
    trace: Annotated[str, typer.Argument(help="A trace file, or a shape to generate: see --list.")] = "paper",
    hardware: Annotated[
        list[str] | None,
        typer.Option("--hardware", help="NAME[xCOUNT][:model,model]: instances of a profile. Repeatable."),
    ] = None,
    models: Annotated[
        str, typer.Option("--models", help="Comma-separated profiles, for groups without their own.")
    ] = "",
    model_map: Annotated[list[str] | None, typer.Option("--model-map", help="TRACE_MODEL=PROFILE. Repeatable.")] = None,
    sessions: Annotated[
        int | None, typer.Option("--sessions", min=1, help="The first so many; none: all of a file, 30 of a shape.")
    ] = None,
    max_calls: Annotated[int | None, typer.Option("--max-calls", min=1, help="Per session.")] = None,
    calibration: Annotated[str, typer.Option("--calibration", help="paper, aic or roofline.")] = "paper",
    ablation: Annotated[str, typer.Option("--ablation", help="Configuration of the instances.")] = "talaria",
    policy: Annotated[str, typer.Option("--policy", help="Placement policy.")] = "talaria",
    tau: Annotated[float, typer.Option("--tau", min=0.0, help="Reservation timeout, seconds.")] = 1.0,
    gamma: Annotated[float, typer.Option("--gamma", min=0.01, max=0.99)] = 0.9,
    t_ttft: Annotated[float, typer.Option("--t-ttft", min=0.1, help="T_TTFT, seconds.")] = 10.0,
    admission: Annotated[bool, typer.Option(help="The router may refuse calls (429) for their predicted wait.")] = True,
    overload: Annotated[str, typer.Option("--overload", help="reject or queue.")] = "reject",
    slot_ms: Annotated[float, typer.Option("--slot-ms", help="A slot's length when its round has room.")] = 2000.0,
    stagger: Annotated[float, typer.Option("--stagger", min=0.0, help="Seconds between starts of sessions.")] = 0.0,
    concurrent: Annotated[int | None, typer.Option("--concurrent", min=1, help="Sessions at once.")] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=1e-9, help="Sessions per second, a Poisson process.")
    ] = None,
    bursts: Annotated[
        str | None, typer.Option("--bursts", help="EVERY_S,LENGTH_S,FACTOR: sessions come faster now and then.")
    ] = None,
    capacity: Annotated[
        float | None, typer.Option("--capacity", help="How many instances keep p95 SCT under so many seconds?")
    ] = None,
    most: Annotated[int, typer.Option("--max-instances", min=1, help="For --capacity.")] = 64,
    catalog: Annotated[int, typer.Option("--catalog", help="So many models, made of --models in turn.")] = 0,
    zipf: Annotated[float, typer.Option("--zipf", help="Exponent of the catalog's popularity.")] = 1.0,
    per_instance: Annotated[int, typer.Option("--per-instance", min=1, help="Models of a catalog's instance.")] = 3,
    page: Annotated[int, typer.Option("--page", min=16, help="Tokens per KV page and block; larger is faster.")] = 64,
    host_gib: Annotated[
        float | None, typer.Option("--host-gib", help="Host memory for KV, per instance; none: what weights leave.")
    ] = None,
    heartbeat: Annotated[float, typer.Option("--heartbeat", min=0.05, help="Seconds.")] = 0.5,
    detail: Annotated[bool, typer.Option(help="Keep every call, slot and switch in the result.")] = True,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The whole result (JSON).")] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Folder of results: a stopped --capacity goes on from there.")
    ] = None,
    as_json: Json = False,
    show: Annotated[bool, typer.Option("--list", help="Name the shipped profiles and shapes.")] = False,
) -> None:
    """Replay a trace on a described cluster in virtual time; every figure is a prediction."""
    from talaria_cli.simulate import CatalogOptions, SimulateOptions, parse_bursts, run_list, run_simulate

    if show:
        raise SystemExit(run_list())
    scenario = {
        "calibration": calibration, "ablation": ablation, "policy": policy, "tau_s": tau, "gamma": gamma,
        "t_ttft_s": t_ttft, "admission": admission, "overload": overload, "slot_ms": slot_ms, "stagger_s": stagger,
        "concurrent": concurrent, "seed": seed, "sessions_per_s": rate, "bursts": parse_bursts(bursts),
        "page_tokens": page, "kv_block_tokens": page, "host_gib": host_gib, "heartbeat_s": heartbeat, "detail": detail,
    }  # fmt: skip
    options = SimulateOptions(
        trace,
        hardware or ["paper-tp8"],
        [m for m in (models or "qwen3-235b,glm-5-nvfp4,qwen3.5-122b").split(",") if m],
        model_map or [],
        sessions,
        max_calls,
        scenario,
        out,
        as_json,
        CatalogOptions(catalog, zipf, per_instance),
        capacity,
        most,
        keep,
    )
    raise SystemExit(run_simulate(options))


@app.command()
def report(  # noqa: PLR0917 - typer makes each argument an option
    name: Annotated[str, typer.Argument(help="'paper', or an experiment file (.toml).")] = "paper",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for report.md and figures.")] = Path("report"),
    trace: Annotated[Path | None, typer.Option("--trace", help="Take the issues from this trace.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="An experiment's id. Repeatable.")] = None,
    issues: Annotated[int, typer.Option("--issues", min=1, max=10, help="Fewer for a quick look.")] = 10,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Rebuild the paper's figures and tables by simulation, beside the published values."""
    from talaria_cli.report import ReportOptions, run_report

    raise SystemExit(run_report(ReportOptions(name, out, trace, only or [], issues, seed)))


@trace_app.command("convert")
def trace_convert(  # noqa: PLR0917 - typer makes each argument an option
    source: Annotated[Path, typer.Argument(help="A log, JSON lines, plain or .gz.")],
    out: Annotated[Path, typer.Argument(help="The trace to write.")],
    form: Annotated[str, typer.Option("--format", help="swebench, claude-code or messages.")] = "messages",
    model: Annotated[str, typer.Option("--model", help="Name all calls' model so.")] = "",
    gaps: Annotated[str, typer.Option("--gaps", help="none, or synthetic ones where none was recorded.")] = "none",
    seed: Annotated[int, typer.Option("--seed", help="Of synthetic gaps.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A model's folder: counts tokens where a message log does not.")
    ] = None,
    texts: Annotated[bool, typer.Option(" /--no-texts", help="Leave out a message log's texts: lengths only.")] = True,
) -> None:
    """Convert a public data set or a log of OpenAI messages into a trace."""
    from talaria_cli.trace import run_convert

    raise SystemExit(run_convert(source, out, form, model, gaps, seed, tokenizer=tokenizer, texts=texts))


@trace_app.command("generate")
def trace_generate(  # noqa: PLR0917 - typer makes each argument an option
    shape: Annotated[str, typer.Argument(help="paper, mini-swe-agent or claude-code.")],
    out: Annotated[Path, typer.Argument(help="The trace to write.")],
    sessions: Annotated[int, typer.Option("--sessions", min=1)] = 30,
    models: Annotated[str, typer.Option("--models", help="Comma-separated; handed out in turn.")] = "model",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    max_context: Annotated[int | None, typer.Option("--max-context", min=64, help="Tokens; compacted beyond.")] = None,
) -> None:
    """Generate sessions from published and derived quantiles; their gaps are synthetic."""
    from talaria_cli.trace import run_generate

    raise SystemExit(run_generate(shape, out, sessions, models, seed, max_context))


@trace_app.command("workload")
def trace_workload(
    source: Annotated[Path, typer.Argument(help="A trace with enough sessions.")],
    out: Annotated[Path, typer.Argument(help="The trace to write.")],
    models: Annotated[str, typer.Option("--models", help="Comma-separated.")],
    issues: Annotated[int, typer.Option("--issues", min=1, help="Sessions on each model.")] = 10,
) -> None:
    """The paper's workload (5.1): the same issues on each model; the trace's Astropy sessions, if it has any."""
    from talaria_cli.trace import run_workload

    raise SystemExit(run_workload(source, out, models, issues))


@trace_app.command("check")
def trace_check(file: Annotated[Path, typer.Argument(help="A trace.")]) -> None:
    """Name every mistake by line, or say what the trace holds. Exit code 1 if there is a mistake."""
    from talaria_cli.trace import run_check

    raise SystemExit(run_check(file))


@app.command()
def rounds(  # noqa: PLR0917 - typer makes each argument an option
    log: Annotated[
        Path | None, typer.Argument(help="A recorded log (`talaria tap --json -k round`); none: live.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="With a log: draw its timeline here (.png, else SVG).")
    ] = None,
    scale: Annotated[float, typer.Option("--scale", min=0.1, help="Milliseconds per letter.")] = 50.0,
    config: Config = None,
    bus: BusUrl = "",
    state_dir: StateDir = STATE,
) -> None:
    """Watch the rounds of cold instances: each slot's phases, what entered and what waits; or draw them from a log."""
    from talaria_cli.rounds import run_rounds

    raise SystemExit(run_rounds(log, out, scale, config, bus, state_dir))


@app.command()
def version() -> None:
    """Versions of Talaria and of what it runs on."""
    from talaria_cli.version import run_version

    raise SystemExit(run_version())


def main() -> None:
    """Console entry point."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `talaria tap | head`
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
