"""The methods of `io.switchgear` and of `org.varlink.service`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypedDict

from switchgear.daemon import insight
from switchgear.daemon.jobs import Job
from switchgear.daemon.local import infer
from switchgear.daemon.options import Options
from switchgear.daemon.pair import ORDER_OF_PRECISIONS
from switchgear.daemon.parameters import InvalidParameter, Parameters
from switchgear.daemon.routing.policies import POLICIES
from switchgear.daemon.sessions import attach_socket
from switchgear.daemon.varlink_server import INTERFACE, Call
from switchgear.ipc.errors import BadRequest, PermissionDenied, ProtocolError, ShuttingDown
from switchgear.ipc.record import RECORD_VERSION, Priority
from switchgear.ipc.worker import MAX_SLOTS, spec_to_json

if TYPE_CHECKING:
    from switchgear.daemon.service import Service

SERVICE: Final = "org.varlink.service"
SERVICE_DESCRIPTION: Final = """\
# What every varlink service answers
interface org.varlink.service

method GetInfo() -> (
  vendor: string,
  product: string,
  version: string,
  url: string,
  interfaces: []string
)

method GetInterfaceDescription(interface: string) -> (description: string)

error InterfaceNotFound (interface: string)

error MethodNotFound (method: string)

error MethodNotImplemented (method: string)

error InvalidParameter (parameter: string)

error PermissionDenied ()

error ExpectedMore ()
"""
PRIORITIES: Final = {"high": Priority.HIGH, "normal": Priority.NORMAL, "batch": Priority.BATCH}
ON_BUSY: Final = ("wait", "reject", "replace_oldest")
PRECISIONS: Final = ("auto", *ORDER_OF_PRECISIONS)
MAX_TUNE_S: Final = 86400
DEFAULT_SLOTS: Final = 2
MAX_OUTPUT_BYTES: Final = 1 << 30

MAX_LIMIT_MS: Final = 3_600_000.0


class Where(TypedDict):
    """The options of a session that say where it runs."""

    backends: tuple[str, ...]
    strict: bool
    precision: str
    policy: str


Method = Callable[[Call, Parameters], Awaitable[None]]


def description() -> str:
    """The text of the interface, as it is shipped."""
    return (files("switchgear.ipc") / f"{INTERFACE}.varlink").read_text(encoding="utf-8")


class Interface:
    """Dispatches calls to the service. Every method is here, in the order of the interface."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._description = description()
        self.methods: dict[str, Method] = {
            f"{SERVICE}.GetInfo": self._service_info,
            f"{SERVICE}.GetInterfaceDescription": self._interface_description,
            f"{INTERFACE}.GetInfo": self._get_info,
            f"{INTERFACE}.GetStatus": self._get_status,
            f"{INTERFACE}.GetMetrics": self._get_metrics,
            f"{INTERFACE}.WatchTrace": self._watch_trace,
            f"{INTERFACE}.LoadModel": self._load_model,
            f"{INTERFACE}.WatchJob": self._watch_job,
            f"{INTERFACE}.CancelJob": self._cancel_job,
            f"{INTERFACE}.ListModels": self._list_models,
            f"{INTERFACE}.DescribeModel": self._describe_model,
            f"{INTERFACE}.CheckModel": self._check_model,
            f"{INTERFACE}.PrepareShapes": self._prepare_shapes,
            f"{INTERFACE}.PrepareModel": self._prepare_model,
            f"{INTERFACE}.UnloadModel": self._unload_model,
            f"{INTERFACE}.OpenSession": self._open_session,
            f"{INTERFACE}.Infer": self._infer,
            f"{INTERFACE}.Explain": self._explain,
            f"{INTERFACE}.WatchEvents": self._watch_events,
            f"{INTERFACE}.Operate": self._operate,
            f"{INTERFACE}.GetFingerprint": self._get_fingerprint,
            f"{INTERFACE}.RunFingerprint": self._run_fingerprint,
        }

    async def dispatch(self, call: Call) -> None:
        """Runs one call; its errors become error replies in the transport."""
        method = self.methods.get(call.method)
        if method is None:
            interface = call.method.rpartition(".")[0]
            if interface in (INTERFACE, SERVICE):
                call.fail(f"{SERVICE}.MethodNotFound", {"method": call.method[:256]})
            else:
                call.fail(f"{SERVICE}.InterfaceNotFound", {"interface": interface[:256]})

            return

        try:
            await method(call, Parameters(call.parameters))
        except InvalidParameter as error:
            call.fail(f"{SERVICE}.InvalidParameter", {"parameter": str(error)[:256]})
        except ProtocolError as error:
            # A descriptor that is not there; the stream itself is sound.
            call.fail(f"{SERVICE}.InvalidParameter", {"parameter": str(error)})

    # org.varlink.service

    async def _service_info(self, call: Call, parameters: Parameters) -> None:
        parameters.done()
        call.reply(
            {
                "vendor": "Switchgear",
                "product": "switchgear",
                "version": self._service.version,
                "url": "",
                "interfaces": [SERVICE, INTERFACE],
            }
        )

    async def _interface_description(self, call: Call, parameters: Parameters) -> None:
        name = parameters.string("interface")
        parameters.done()
        texts = {SERVICE: SERVICE_DESCRIPTION, INTERFACE: self._description}
        if name in texts:
            call.reply({"description": texts[name]})
        else:
            call.fail(f"{SERVICE}.InterfaceNotFound", {"interface": name[:256]})

    # io.switchgear

    async def _get_info(self, call: Call, parameters: Parameters) -> None:
        parameters.done()
        call.reply({**self._service.info(), "record_version": RECORD_VERSION})

    async def _get_status(self, call: Call, parameters: Parameters) -> None:
        parameters.done()
        call.reply(self._service.status(call.peer))

    async def _get_metrics(self, call: Call, parameters: Parameters) -> None:
        parameters.done()
        call.reply({"text": await self._service.metrics.text(call.peer.uid)})

    async def _watch_trace(self, call: Call, parameters: Parameters) -> None:
        seconds = parameters.integer("seconds")
        parameters.done()
        if call.more:
            await self._service.metrics.tracing.stream(call, seconds)
        else:
            call.fail(f"{SERVICE}.ExpectedMore", {})

    def _serving(self) -> Service:
        """The service, for what is new work.

        :raises ShuttingDown: it is stopping.
        """
        if self._service.stopping:
            raise ShuttingDown

        return self._service

    async def _load_model(self, call: Call, parameters: Parameters) -> None:
        service = self._serving()
        index = parameters.integer("descriptor")
        name = parameters.optional_string("name")
        parameters.done()
        uid = call.peer.uid
        fd = call.descriptors.take(index)
        job = service.load_model(fd, name, uid)
        call.reply({"job": job.identity})

    async def _watch_job(self, call: Call, parameters: Parameters) -> None:
        job = self._service.jobs.get(parameters.integer("job"), call.peer.uid)
        parameters.done()
        version = job.version
        while call.more and not job.ended:
            call.reply(job.to_json(), continues=True)
            version = await job.changed(version)

        call.reply(job.to_json())

    async def _cancel_job(self, call: Call, parameters: Parameters) -> None:
        job = self._service.jobs.get(parameters.integer("job"), call.peer.uid)
        parameters.done()
        job.cancel()
        call.reply({})

    async def _list_models(self, call: Call, parameters: Parameters) -> None:
        parameters.done()
        uid = call.peer.uid
        models = self._service.models.all_for(uid)
        call.reply({"models": [model.to_json(uid) for model in models]})

    async def _describe_model(self, call: Call, parameters: Parameters) -> None:
        model = self._service.models.resolve(parameters.string("model"), call.peer.uid)
        parameters.done()
        call.reply({"model": model.to_json(call.peer.uid)})

    async def _check_model(self, call: Call, parameters: Parameters) -> None:
        service = self._serving()
        uid = call.peer.uid
        model = service.models.resolve(parameters.string("model"), uid)
        parameters.done()

        async def work(job: Job) -> dict[str, object]:
            await service.models.check(job, model, uid)
            return model.to_json(uid)

        call.reply({"job": service.jobs.start("check", model.label, uid, work).identity})

    async def _prepare_shapes(self, call: Call, parameters: Parameters) -> None:
        service = self._serving()
        uid = call.peer.uid
        model = service.models.resolve(parameters.string("model"), uid)
        shapes = parameters.shapes("input_shapes", required=True)
        parameters.done()

        async def work(job: Job) -> dict[str, object]:
            await service.models.prepare_shapes(job, model, shapes)
            return {}

        call.reply({"job": service.jobs.start("shapes", model.label, uid, work).identity})

    async def _prepare_model(self, call: Call, parameters: Parameters) -> None:
        service = self._serving()
        uid = call.peer.uid
        model = service.models.resolve(parameters.string("model"), uid)
        backends = parameters.strings("backends")
        precision = parameters.choice("precision", "auto", PRECISIONS)
        tune_s = parameters.optional_integer("tune_s", 0, 0, MAX_TUNE_S)
        again = parameters.boolean("again")
        parameters.done()
        if (tune_s or again) and not (service.is_operator(uid) or uid in model.users):
            raise PermissionDenied("only who loaded a model has it prepared again")

        job = service.prepare_model(
            model, uid, backends, precision, tune_s=tune_s or 0, again=again
        )
        call.reply({"job": job.identity})

    async def _unload_model(self, call: Call, parameters: Parameters) -> None:
        uid = call.peer.uid
        model = self._service.models.resolve(parameters.string("model"), uid)
        force = parameters.boolean("force")
        parameters.done()
        self._service.unload_model(model, uid, force=force)
        call.reply({})

    async def _open_session(self, call: Call, parameters: Parameters) -> None:
        service = self._serving()
        model = service.models.resolve(parameters.string("model"), call.peer.uid)
        slots = parameters.optional_integer("slots", DEFAULT_SLOTS, 1, MAX_SLOTS)
        on_busy = parameters.choice("on_busy", "wait", ON_BUSY)
        priority = PRIORITIES[parameters.choice("priority", "normal", PRIORITIES)]
        where = self._backends(parameters)
        slow_ms = parameters.optional_real("slow_ms", 0.0, MAX_LIMIT_MS)
        recover_ms = parameters.optional_real("recover_ms", 0.0, MAX_LIMIT_MS)
        events = parameters.boolean("events")
        hedge = parameters.boolean("hedge")
        shapes = parameters.shapes("input_shapes")
        capacity = parameters.optional_integer(
            "output_capacity_bytes", None, 1, MAX_OUTPUT_BYTES
        )
        parameters.done()
        options = Options(
            slots or DEFAULT_SLOTS,
            on_busy,
            priority,
            **where,
            slow_ms=slow_ms,
            recover_ms=recover_ms,
            events=events,
            hedge=hedge,
        )
        opened = await service.sessions.open(call.peer, model, options, shapes, capacity)
        session = opened.session
        try:
            client_end = attach_socket(session, call.connection.socket)
            if events:
                service.session_events.subscribe(session)
        except BaseException:
            session.end()
            raise

        with client_end:
            reply: dict[str, Any] = {
                "session": session.identity,
                "epoch": session.epoch,
                "slots": session.options.slots,
                "output_slots": len(session.output_slots),
                "socket": 0,
                "arena": 1,
                "layout": session.layout_json,
                "inputs": [spec_to_json(spec) for spec in opened.inputs],
                "outputs": [spec_to_json(spec) for spec in opened.outputs],
                "state": model.state,
            }
            call.reply(reply, [client_end.fileno(), session.arena_fd])

    def _backends(self, parameters: Parameters) -> Where:
        """Where a session may run, and by which policy."""
        wanted = parameters.strings("backends")
        strict = parameters.boolean("strict")
        lowest = parameters.choice("precision", "auto", PRECISIONS)
        policy = parameters.optional_string("policy") or ""
        if policy and policy not in POLICIES:
            raise BadRequest(f"no policy {policy[:64]!r}; there is {', '.join(POLICIES)}")

        return {
            "backends": self._service.router.check(wanted, strict=strict),
            "strict": strict,
            "precision": "" if lowest == "auto" else lowest,
            "policy": policy,
        }

    async def _infer(self, call: Call, parameters: Parameters) -> None:
        service = self._serving()
        model = service.models.resolve(parameters.string("model"), call.peer.uid)
        values = parameters.values("inputs")
        timeout_us = parameters.optional_integer("timeout_us", 0, 0, 2**53)
        where = self._backends(parameters)
        parameters.done()
        options = Options(1, "wait", Priority.NORMAL, **where)
        opened = await service.sessions.open(call.peer, model, options, {}, None)
        try:
            call.reply(await infer(opened, values, timeout_us or 0))
        finally:
            opened.session.end()

    async def _explain(self, call: Call, parameters: Parameters) -> None:
        last = parameters.optional_integer("last", 1, 1, insight.MAX_DECISIONS)
        session = parameters.optional_integer("session", None, 0, 2**32 - 1)
        request = parameters.optional_integer("request", None, 0, 2**63 - 1)
        parameters.done()
        uid = call.peer.uid
        found = insight.decisions(self._service, uid, last or 1, session, request)
        call.reply({"decisions": found})

    async def _watch_events(self, call: Call, parameters: Parameters) -> None:
        parameters.done()
        events = self._service.events
        sees = insight.sees_model(self._service, call.peer.uid)
        if not call.more:
            call.reply({"events": events.last(sees), "lost": 0})
            return

        with events.subscribe(sees) as subscription:
            call.reply({"events": events.last(sees), "lost": 0}, continues=True)
            while True:
                event = await subscription.next()
                lost, subscription.lost = subscription.lost, 0
                call.reply({"events": [event], "lost": lost}, continues=True)

    async def _operate(self, call: Call, parameters: Parameters) -> None:
        level = parameters.choice("level", "backend", insight.LEVELS)
        name = parameters.string("name")
        word = parameters.choice("word", "auto", insight.WORDS)
        parameters.done()
        if not self._service.is_operator(call.peer.uid):
            raise PermissionDenied("only root and the daemon's own user operate devices")

        insight.operate(self._service, level, name, word)
        call.reply({})

    async def _get_fingerprint(self, call: Call, parameters: Parameters) -> None:
        form = parameters.optional_string("format")
        parameters.done()
        fingerprinting = await self._service.fingerprinting()
        call.reply(fingerprinting.describe(form))

    async def _run_fingerprint(self, call: Call, parameters: Parameters) -> None:
        service = self._serving()
        quick = parameters.optional_boolean("quick")
        force = parameters.boolean("force")
        tests = parameters.strings("tests")
        parameters.done()
        uid = call.peer.uid
        if not service.is_operator(uid):
            raise PermissionDenied("only root and the daemon's own user measure the device")

        fingerprinting = await service.fingerprinting()
        self._serving()
        job = fingerprinting.run(uid, quick=quick, force=force, tests=tests)
        call.reply({"job": job.identity})
