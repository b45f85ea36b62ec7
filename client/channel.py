"""The socket of a session for threads: one of those that wait receives for all of them."""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from switchgear.client import forks
from switchgear.client.core import SessionCore
from switchgear.client.events import SessionEvent
from switchgear.client.request import Pending, RequestOptions
from switchgear.client.result import Result
from switchgear.ipc.errors import ProtocolError, TimedOut
from switchgear.ipc.record import RECORD_BYTES

# One more than a record: a longer packet must not look like one.
RECEIVE_BYTES: Final = RECORD_BYTES + 1


class Channel:
    """Owns the socket. Any thread may call any method."""

    def __init__(self, core: SessionCore, sock: socket.socket) -> None:
        """Takes over a connected, blocking SOCK_SEQPACKET socket."""
        self.core = core
        self._sock = sock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._receiving = False
        self._waiting = 0
        forks.watch(self)

    def send(self, request: Pending, slot: int, options: RequestOptions, holds: bool) -> None:
        """Sends a request; does not wait for the reply.

        :raises SlotBusy: a request is in flight in the slot.
        :raises ConnectionLost: the session is over, and the request was not sent.
        """
        with self._lock:
            self._send(request, slot, options, holds)

    def exchange(
        self,
        request: Pending,
        slot: int,
        options: RequestOptions,
        timeout_s: float | None,
    ) -> None:
        """`send` and `wait` in one; the request holds the slot, and is cancelled when the wait
        ends early. ConnectionLost says that it was not sent.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._send(request, slot, options, True)
            try:
                self._wait(request, until)
            except BaseException:
                self._cancel(request)
                raise

    def exchange_plain(
        self, slot: int, holds: bool, make: Callable[[Channel], Pending]
    ) -> Result | Pending | None:
        """`exchange` for a frame without options, by the short way of the core.

        The result; or a request (made by `make`) that has ended otherwise; or None where
        nothing was sent, because the frame has to go the ordinary way.
        """
        core = self.core
        with self._lock:
            begun = None if self._receiving else core.begin_plain(slot)
            if begun is None:
                return None

            interrupted = False
            try:
                self._sock.send(begun[2], socket.MSG_NOSIGNAL)
            except OSError:
                core.withdraw_plain(begun, slot)
                return None

            # `_receive_packet`, without its calls.
            self._receiving = True
            self._lock.release()
            try:
                data = self._sock.recv(RECEIVE_BYTES)
            except (OSError, ValueError):
                data = b""
            except BaseException:
                interrupted = True
                raise
            finally:
                self._lock.acquire()
                self._receiving = False
                if self._waiting:
                    self._changed.notify_all()

                if interrupted:
                    request = make(self)
                    core.adopt_plain(request, begun, slot, holds)
                    self._cancel(request)

            result = core.end_plain(data, begun, slot)
            if result is not None:
                return result

            # An error, a fresh output slot, or the reply to another thread's request.
            request = make(self)
            core.adopt_plain(request, begun, slot, holds)
            try:
                self._handle(data)
                self._wait(request, None)
            except BaseException:
                self._cancel(request)
                raise

            return request

    def _send(self, request: Pending, slot: int, options: RequestOptions, holds: bool) -> None:
        record = self.core.begin(request, slot, options, holds)
        try:
            self._sock.send(record, socket.MSG_NOSIGNAL)
        except OSError as error:
            self.core.withdraw(request)
            self._await_loss()
            raise self.core.loss() from error

    def cancel(self, request: Pending) -> None:
        """Asks for the end of a request; its one reply still comes."""
        with self._lock:
            self._cancel(request)

    def _cancel(self, request: Pending) -> None:
        record = self.core.cancel(request)
        if record is not None:
            try:
                self._sock.send(record, socket.MSG_NOSIGNAL)
            except OSError:
                self._await_loss()

    def give_back(self, slot: int) -> None:
        """Makes a slot that the caller holds free: now, or when its request has ended."""
        with self._lock:
            self.core.give_back(slot)

    def wait(self, request: Pending, timeout_s: float | None) -> None:
        """Blocks until the request has ended.

        :raises TimedOut: it has not within `timeout_s`; it is still in flight.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._wait(request, until)

    def _wait(self, request: Pending, until: float | None) -> None:
        while request.fields is None and request.error is None:
            self._await_packet(until)

    def _await_packet(self, until: float | None) -> None:
        """Receives one packet, or waits until the thread that receives has one.

        :raises TimedOut: none came.
        """
        if not self._receiving:
            self._receive(until)
            return

        self._waiting += 1
        try:
            self._changed.wait(None if until is None else _left_s(until))
        finally:
            self._waiting -= 1

    def poll(self) -> None:
        """Handles the replies that are there already; does not block."""
        with self._lock:
            while not self._receiving and self.core.lost is None:
                try:
                    data = self._sock.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                except OSError:
                    data = b""

                self._handle(data)

            self._notify()

    def next_event(self, timeout_s: float | None) -> SessionEvent | None:
        """The next event; None when none has come within `timeout_s`.

        :raises ConnectionLost: the session is over.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if until is not None:
            self.poll()

        with self._lock:
            while (event := self.core.events.take()) is None:
                if self.core.lost is not None:
                    raise self.core.loss()

                try:
                    self._await_packet(until)
                except TimedOut:
                    return None

            return event

    def close(self) -> None:
        """Ends the session; requests in flight end with ConnectionLost. May be repeated."""
        with self._lock:
            self.core.lose("the session was closed")
            self.core.forget()
            if self._receiving:
                try:
                    self._sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            else:
                self._sock.close()

            self._notify()

    def after_fork(self) -> None:
        # Another thread of the parent may have held the lock: it is not there to release it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._receiving = False
        self._waiting = 0
        self._sock.close()
        self.core.lose("the process was forked: the session stays the parent's")

    def _receive(self, until: float | None) -> None:
        """Receives and handles one packet; the lock is free while it blocks."""
        self._handle(self._receive_packet(until))

    def _receive_packet(self, until: float | None) -> bytes:
        """One packet, empty at the end; the lock is free while it blocks."""
        self._receiving = True
        self._lock.release()
        try:
            if until is not None:
                _wait_readable(self._sock, until)

            return self._sock.recv(RECEIVE_BYTES)
        except TimedOut:
            raise
        except (OSError, ValueError):
            return b""
        finally:
            self._lock.acquire()
            self._receiving = False
            if self._waiting:
                self._changed.notify_all()

    def _handle(self, data: bytes) -> None:
        if self.core.lost is not None:
            self._sock.close()
        elif not data:
            self._lose()
        else:
            try:
                self.core.receive(data)
            except ProtocolError:
                self._lose()
                return

            self._close_if_lost()

    def _close_if_lost(self) -> None:
        if self.core.lost is not None:
            self._sock.close()

    def _lose(self) -> None:
        """Ends the session, after what the daemon said before it went."""
        take_in(self.core, self._sock)
        self.core.lose()
        self._sock.close()
        self._notify()

    def _await_loss(self) -> None:
        """After a send failed: the thread that receives finds out why, or else this one."""
        while self._receiving and self.core.lost is None:
            self._waiting += 1
            try:
                self._changed.wait()
            finally:
                self._waiting -= 1

        if self.core.lost is None:
            self._lose()

    def _notify(self) -> None:
        if self._waiting:
            self._changed.notify_all()


def _left_s(until: float) -> float:
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimedOut("no reply within the time limit; the request is still in flight")

    return left_s


def _wait_readable(sock: socket.socket, until: float) -> None:
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    while not ready.poll(_left_s(until) * 1000):
        pass


def take_in(core: SessionCore, sock: socket.socket) -> None:
    """Handles what is in the socket of a session that is over; does not block."""
    resets = 0
    while True:
        try:
            data = sock.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            if not data:
                break

            core.receive(data)
        except ProtocolError:
            break
        except OSError as error:
            # Told once, and before the packets that came earlier.
            resets += 1
            if error.errno != errno.ECONNRESET or resets > 1:
                break
