"""Which of the three ways to an NPU is taken."""

from __future__ import annotations

from typing import Any

import native_build
import pytest

from switchgear.backends.npu import delegate as delegate_module
from switchgear.backends.npu import nnapi_abi
from switchgear.backends.npu.backend import NpuBackend
from switchgear.ipc.errors import BadConfiguration, DriverError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]


def test_without_an_npu_each_provider_says_why() -> None:
    with pytest.raises(DriverError) as caught:
        NpuBackend({})

    error = caught.value
    assert (error.domain, error.name) == ("errno", "ENODEV")
    for said in ("dispatch: ", "delegate: ", "nnapi: ", "libteflon.so", "libneuralnetworks.so"):
        assert said in error.text


@pytest.mark.parametrize("more", [{}, {"provider": "auto"}, {"provider": "delegate"}])
def test_a_configured_delegate_decides(more: dict[str, str]) -> None:
    backend = NpuBackend({"delegate": str(native_build.delegate()), **more})
    assert backend.identity()["provider"] == "delegate"
    assert backend.precisions == ()
    backend.close()


def test_a_delegate_in_the_usual_places_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delegate_module, "KNOWN_DELEGATES", ("test_delegate.so",))
    monkeypatch.setattr(
        delegate_module, "usual_folders", lambda: (str(native_build.delegate().parent),)
    )
    backend = NpuBackend({})
    assert backend.identity()["library"] == str(native_build.delegate())
    backend.close()


def test_a_named_provider_is_the_only_one_asked() -> None:
    library = str(native_build.library("stub_neuralnetworks"))
    backend = NpuBackend({"provider": "nnapi", "library": library})
    assert backend.identity()["provider"] == "nnapi"
    assert backend.precisions == ("fp16", "fp32")
    backend.close()
    for name, said in (("delegate", "libteflon.so"), ("nnapi", nnapi_abi.LIBRARY)):
        with pytest.raises(DriverError, match=said) as caught:
            NpuBackend({"provider": name})

        assert "dispatch" not in caught.value.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"provider": "dispatch", "device": "TPU"}, "device is one of"),
        ({"provider": "dispatch", "vendor": 3}, "vendor"),
        ({"provider": "nnapi", "library": 3}, "texts"),
        ({"provider": "nnapi", "device": 3}, "texts"),
        ({"provider": 3}, "provider is one of"),
    ],
)
def test_options_of_a_wrong_kind(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfiguration, match=said):
        NpuBackend(options)
