"""`switchgear infer`: runs a model once on files and shows what came out."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.cli import explain, inputs, models
from switchgear.daemon.cli.command import (
    DONE,
    CommandError,
    Subparsers,
    UsageError,
    add_command,
    add_socket,
    connected,
    print_json,
    say,
)
from switchgear.daemon.cli.progress import ProgressLine
from switchgear.daemon.cli.tables import cut, shape_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from switchgear.client import Client, Model, Result

_VALUES_SHOWN: Final = 6
# Shorter vectors are shown nearly whole anyway.
_TOP_FROM: Final = 11


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "infer",
        run,
        "run a model once on an image or on .npy files",
        "switchgear infer face.tflite --image photo.png",
        "switchgear infer classify --image photo.png --top 5",
        "switchgear infer generated:two_inputs --input a=a.npy --input b=b.npy --json",
    )
    parser.add_argument("model", metavar="MODEL", help=models.MODEL_HELP)
    parser.add_argument(
        "--image",
        metavar="[NAME=]FILE",
        action="append",
        default=[],
        help="a picture for the input that takes one",
    )
    parser.add_argument(
        "--scale",
        metavar="LOW..HIGH",
        choices=inputs.SCALES,
        default="-1..1",
        help="range of a picture's pixels in float inputs: -1..1 (default) or 0..1",
    )
    parser.add_argument(
        "--input",
        metavar="NAME=FILE.npy",
        action="append",
        default=[],
        help="a value for an input (may be repeated)",
    )
    parser.add_argument("--zeros", action="store_true", help="zeros for the other inputs")
    parser.add_argument(
        "--output",
        metavar="NAME=FILE.npy",
        action="append",
        default=[],
        help="write an output to a file (may be repeated)",
    )
    parser.add_argument("--backend", help="prefer this backend; the CPU stands in for it")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="this backend or an error; it is prepared first where that is still to be done",
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "fp32", "fp16", "int8", "int4"),
        default="auto",
        help="the lowest that may be used; auto: any that was checked, but int4",
    )
    parser.add_argument("--policy", help="such as max_performance or min_power")
    parser.add_argument("--explain", action="store_true", help="why it ran where it ran")
    parser.add_argument(
        "--top", type=int, metavar="N", help="the N largest of outputs of over 10 values"
    )
    add_socket(parser)


def run(options: argparse.Namespace) -> int:
    if options.strict and not options.backend:
        raise UsageError("--strict needs --backend")

    if options.top is not None and options.top < 1:
        raise UsageError("--top needs a number above 0")

    with connected(options) as client:
        model = models.loaded(client, options.model)
        targets = dict(
            inputs.split_pair(text, [t.name for t in model.outputs], "--output")
            for text in options.output
        )
        values = inputs.read_all(
            model.inputs, options.input, options.image, options.scale, zeros=options.zeros
        )
        result = _infer(client, model, values, options)
        reasons = client.explain(1) if options.explain else []

    for name, path in targets.items():
        _save(path, result[name])

    report = _report(model, result, options.top)
    if options.json:
        print_json({**report, "explain": reasons} if reasons else report)
    else:
        print("\n".join([*_lines(report), *(explain.in_words(each) for each in reasons)]))

    return DONE


def _infer(
    client: Client,
    model: Model,
    values: Mapping[str, NDArray[Any]],
    options: argparse.Namespace,
) -> Result:
    # Only what differs: the session then needs no shapes of its own.
    chosen = {
        tensor.name: values[tensor.name].shape
        for tensor in model.inputs
        if values[tensor.name].shape != tensor.shape and -1 in tensor.signature
    }
    if options.strict and not chosen and options.backend != "cpu":
        with ProgressLine(f"preparing {model.name}") as line:
            client.prepare_model(
                model, [options.backend], options.precision, on_progress=line.job
            )

    with client.open_session(
        model,
        1,
        backends=[options.backend] if options.backend else None,
        strict=options.strict,
        input_shapes=chosen or None,
        precision=options.precision,
        policy=options.policy,
    ) as session:
        return session.run(values, copy=True)


def _save(path: Path, value: NDArray[Any]) -> None:
    import numpy as np

    try:
        with path.open("wb") as file:
            np.save(file, value, allow_pickle=False)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None

    say(f"wrote {path}")


def _report(model: Model, result: Result, top: int | None) -> dict[str, Any]:
    return {
        "model": model.hash,
        "name": model.name,
        "outputs": {name: _output(value, top) for name, value in result.items()},
        "backend": result.backend,
        "precision": result.precision,
        "reason": result.reason,
        "tried": list(result.tried),
        "queue_ms": result.queue_ms,
        "run_ms": result.run_ms,
        "total_ms": result.total_ms,
    }


def _output(value: NDArray[Any], top: int | None) -> dict[str, Any]:
    import numpy as np

    flat = value.ravel()
    # JSON has no complex numbers.
    plain = [str(v) for v in flat.tolist()] if flat.dtype.kind == "c" else flat.tolist()
    told: dict[str, Any] = {
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "values": plain[:_VALUES_SHOWN],
    }
    if flat.size and flat.dtype.kind in "fiu":
        told |= {
            "min": flat.min().item(),
            "mean": float(flat.mean(dtype=np.float64)),
            "max": flat.max().item(),
        }
        if top is not None and flat.size >= _TOP_FROM:
            # Stable on the negated order: the first of equal values comes first.
            order = np.argsort(-flat.astype(np.float64), kind="stable")[:top]
            told["top"] = [{"index": int(i), "value": flat[i].item()} for i in order]

    return told


def _lines(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, told in report["outputs"].items():
        lines.append(cut(f"{name}: {told['dtype']} {shape_text(told['shape'])}"))
        if "min" in told:
            lines.append(
                f"  min {_number(told['min'])}  mean {_number(told['mean'])}"
                f"  max {_number(told['max'])}"
            )

        values = " ".join(_number(value) for value in told["values"])
        more = " ..." if _size(told["shape"]) > len(told["values"]) else ""
        lines.append(cut(f"  values {values or 'none'}{more}"))
        lines += [
            f"  top {place}  [{entry['index']}] {_number(entry['value'])}"
            for place, entry in enumerate(told.get("top", ()), 1)
        ]

    tried = f", tried before: {', '.join(report['tried'])}" if report["tried"] else ""
    lines.append(
        f"backend {report['backend']} {report['precision']}, {_why(report['reason'])}{tried}"
    )
    lines.append(
        f"queue {report['queue_ms']:.3f} ms, run {report['run_ms']:.3f} ms,"
        f" total {report['total_ms']:.3f} ms"
    )
    return lines


def _why(reason: str) -> str:
    return "because: " + reason.replace("_", " ")


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _size(shape: list[int]) -> int:
    size = 1
    for dim in shape:
        size *= dim

    return size
