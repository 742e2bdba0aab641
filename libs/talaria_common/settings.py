"""talaria.toml: one file for every part, each key overridable as TALARIA_… (`TALARIA_ROUTER__TAU_S=2`).

`load` is the only way in. A mistake becomes a `SettingsError`: one line per key, its value, what was expected.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from talaria_common.ids import check_model_name, check_name

ENV_PREFIX = "TALARIA_"
NESTING = "__"
DEFAULT_FILE = "talaria.toml"
_RESERVED_ENV = {"TALARIA_CONFIG", "TALARIA_CACHE", "TALARIA_LOG", "TALARIA_TRACES"}
"""Read elsewhere: which file, where models are cached, how to log, where tests and benchmarks find real traces."""

_TEXT = {"user", "password", "tap_password", "sha256"}
"""Never read as TOML: a password of digits is no number."""
_SECRET = {"password", "tap_password"}
"""Never shown."""

Name = Annotated[str, AfterValidator(check_name)]
ModelName = Annotated[str, AfterValidator(check_model_name)]


class SettingsError(ValueError):
    """The configuration is wrong; `problems` has one line per mistake: key, value, what was expected."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ApiSettings(_Section):
    """The HTTP edge."""

    id: Name = Field("api-0", description="its name on the bus")
    host: str = Field("127.0.0.1", description="address it listens on")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0: a free one")
    allow_open: bool = Field(
        False, description="without a key, listen beyond loopback all the same: something else guards the port"
    )
    early_headers_s: float = Field(3.0, gt=0, description="a stream's headers go out after this without a token")
    keepalive_s: float = Field(5.0, gt=0, description="seconds between keep-alive comments of a waiting stream")
    request_timeout_s: float = Field(600.0, gt=0, description="deadline of a call, unless it brings a shorter one")
    route_timeout_s: float = Field(1.0, gt=0, description="wait for one answer of the router before asking again")
    route_give_up_s: float = Field(30.0, gt=0, description="no router answers for this long: 503")
    accept_timeout_s: float = Field(2.0, gt=0, description="wait for an instance to accept a body")
    silence_s: float = Field(2.0, gt=0, description="without a batch for this long an instance is taken for dead")
    max_attempts: int = Field(4, ge=1, description="placements tried for one call before its first token")
    max_pending_frames: int = Field(4096, ge=16, description="frames a slow reader may leave unread before it is cut")
    drain_s: float = Field(3.0, ge=0, description="at SIGTERM, how long streams may take to finish")


class BusSettings(_Section):
    """NATS."""

    url: str = Field(
        "nats://127.0.0.1:4222",
        pattern=r"^(nats|tls)://[^\s/]+/?$",
        description="server; `talaria up` starts one if nothing listens there",
    )
    user: str = Field("", description="with `password`; empty: no authentication")
    password: str = Field("", repr=False, description="of `user`")
    tap_password: str = Field(
        "",
        repr=False,
        description="of the embedded server's user `tap`, who sees events but no bodies and no tokens; empty: there is "
        "none",
    )
    max_payload_bytes: int = Field(8 << 20, ge=1 << 16, le=64 << 20, description="of the embedded server")
    events_max_age_s: float = Field(86400.0, gt=0, description="age at which events leave the stream, in seconds")
    events_max_bytes: int = Field(256 << 20, ge=1 << 20, description="size of the event stream; the oldest leave first")

    @model_validator(mode="after")
    def _users_have_passwords(self) -> BusSettings:
        if bool(self.user) != bool(self.password):
            raise ValueError("user and password go together")
        if self.tap_password and not self.user:
            raise ValueError("tap_password needs a user with a password: without one everybody may do everything")
        return self


class ApiKey(_Section):
    """An API key, stored hashed (`talaria key NAME` makes one)."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="hex SHA-256 of the key")
    tenant: Name = Field(description="whose calls these are; tenants share nothing cached")


class AuthSettings(_Section):
    """No key: one open tenant, and the api binds to loopback only."""

    keys: tuple[ApiKey, ...] = Field((), description="the keys; none: everybody is `open_tenant`")
    open_tenant: Name = Field("local", description="tenant of all calls while there are no keys")


class ModelSettings(_Section):
    """A model of the catalog."""

    source: Literal["path", "smollm2", "tiny-qwen3", "tiny-mla", "tiny-hybrid", "tiny-hybrid-dense"] = Field(
        "path", description="a directory with safetensors, or a recipe that makes one in the cache"
    )
    path: Path | None = Field(None, description="with source = path: a Hugging Face model directory")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of the weights in memory; auto: as stored"
    )
    context_tokens: int | None = Field(None, ge=16, description="longest prompt + completion; default: the model's own")

    @model_validator(mode="after")
    def _path_given(self) -> ModelSettings:
        if self.source == "path" and self.path is None:
            raise ValueError("source = 'path' needs a path")
        return self


class SimSettings(_Section):
    """The sim engine's device model, for load tests on the real bus."""

    ttft_ms: float = Field(5.0, ge=0, description="time to first token of an empty prompt")
    prefill_ms_per_ktoken: float = Field(0.0, ge=0, description="prefill time per 1000 tokens")
    decode_step_ms: float = Field(10.0, ge=0, description="one decode iteration, whatever the batch")
    switch_ms: float = Field(50.0, ge=0, description="one model switch")
    kv_capacity_tokens: int = Field(1 << 20, ge=1024, description="device KV of each model")
    context_tokens: int = Field(1 << 18, ge=64, description="longest prompt + completion")
    max_running: int = Field(256, ge=1, description="calls in one batch")
    weight_mib: int = Field(256, ge=1, description="weights of each model, as reported")
    kv_bytes_per_token: int = Field(1024, ge=1, description="as reported")


class InstanceSettings(_Section):
    """One inference instance: one GPU group."""

    id: Name = Field(description="its name on the bus")
    pool: Literal["hot", "cold"] = Field("cold", description="hot: pins one model; cold: time-shares several by rounds")
    engine: Literal["sglang", "sim"] = Field(
        "sglang", description="sglang: the real one; sim: no weights, modelled times"
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    models: tuple[ModelName, ...] = Field(min_length=1, description="models it serves, from [models]")
    open: tuple[ModelName, ...] | None = Field(
        None,
        description="those of `models` that it has open from the start; the others are opened when somebody asks for "
        "them (Eq. 2), or by hand; default: all",
    )
    kv_tokens: int = Field(4096, ge=64, description="device KV rows per model")
    buffer_mib: int | None = Field(None, ge=1, description="device buffer; default: just what weights and KV need")
    mem_fraction_bump: float = Field(
        0.8, gt=0, le=1, description="share of a GPU's memory that the device buffer may take; more is refused at start"
    )
    tp: int = Field(
        1, ge=1, le=64, description="ranks (tensor parallelism): processes, on CUDA with the devices from `device` on"
    )
    page_size: int = Field(16, ge=1, description="tokens per KV block: the granularity of prefix reuse")
    host_kv_mib: int = Field(
        0, ge=0, description="host memory for session KV, all models together; 0: a switch forgets every prefix"
    )
    host_kv_verify: bool = Field(True, description="checksums on KV in host memory, compared on restore")
    emulate_kv_h2d_gbps: float | None = Field(
        None, gt=0, description="restores take as long as at this bandwidth, 10^9 bytes/s (for a CPU as a miniature)"
    )
    emulate_kv_d2h_gbps: float | None = Field(None, gt=0, description="the same for KV on its way to the host")
    staging: bool | None = Field(
        None,
        description="the next model's weights are staged in idle device memory while the active one serves; default: "
        "on a GPU, and on a CPU with `emulate_weight_h2d_gbps`, for there is nothing to be gained without a link",
    )
    staging_chunk_mib: int = Field(4, ge=1, description="bytes of weights that are staged at a time")
    host_weights_mib: int | None = Field(
        None, ge=1, description="host memory for weight images; more waits on disk; default: all stay in memory"
    )
    host_weights_dir: str | None = Field(
        None, description="where images that do not fit wait; default: the system's temporary directory"
    )
    canary: Literal["off", "always"] | Annotated[int, Field(ge=1)] = Field(
        "off", description="off, always, or at every nth switch: known first tokens are compared; if wrong, it stops"
    )
    emulate_weight_h2d_gbps: float | None = Field(
        None, gt=0, description="weights come from host at this bandwidth, 10^9 bytes/s (for a CPU as a miniature)"
    )
    emulate_weight_d2d_gbps: float | None = Field(None, gt=0, description="the same for staged weights at a switch")
    max_running: int = Field(8, ge=1, description="calls in one batch")
    chunked_prefill_tokens: int = Field(1024, ge=64, description="prompt tokens in one prefill batch")
    max_queued: int = Field(64, ge=1, description="waiting calls before it rejects with `overloaded`")
    scheduler: Literal["talaria", "no-sp", "no-hkvr", "h2d-only", "round-only"] = Field(
        "talaria",
        description="talaria: everything; the others leave out session-prefill, host KV, weight staging, or all three",
    )
    slot_ms: float = Field(
        2000.0, gt=0, description="a slot's length while other models wait, if the round has room for it"
    )
    drain_ms: float = Field(
        500.0, ge=0, description="decode that a slot protects beyond its share (Eq. 4), if the round has room for it"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; default: all cores")
    engine_start_s: float = Field(900.0, gt=0, description="an engine silent for this long while it starts is killed")
    engine_hang_s: float = Field(30.0, gt=0, description="a serving engine silent for this long is killed")
    shutdown_s: float = Field(5.0, ge=0, description="time that running calls get to finish on SIGTERM")
    seed: int = Field(0, description="of sampling")
    sim: SimSettings = Field(SimSettings(), description="with engine = sim: its device model")

    @model_validator(mode="after")
    def _hot_has_one(self) -> InstanceSettings:
        if self.pool == "hot" and len(self.models) != 1:
            raise ValueError(f"a hot instance pins exactly one model, not {len(self.models)}")
        return self

    @model_validator(mode="after")
    def _open_ones_are_known(self) -> InstanceSettings:
        if self.open is None:
            return self
        if unknown := [name for name in self.open if name not in self.models]:
            raise ValueError(f"open names {', '.join(unknown)}, which models does not")
        if not self.open or self.pool == "hot":
            raise ValueError("open needs a model at least, and is for cold instances: a hot one has its model open")
        return self


PRIORITY_RANGE = 100
"""Priorities of calls go from minus this to this; 0 is the usual one."""


class TenantSettings(_Section):
    """A tenant's part of what the router shares out."""

    weight: float = Field(1.0, gt=0, description="its turns and places in the queue, relative to other tenants'")
    max_in_flight: int | None = Field(None, ge=1, description="instead of `router.tenant_max_in_flight`")
    max_priority: int | None = Field(
        None, ge=-PRIORITY_RANGE, le=PRIORITY_RANGE, description="instead of `router.tenant_max_priority`"
    )


class RouterSettings(_Section):
    """Placement (DESIGN 5)."""

    id: Name = Field("router-0", description="its name on the bus")
    policy: str = Field("talaria", description="placement policy by name")
    tau_s: float = Field(1.0, ge=0, description="reservation timeout")
    tau_learn_max_s: float = Field(
        0.0, ge=0, le=50, description="learn tau per tenant and model from their gaps, up to this; 0: tau_s for all"
    )
    t_ttft_s: float = Field(10.0, gt=0, description="T_TTFT: target for the first token, in seconds")
    gamma: float = Field(0.9, gt=0, lt=1, description="share of T_TTFT that a predicted round may fill (Eq. 5)")
    t_tpot_ms: float = Field(100.0, gt=0, description="T_TPOT: target per output token")
    overload: Literal["reject", "queue", "spill"] = Field(
        "reject",
        description="no capacity: refuse with 429, let calls wait, or place them although the target will be missed",
    )
    queue_max: int = Field(
        256,
        ge=1,
        description="calls that wait at the router: for room with overload = queue, for a fit instance always",
    )
    patience_s: float = Field(
        15.0,
        ge=0,
        description="how long a call waits when all who serve its model are silent, starting or being restarted, "
        "before it gets 503",
    )
    tenant_max_in_flight: int | None = Field(
        None, ge=1, description="calls that one tenant may have in flight at each router; default: no limit"
    )
    tenant_max_priority: int = Field(
        0,
        ge=-PRIORITY_RANGE,
        le=PRIORITY_RANGE,
        description="highest X-Talaria-Priority that a tenant's calls may ask for; with 0 they may only step back",
    )
    session_idle_s: float = Field(3600.0, gt=0, description="a session's entry is forgotten after this")
    sessions_max: int = Field(1_000_000, ge=1, description="entries of the session table; the longest unused go first")
    mu_ms_per_gib: float = Field(2.0, ge=0, description="mu: price of KV placed on a full instance (Eq. 1)")
    nu_ms: float = Field(500.0, ge=0, description="nu: price of activating a model that is not resident (Eq. 1)")
    control_window_s: float = Field(
        10.0, gt=0, description="window over which opening and closing replicas is judged (Eq. 2)"
    )
    replica_idle_s: float = Field(
        300.0, gt=0, description="a replica idle for this long is closed if others hold the model and Eq. 2 allows"
    )
    admission_unit_ms: float | None = Field(None, ge=0, description="default: the model's EWMA of a return's prefill")
    tenants: dict[Name, TenantSettings] = Field(
        default_factory=dict, description="tenant -> its weight and limits, where they differ from the others'"
    )

    def max_priority(self, tenant: str) -> int:
        """The highest priority that calls of `tenant` may have."""
        own = self.tenants[tenant].max_priority if tenant in self.tenants else None
        return self.tenant_max_priority if own is None else own


class TelemetrySettings(_Section):
    """The cluster view, events and metrics."""

    id: Name = Field("telemetry-0", description="its name on the bus")
    full_every: int = Field(10, ge=1, description="heartbeats between full cluster views")


class MeshSettings(_Section):
    """What all parts share."""

    heartbeat_s: float = Field(0.5, gt=0, description="seconds between snapshots and other signs of life")
    missed: int = Field(3, ge=1, description="heartbeats missed before a part is stale")
    skew_tolerance_s: float = Field(2.0, ge=0, description="clock difference between hosts that deadlines forgive")
    metrics_host: str = Field("127.0.0.1", description="address of the ports below")
    metrics_ports: dict[str, int] = Field(
        default_factory=dict, description="part id -> port of its /metrics, /livez and /readyz; 0 or absent: none"
    )


class LogSettings(_Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="the least that is logged")
    format: Literal["auto", "console", "json"] = Field("auto", description="auto: console on a terminal, else json")


class Settings(_Section):
    """The whole of talaria.toml."""

    api: ApiSettings = ApiSettings()
    bus: BusSettings = BusSettings()
    auth: AuthSettings = AuthSettings()
    mesh: MeshSettings = MeshSettings()
    router: RouterSettings = RouterSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    log: LogSettings = LogSettings()
    models: dict[ModelName, ModelSettings] = Field(default_factory=dict)
    instances: tuple[InstanceSettings, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        ids = [i.id for i in self.instances]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise ValueError(f"instances: id used twice: {', '.join(twice)}")
        for instance in self.instances:
            unknown = [m for m in instance.models if m not in self.models]
            if unknown:
                raise ValueError(f"instances.{instance.id}.models: {unknown[0]!r} is not in [models]")
        guarded = self.auth.keys or self.api.allow_open or self.api.host in {"127.0.0.1", "localhost", "::1"}
        if not guarded:
            raise ValueError(
                f"api.host = {self.api.host!r} is not loopback and auth.keys is empty: set a key first "
                "(`talaria key NAME`), or api.allow_open = true if something else guards the port"
            )
        return self

    def instance(self, iid: str) -> InstanceSettings:
        """The instance named `iid`. Raises SettingsError with the ids there are."""
        for instance in self.instances:
            if instance.id == iid:
                return instance
        raise SettingsError([f"instances: no instance {iid!r}; there are: {', '.join(i.id for i in self.instances)}"])


def load(path: str | Path | None = None, env: dict[str, str] | None = None) -> Settings:
    """Settings from `path` (default: $TALARIA_CONFIG, else ./talaria.toml) and TALARIA_… variables on top.

    Lists of tables are addressed by id or position: `TALARIA_INSTANCES__COLD_0__KV_TOKENS=8192`.

    Raises:
        SettingsError: the file is missing, is not TOML, or a key is wrong.
    """
    env = dict(os.environ) if env is None else env
    file = Path(path or env.get("TALARIA_CONFIG") or DEFAULT_FILE)
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise SettingsError([f"{file}: no such file"]) from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise SettingsError([f"{file}: not valid TOML: {e}"]) from e
    return parse(overlay(raw, env))


def parse(raw: dict[str, Any]) -> Settings:
    """Settings from plain data. Raises SettingsError."""
    try:
        return Settings.model_validate(raw)
    except ValidationError as e:
        raise SettingsError([_line(error) for error in e.errors()]) from e


def _line(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key (value {error['input']!r})"
    if error["type"] == "missing":
        return f"{key}: missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    if not key:
        return message  # a rule across sections, which names its keys
    secret = bool(_SECRET & set(error["loc"]))
    shown = "" if secret or isinstance(error["input"], dict) else f" = {error['input']!r}"
    return f"{key}{shown}: {message}"


def overlay(raw: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """`raw` with TALARIA_… variables laid over it. Values are read as TOML, else as plain text."""
    problems = []
    for variable, text in sorted(env.items()):
        if not variable.startswith(ENV_PREFIX) or variable in _RESERVED_ENV:
            continue
        parts = variable.removeprefix(ENV_PREFIX).lower().split(NESTING)
        try:
            _put(raw, parts, text if parts[-1] in _TEXT else _value(text))
        except KeyError as e:
            problems.append(f"{variable} = {text!r}: {e.args[0]}")
    if problems:
        raise SettingsError(problems)
    return raw


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _put(raw: dict[str, Any], parts: list[str], value: Any) -> None:
    here: Any = raw
    for depth, part in enumerate(parts[:-1]):
        here = _row(here, part) if isinstance(here, list) else here.setdefault(_key(here, part), {})
        if not isinstance(here, dict | list):
            raise KeyError(f"{'.'.join(parts[: depth + 1])} is a value, not a section")
    if isinstance(here, list):
        raise KeyError(f"{'.'.join(parts[:-1])} is a list of tables: name one, then a key")
    here[_key(here, parts[-1])] = value


def _key(table: dict[str, Any], part: str) -> str:
    """The table's own spelling of a variable's part: letter case and '-' are lost in the environment."""
    return next((k for k in table if _fold(k) == part), part)


def _row(rows: list[Any], part: str) -> dict[str, Any]:
    for position, row in enumerate(rows):
        if isinstance(row, dict) and (part == str(position) or _fold(str(row.get("id", ""))) == part):
            return row
    raise KeyError(f"no entry {part!r}; there are: {', '.join(str(r.get('id')) for r in rows)}")


def _fold(key: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in key.lower())
