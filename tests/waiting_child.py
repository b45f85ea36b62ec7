"""A process for tests of what starts processes: says that it runs, and waits to be ended."""

import signal

print("runs", flush=True)
signal.pause()
