"""The configuration: one TOML file, every key with its unit, default and bounds.

`SWITCHGEAR_<SECTION>__<KEY>` in the environment overrides a key, for example
`SWITCHGEAR_CPU__THREADS=2`. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from switchgear.daemon.telemetry.address import check_address
from switchgear.ipc.errors import BadConfiguration

# Strict: `threads = true` is no number, and neither is `threads = "2"`.
Integer = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Boolean = Annotated[bool, Field(strict=True)]
Positive = Annotated[Integer, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DaemonSection(_Section):
    """`isolation`: workers per user, or one set for all users of a single-user device."""

    isolation: Literal["user", "shared"] = "user"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    stop_limit_s: Annotated[Real, Field(gt=0, le=300)] = 10.0


class CpuSection(_Section):
    """`threads`: 0 takes as many as the processors allowed, at most 4 (more rarely help models
    of phone size). `affinity`: processors to stay on, empty for all. The batch lane runs jobs
    of low priority beside the interactive one."""

    threads: Annotated[Integer, Field(ge=0, le=256)] = 0
    niceness: Annotated[Integer, Field(ge=-20, le=19)] = 0
    affinity: tuple[Annotated[Integer, Field(ge=0)], ...] = ()
    batch_threads: Annotated[Integer, Field(ge=0, le=256)] = 1
    batch_niceness: Annotated[Integer, Field(ge=-20, le=19)] = 10

    def interactive_threads(self) -> int:
        return self.threads or max(1, min(4, len(os.sched_getaffinity(0))))


class WorkersSection(_Section):
    """`hang_s`: a run that takes longer is ended with its worker; a model's own slow runs
    raise it to 20 times its slowest one. `idle_s`: a user's workers end this long after their
    last use."""

    hang_s: Annotated[Real, Field(gt=0, le=3600)] = 5.0
    start_s: Annotated[Real, Field(gt=0, le=600)] = 20.0
    idle_s: Annotated[Real, Field(gt=0)] = 300.0


class LimitsSection(_Section):
    """What one user may hold, and how much may wait."""

    connections_per_user: Positive = 256
    sessions_per_user: Positive = 64
    models_per_user: Positive = 64
    jobs_per_user: Positive = 64
    arena_mib_per_user: Positive = 1024
    model_mib: Positive = 4096
    memory_models_mib_per_user: Positive = 256
    store_mib: Positive = 8192
    queue: Annotated[Integer, Field(ge=1, le=65536)] = 256
    queue_per_user: Annotated[Integer, Field(ge=1, le=65536)] = 192
    instances_per_model: Positive = 8
    instances_mib: Positive = 512


class ValidationSection(_Section):
    """The disposable process that tries a new model."""

    time_limit_s: Annotated[Real, Field(gt=0, le=3600)] = 10.0
    address_space_mib: Annotated[Integer, Field(ge=512)] = 2048
    at_once: Annotated[Integer, Field(ge=1, le=64)] = 2


class FingerprintSection(_Section):
    """How this device is measured. `enabled`: in the background, after the start. `delegate`
    is the path of the NPU's TFLite external delegate. `thresholds_c`: where a device throttles,
    by its id or kind (`cpu`, `gpu`, `npu`). Tests wait while tasks wait for a CPU more than
    `busy_share` of the time (1: never), and for gaps between requests; after `patience_s` at
    the latest the whole is measured."""

    enabled: Boolean = True
    quick: Boolean = False
    delegate: str = ""
    delegate_options: dict[str, str] = {}
    thresholds_c: dict[str, Annotated[Real, Field(ge=20, le=150)]] = {}
    busy_share: Annotated[Real, Field(gt=0, le=1)] = 0.1
    patience_s: Annotated[Real, Field(ge=0)] = 600.0


class PrepareSection(_Section):
    """What is prepared behind the CPU. `enabled`: every backend that is here, for each model.
    `backends`: which ones, empty for all. `time_limit_s`: for one model on one of them.
    `cache_mib`: the bound of all prepared files and driver caches together."""

    enabled: Boolean = True
    backends: tuple[str, ...] = ()
    time_limit_s: Annotated[Real, Field(gt=0, le=86400)] = 600.0
    cache_mib: Positive = 2048


class NpuSection(_Section):
    """`provider`: delegate, dispatch, nnapi, or auto for what the device has. `delegate`: the
    path of a TFLite external delegate, `delegate_options` its options, `threads` those of the
    part that it leaves to the CPU. `vendor` and `device`: of the dispatch plug-in; `device` and
    `library`: of NNAPI. `min_arithmetic`: the share of a model's arithmetic that has to run on
    the device."""

    provider: Literal["auto", "delegate", "dispatch", "nnapi"] = "auto"
    delegate: str = ""
    delegate_options: dict[str, str] = {}
    vendor: str = ""
    device: str = ""
    library: str = ""
    threads: Annotated[Integer, Field(ge=1, le=256)] = 1
    min_arithmetic: Annotated[Real, Field(ge=0, le=1)] = 0.8


class ThermalSection(_Section):
    """`sysfs_root`: where sysfs is mounted. `scales`: factors to millidegrees by zone type, for
    zones that report something else. `devices`: the physical part (`cpu`, `gpu`, `gpu2`, `npu`)
    of a backend, where it is not what the backend says of itself."""

    sysfs_root: Path = Path("/sys")
    scales: dict[str, Annotated[Real, Field(gt=0)]] = {}
    devices: dict[str, Annotated[str, Field(pattern=r"^(cpu|gpu|npu)[0-9]*$")]] = {}


class ProtocolSection(_Section):
    """`mode`: `default`, or `report` for the field report's rules to the letter. `dry_run`:
    everything is decided and told, nothing is closed."""

    mode: Literal["default", "report"] = "default"
    dry_run: Boolean = False


class RoutingSection(_Section):
    """`policy`: of sessions that choose none; the least energy among what is in time.
    `busy_w`: what a part draws while it is busy, in watts, by its name (`cpu`, `gpu`, `npu`),
    where nothing measures it."""

    policy: Literal[
        "max_performance",
        "prefer_gpu",
        "prefer_npu",
        "prefer_cpu",
        "max_efficiency",
        "min_power",
    ] = "max_efficiency"
    busy_w: dict[str, Annotated[Real, Field(gt=0)]] = {}


class MetricsSection(_Section):
    """`listen`: where Prometheus may ask, `127.0.0.1:9464` (loopback only) or `unix:/path`;
    empty for nowhere. They are always there on the control socket."""

    listen: Annotated[str, AfterValidator(check_address)] = ""


class ModelEntry(_Section):
    """A model to keep loaded for every user."""

    path: Path
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] | None = None


class Configuration(_Section):
    """The whole file."""

    daemon: DaemonSection = DaemonSection()
    cpu: CpuSection = CpuSection()
    workers: WorkersSection = WorkersSection()
    limits: LimitsSection = LimitsSection()
    validation: ValidationSection = ValidationSection()
    fingerprint: FingerprintSection = FingerprintSection()
    thermal: ThermalSection = ThermalSection()
    metrics: MetricsSection = MetricsSection()
    protocol: ProtocolSection = ProtocolSection()
    routing: RoutingSection = RoutingSection()
    prepare: PrepareSection = PrepareSection()
    npu: NpuSection = NpuSection()
    models: tuple[ModelEntry, ...] = ()

    def backend_options(self, backend: str) -> dict[str, Any]:
        """What a worker or preparer of a backend other than the CPU is given."""
        if backend == "npu":
            options = self.npu.model_dump(mode="json", exclude_defaults=True)
            # What the fingerprint measures with is what serves.
            if not self.npu.delegate and self.fingerprint.delegate:
                options["delegate"] = self.fingerprint.delegate
                options["delegate_options"] = dict(self.fingerprint.delegate_options)

            return options

        return {}


def load(path: Path | None, environment: Mapping[str, str] | None = None) -> Configuration:
    """Reads the configuration; a `path` of None gives the defaults with the overrides.

    :raises BadConfiguration: the file cannot be read or parsed, a key is unknown, or a value is
        out of range.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadConfiguration(f"{path}: {error.strerror or error}") from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise BadConfiguration(f"{path}: {error}") from None

    _apply_environment(data, os.environ if environment is None else environment)
    try:
        return Configuration.model_validate(data)
    except ValidationError as error:
        where = str(path) if path is not None else "environment"
        raise BadConfiguration(f"{where}: {_describe(error)}") from None


def _apply_environment(data: dict[str, Any], environment: Mapping[str, str]) -> None:
    for variable, value in environment.items():
        section, separator, key = variable.removeprefix("SWITCHGEAR_").partition("__")
        if variable.startswith("SWITCHGEAR_") and separator:
            section_data = data.setdefault(section.lower(), {})
            if not isinstance(section_data, dict):
                raise BadConfiguration(f"{variable}: [{section.lower()}] is no section")

            section_data[key.lower()] = _parse_value(value)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys of the section that holds `location`."""
    model: type[BaseModel] = Configuration
    for part in location[:-1]:
        if isinstance(part, int):
            continue

        if part == "models":
            model = ModelEntry
            continue

        default = model.model_fields[part].default
        if isinstance(default, BaseModel):
            model = type(default)

    return list(model.model_fields)


def _describe(error: ValidationError) -> str:
    texts = []
    for problem in error.errors(include_url=False):
        location = problem["loc"]
        name = ".".join(str(part) for part in location)
        if problem["type"] == "extra_forbidden":
            known = _known_keys(location)
            near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.0)
            texts.append(f"unknown key {name}; did you mean {near[0]}?")
        else:
            texts.append(f"{name}: {problem['msg']}")

    return "; ".join(texts)
