"""`switchgear infer`, against a daemon: files in, numbers out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_command import environment, switchgear, switchgear_json
from daemon_process import DaemonProcess
from numpy.typing import NDArray

from switchgear.backends import generate
from switchgear.client import connect
from switchgear.client.models import Tensor
from switchgear.daemon.cli.command import CommandError, UsageError
from switchgear.daemon.cli.inputs import load_array, load_image, read_all, takes_images

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config="[cpu]\nthreads = 1\n") as running:
        yield running


def tensor(dtype: str, *shape: int, name: str = "x") -> Tensor:
    return Tensor(name, dtype, shape, shape, 0)


def npy(path: Path, value: Any, dtype: str = "float32") -> Path:
    with path.open("wb") as file:
        np.save(file, np.asarray(value, dtype))

    return path


def picture(path: Path, pixels: NDArray[np.uint8]) -> Path:
    from PIL import Image

    Image.fromarray(pixels).save(path)
    return path


def test_arrays_in_and_out(daemon: DaemonProcess, tmp_path: Path) -> None:
    a = npy(tmp_path / "a.npy", [1, 2, 3, 4])
    b = npy(tmp_path / "b.npy", [10, 20, 30, 40])
    product = tmp_path / "product"
    told = switchgear_json(
        *("infer", "generated:two_inputs", "--socket", daemon.socket),
        *("--input", f"a={a}", "--input", f"b={b}", "--output", f"product={product}"),
    )
    assert told["outputs"]["sum"]["values"] == [11, 22, 33, 44]
    assert told["outputs"]["sum"]["mean"] == 27.5
    # The name as it was typed: no suffix is added.
    assert np.load(product).tolist() == [10, 40, 90, 160]
    assert (told["backend"], told["precision"]) == ("cpu", "fp32")
    assert 0 < told["run_ms"] <= told["total_ms"]
    assert told["queue_ms"] >= 0


def test_text_says_how_it_came_about(daemon: DaemonProcess) -> None:
    arguments = ("infer", "generated:two_inputs", "--zeros", "--socket", daemon.socket)
    done = switchgear(*arguments, "--backend", "cpu", "--strict")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["sum: float32 [4]", "  min 0  mean 0  max 0", "  values 0 0 0 0"]
    assert lines[-2].startswith("backend cpu fp32, because: ")
    assert lines[-1].startswith("queue ")
    # It stays loaded, and its name and hash mean it from then on.
    assert switchgear("infer", "two_inputs", *arguments[2:]).returncode == 0


def test_an_image_fills_the_input_that_takes_one(daemon: DaemonProcess, tmp_path: Path) -> None:
    file = tmp_path / "tiny.tflite"
    file.write_bytes(generate.identity((1, 2, 3, 3)))
    pixels = np.zeros((2, 3, 3), np.uint8)
    pixels[0, 1] = (255, 0, 51)
    image = picture(tmp_path / "photo.png", pixels)
    common = ("infer", file, "--image", image, "--socket", daemon.socket)
    out = tmp_path / "y.npy"
    assert switchgear(*common, "--output", f"y={out}").returncode == 0
    assert np.allclose(np.load(out)[0], pixels / 127.5 - 1, atol=1e-6)
    done = switchgear(*common, "--output", f"y={out}", "--scale", "0..1")
    assert done.returncode == 0, done.stderr
    assert np.allclose(np.load(out)[0], pixels / 255, atol=1e-6)


def test_an_open_dimension_takes_the_arrays_size(daemon: DaemonProcess, tmp_path: Path) -> None:
    x = npy(tmp_path / "x.npy", np.ones((3, 4)))
    told = switchgear_json(
        *("infer", "generated:dynamic_batch", "--input", f"x={x}"), "--socket", daemon.socket
    )
    assert told["outputs"]["y"]["shape"] == [3, 4]
    assert told["outputs"]["y"]["values"] == [2, 3, 4, 5, 2, 3]


def test_top_names_the_largest(daemon: DaemonProcess, tmp_path: Path) -> None:
    with connect(daemon.socket) as client:
        client.load_model(generate.identity((12,)), "twelve")

    x = npy(tmp_path / "x.npy", [0, 1, 9, 3, 9, -5, 2, 2, 2, 2, 2, 8])
    common = ("infer", "twelve", "--input", f"x={x}", "--top", "3", "--socket", daemon.socket)
    told = switchgear_json(*common)
    assert told["outputs"]["y"]["top"] == [
        {"index": 2, "value": 9},
        {"index": 4, "value": 9},
        {"index": 11, "value": 8},
    ]
    assert "  top 1  [2] 9\n  top 2  [4] 9\n" in switchgear(*common).stdout


@pytest.mark.parametrize("dtype", ["bool", "complex64", "float16", "int64", "uint64"])
def test_every_dtype_is_shown(daemon: DaemonProcess, dtype: str) -> None:
    told = switchgear_json(
        "infer", f"generated:identity_{dtype}", "--zeros", "--socket", daemon.socket
    )
    assert told["outputs"]["y"]["dtype"] == dtype
    assert len(told["outputs"]["y"]["values"]) == 1


def test_numbers_that_json_lacks_are_text(daemon: DaemonProcess, tmp_path: Path) -> None:
    x = npy(tmp_path / "x.npy", [np.nan])
    told = switchgear_json(
        *("infer", "generated:identity", "--input", f"x={x}", "--socket", daemon.socket)
    )
    assert told["outputs"]["y"]["values"] == ["nan"]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        ((), 2, "input 'a' is missing: --input a=FILE.npy or --zeros; the model takes a (fl"),
        (("--input", "c=x.npy"), 2, "NAME is one of 'a', 'b'"),
        (("--input", "a"), 2, "say NAME=FILE"),
        (("--input", "a=/nowhere.npy"), 1, "/nowhere.npy: No such file or directory"),
        (("--image", "x.png"), 2, "no input takes an image; the model takes a (float32 [4])"),
        (("--zeros", "--output", "z=x.npy"), 2, "NAME is one of 'sum', 'product'"),
        (("--zeros", "--output", "sum=/nowhere/x.npy"), 1, "/nowhere/x.npy: No such file"),
        (("--zeros", "--strict"), 2, "--strict needs --backend"),
        (("--zeros", "--backend", "quantum"), 1, "UnknownBackend"),
        (("--zeros", "--top", "0"), 2, "--top needs a number above 0"),
    ],
)
def test_mistakes(
    daemon: DaemonProcess, arguments: tuple[str, ...], status: int, sentence: str
) -> None:
    done = switchgear("infer", "generated:two_inputs", *arguments, "--socket", daemon.socket)
    assert sentence in done.stderr
    assert done.returncode == status
    assert done.stdout == ""


def test_a_wrong_array_and_an_unknown_model(daemon: DaemonProcess, tmp_path: Path) -> None:
    x = npy(tmp_path / "x.npy", [1, 2], "float64")
    common = ("infer", "generated:identity", "--input", f"x={x}", "--socket", daemon.socket)
    told = switchgear_json(*common, status=1)
    assert told["error"] == "BadInput"
    assert "float64" in told["message"]
    done = switchgear("infer", "stranger", "--zeros", "--socket", daemon.socket)
    assert done.returncode == 1
    assert (
        "UnknownModel: no model 'stranger' is loaded, and there is no such file" in done.stderr
    )


def test_without_pillow_it_names_the_command(daemon: DaemonProcess, tmp_path: Path) -> None:
    file = tmp_path / "tiny.tflite"
    file.write_bytes(generate.identity((1, 2, 3, 3)))
    program = (
        "import sys; sys.modules['PIL'] = None\n"
        "from switchgear.daemon.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "infer", str(file)),
            *("--image", "photo.png", "--socket", str(daemon.socket)),
        ],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 1
    assert "pip install 'switchgear[images]'" in done.stderr


def test_images_in_each_type(tmp_path: Path) -> None:
    pixels = np.array([[[0], [128], [255]]], np.uint8)
    image = picture(tmp_path / "grey.png", pixels[..., 0])
    raw = load_image(image, tensor("uint8", 1, 1, 3, 1), "-1..1")
    assert raw.tolist() == [[[[0], [128], [255]]]]
    signed = load_image(image, tensor("int8", 1, 3, 1), "-1..1")
    assert signed.dtype == np.int8
    assert signed.tolist() == [[[-128], [0], [127]]]
    half = load_image(image, tensor("float16", 1, 1, 3, 1), "0..1")
    assert half.dtype == np.float16
    assert half.ravel()[[0, 2]].tolist() == [0, 1]
    # One channel becomes three, and the size is the tensor's.
    assert load_image(image, tensor("float32", 1, 5, 7, 3), "-1..1").shape == (1, 5, 7, 3)


def test_a_picture_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.zeros((2, 1, 3), np.uint8)
    pixels[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise: the top becomes the right
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    turned = load_image(tmp_path / "turned.png", tensor("uint8", 1, 1, 2, 3), "-1..1")
    assert turned[0, 0, :, 0].tolist() == [0, 255]


def test_which_inputs_take_images() -> None:
    assert takes_images(tensor("float32", 1, 224, 224, 3))
    assert takes_images(tensor("uint8", 28, 28, 1))
    for dtype, shape in (
        ("float32", (2, 8, 8, 3)),
        ("float32", (1, 3, 8, 8)),
        ("float32", (8, 8)),
        ("float32", (1, 0, 8, 3)),
        ("int32", (1, 8, 8, 3)),
    ):
        assert not takes_images(tensor(dtype, *shape)), (dtype, shape)


def test_an_image_for_one_of_several_inputs_needs_its_name(tmp_path: Path) -> None:
    image = picture(tmp_path / "photo.png", np.full((2, 2, 3), 9, np.uint8))
    specs = [
        tensor("uint8", 1, 2, 2, 3, name="left"),
        tensor("uint8", 1, 2, 2, 3, name="right"),
    ]
    with pytest.raises(UsageError, match="several inputs take images: say --image left=FILE"):
        read_all(specs, [], [str(image)], "-1..1", zeros=False)

    pair = [f"left={image}", f"right={image}"]
    assert read_all(specs, [], pair, "-1..1", zeros=False)["right"].max() == 9
    with pytest.raises(UsageError, match="input 'left' is given twice"):
        read_all(specs, [], [*pair, pair[0]], "-1..1", zeros=False)

    with pytest.raises(UsageError, match="takes no image"):
        read_all([tensor("int32", 4)], [], [f"x={image}"], "-1..1", zeros=False)


@pytest.mark.parametrize(
    "content", [b"", b"text", b"\x93NUMPY\x01\x00", b"PK\x05\x06" + b"\0" * 18]
)
def test_what_is_no_array_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(CommandError, match=r"x\.npy"):
        load_array(tmp_path / "x.npy")


def test_what_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"text")
    with pytest.raises(CommandError, match="no picture that Pillow reads"):
        load_image(tmp_path / "x.png", tensor("uint8", 1, 2, 2, 3), "-1..1")
