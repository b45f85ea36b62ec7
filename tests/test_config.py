"""The configuration: defaults, bounds, overrides, and what a typing error is answered with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from switchgear.daemon.config import Configuration, load
from switchgear.ipc.errors import BadConfiguration


def read(text: str, folder: Path, environment: dict[str, str] | None = None) -> Configuration:
    path = folder / "switchgear.toml"
    path.write_text(text)
    return load(path, environment or {})


def test_without_a_file_there_are_defaults() -> None:
    configuration = load(None, {})

    assert configuration == Configuration()
    assert configuration.daemon.isolation == "user"
    assert configuration.limits.instances_per_model == 8
    assert configuration.limits.instances_mib == 512
    assert configuration.validation.time_limit_s == 10
    assert configuration.validation.address_space_mib == 2048
    assert configuration.models == ()


def test_a_file_is_read(tmp_path: Path) -> None:
    text = """
    [daemon]
    isolation = "shared"
    stop_limit_s = 3
    [cpu]
    threads = 2
    affinity = [0, 1]
    [[models]]
    path = "/models/face.tflite"
    name = "face"
    [[models]]
    path = "/models/palm.tflite"
    """
    configuration = read(text, tmp_path)

    assert configuration.daemon.isolation == "shared"
    assert configuration.daemon.stop_limit_s == 3.0
    assert configuration.cpu.interactive_threads() == 2
    assert configuration.cpu.affinity == (0, 1)
    assert [(m.path, m.name) for m in configuration.models] == [
        (Path("/models/face.tflite"), "face"),
        (Path("/models/palm.tflite"), None),
    ]
    # What is not there keeps its default.
    assert configuration.limits == Configuration().limits


def test_threads_of_0_are_the_processors_allowed_at_most_4() -> None:
    assert Configuration().cpu.interactive_threads() == min(4, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[cpus]", "unknown key cpus; did you mean cpu?"),
        ("[cpu]\nthread = 2", "unknown key cpu.thread; did you mean threads?"),
        ("[daemon]\nlog_levle = 'info'", "did you mean log_level?"),
        ("[[models]]\npath = 'a'\nnmae = 'b'", "models.0.nmae; did you mean name?"),
        ("threads = 2", "unknown key threads; did you mean"),
        ("[limits]\nzzz = 1", "unknown key limits.zzz; did you mean"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(
    text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadConfiguration) as caught:
        read(text, tmp_path)

    assert said in caught.value.text
    assert str(tmp_path / "switchgear.toml") in caught.value.text


@pytest.mark.parametrize(
    "text",
    [
        "[cpu]\nthreads = -1",
        "[cpu]\nthreads = 257",
        "[cpu]\nthreads = true",
        "[cpu]\nthreads = '2'",
        "[cpu]\nthreads = 2.0",
        "[cpu]\nniceness = 20",
        "[cpu]\naffinity = [-1]",
        "[cpu]\naffinity = 0",
        "[daemon]\nisolation = 'group'",
        "[daemon]\nlog_level = 'loud'",
        "[daemon]\nstop_limit_s = 0",
        "[daemon]\nstop_limit_s = 301",
        "[daemon]\nstop_limit_s = true",
        "[workers]\nhang_s = nan",
        "[workers]\nidle_s = inf",
        "[limits]\nqueue = 0",
        "[limits]\nqueue = 65537",
        "[limits]\nsessions_per_user = 0",
        "[validation]\naddress_space_mib = 100",
        "[validation]\nat_once = 65",
        "[fingerprint]\nenabled = 'yes'",
        "[[models]]\nname = 'x'",
        "[[models]]\npath = 'a'\nname = '.hidden'",
        "[[models]]\npath = 'a'\nname = 'a/b'",
        "models = 3",
        "cpu = 3",
    ],
)
def test_values_out_of_range_are_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration) as caught:
        read(text, tmp_path)

    named = text.partition("\n")[2] or text
    key = named.splitlines()[-1].partition(" =")[0]
    assert key in caught.value.text or "path" in caught.value.text


def test_several_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration) as caught:
        read("[cpu]\nthreads = -1\nnicenes = 0\n[limits]\nqueue = 0", tmp_path)

    for part in ("cpu.threads", "did you mean niceness?", "limits.queue"):
        assert part in caught.value.text


@pytest.mark.parametrize(
    "data",
    [b"[cpu", b"threads = ", b"\xff\xfe", b"[cpu]\n[cpu]\n", b"a = " + b"[" * 5000],
    ids=["bracket", "value", "utf8", "twice", "deep"],
)
def test_what_is_no_toml_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "switchgear.toml"
    path.write_bytes(data)
    with pytest.raises(BadConfiguration, match=r"switchgear\.toml"):
        load(path, {})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="No such file"):
        load(tmp_path / "none.toml", {})

    with pytest.raises(BadConfiguration, match="directory"):
        load(tmp_path, {})


@pytest.mark.parametrize(
    ("variable", "value", "section", "key", "expected"),
    [
        ("SWITCHGEAR_CPU__THREADS", "3", "cpu", "threads", 3),
        ("SWITCHGEAR_CPU__AFFINITY", "[0, 2]", "cpu", "affinity", (0, 2)),
        ("SWITCHGEAR_DAEMON__LOG_LEVEL", "debug", "daemon", "log_level", "debug"),
        ("SWITCHGEAR_DAEMON__LOG_LEVEL", '"debug"', "daemon", "log_level", "debug"),
        ("SWITCHGEAR_DAEMON__STOP_LIMIT_S", "2.5", "daemon", "stop_limit_s", 2.5),
        ("SWITCHGEAR_FINGERPRINT__ENABLED", "false", "fingerprint", "enabled", False),
    ],
)
def test_the_environment_overrides_the_file(
    variable: str, value: str, section: str, key: str, expected: Any, tmp_path: Path
) -> None:
    text = "[cpu]\nthreads = 1\n[daemon]\nlog_level = 'error'\nstop_limit_s = 9\n"
    configuration = read(text, tmp_path, {variable: value})

    assert getattr(getattr(configuration, section), key) == expected
    if variable != "SWITCHGEAR_CPU__THREADS":
        assert configuration.cpu.threads == 1


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SWITCHGEAR_CPU__THREADS", "many", "cpu.threads"),
        ("SWITCHGEAR_CPU__THREAD", "1", "did you mean threads?"),
        ("SWITCHGEAR_GPU__THREADS", "1", "unknown key gpu"),
        ("SWITCHGEAR_MODELS__PATH", "x", "models"),
    ],
)
def test_an_override_is_checked_like_the_file(variable: str, value: str, said: str) -> None:
    with pytest.raises(BadConfiguration, match="environment") as caught:
        load(None, {variable: value})

    assert said in caught.value.text


def test_other_variables_are_left_alone() -> None:
    others = {
        "SWITCHGEAR_SOCKET": "/run/s",
        "SWITCHGEAR_STATE_DIR": "/var",
        "CPU__THREADS": "9",
    }

    assert load(None, others) == Configuration()


def test_a_section_that_the_file_has_as_a_value(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"\[cpu\] is no section"):
        read("cpu = 1", tmp_path, {"SWITCHGEAR_CPU__THREADS": "2"})
