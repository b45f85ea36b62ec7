"""One client of `switchgear bench`, in a process of its own.

Started with `--json-args {"socket", "model", "slots"}`. It says `{"ready": true}`, then answers
each line `SECONDS` on stdin with one line of latencies. It ends with its stdin. Its errors are
a line `{"error", "message"}` and exit status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from switchgear.ipc.errors import SwitchgearError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from switchgear.client import Request, Session, Tensor


_SEED: Final = 1


def make_inputs(tensors: Iterable[Tensor]) -> dict[str, NDArray[Any]]:
    """The same values in each process: floats of -1 to 1, bytes of all values, else zeros.

    Wider integers and booleans are zero, since they may be positions in a table.
    """
    import numpy as np

    random = np.random.default_rng(_SEED)
    values: dict[str, NDArray[Any]] = {}
    for tensor in tensors:
        if tensor.dtype.startswith("float"):
            drawn = random.uniform(-1, 1, tensor.shape)
            values[tensor.name] = np.asarray(drawn, tensor.dtype)
        elif tensor.dtype in ("int8", "uint8"):
            drawn_bytes = random.integers(0, 256, tensor.shape, np.uint8)
            values[tensor.name] = np.asarray(drawn_bytes).view(tensor.dtype)
        else:
            values[tensor.name] = np.zeros(tensor.shape, tensor.dtype)

    return values


def window(
    session: Session, values: Mapping[str, NDArray[Any]], seconds: float
) -> dict[str, Any]:
    """Runs frames for `seconds`, one a slot at least, all slots in flight; copies results out.

    A latency is from the call that sends a frame until its copied result is there.
    """
    latencies_ms: list[float] = []
    run_ms: list[float] = []
    flying: deque[tuple[float, Request]] = deque()
    begin = time.perf_counter()
    end = begin + seconds
    for _ in range(session.slots):
        flying.append((time.perf_counter(), session.submit(values)))

    while flying:
        sent, request = flying.popleft()
        result = request.result(copy=True)
        latencies_ms.append((time.perf_counter() - sent) * 1000)
        run_ms.append(result.run_ms)
        if time.perf_counter() < end:
            flying.append((time.perf_counter(), session.submit(values)))

    return {
        "latencies_ms": latencies_ms,
        "run_ms": run_ms,
        "seconds": time.perf_counter() - begin,
        "backend": result.backend,
    }


def _serve(arguments: Mapping[str, Any]) -> None:
    from switchgear.client import connect

    with (
        connect(arguments["socket"], reconnect=False) as client,
        client.open_session(arguments["model"], arguments["slots"]) as session,
    ):
        values = make_inputs(session.inputs)
        _say({"ready": True})
        for line in sys.stdin:
            _say(window(session, values, float(line)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m switchgear.daemon.cli.bench_client")
    parser.add_argument("--json-args", required=True, type=json.loads)
    try:
        _serve(parser.parse_args().json_args)
    except SwitchgearError as error:
        _say({"error": error.name, "message": error.text})
        return 1
    except KeyboardInterrupt:
        # The terminal's Ctrl-C goes to every process of the command.
        return 130

    return 0


def _say(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
