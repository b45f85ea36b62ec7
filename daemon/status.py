"""What `GetStatus` answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from switchgear.daemon import insight
from switchgear.ipc.process import rss_mb
from switchgear.ipc.record import Priority

if TYPE_CHECKING:
    from switchgear.daemon.lane import Lane
    from switchgear.daemon.service import Service
    from switchgear.daemon.session import Session
    from switchgear.daemon.varlink_server import Peer


def collect(service: Service, peer: Peer) -> dict[str, Any]:
    """The whole status, less what belongs to other users."""
    uid = peer.uid
    sees_all = service.is_operator(uid)
    group = service.pool.group_of(uid)
    connections = service.server.connections
    return {
        **service.info(),
        "rss_mb": rss_mb(),
        "problems": list(service.problems),
        "backends": backend_states(service),
        "devices": insight.devices(service),
        "workers": [
            _worker(lane) for lane in service.pool.lanes() if sees_all or lane.group == group
        ],
        "models": [model.to_json(uid) for model in service.models.all_for(uid)],
        "sessions": [
            _session(session)
            for session in service.sessions.all()
            if sees_all or session.peer.uid == uid
        ],
        "jobs": [
            {
                "job": job.identity,
                "kind": job.kind,
                "subject": job.subject,
                "state": job.state,
                "phase": job.phase,
            }
            for job in service.jobs.running(uid)
        ],
        "fingerprint": service.fingerprint_summary(),
        "connections": len(connections),
        "idle_connections": sum(connection.idle for connection in connections),
        "counters": service.counters(),
    }


def backend_states(service: Service) -> list[dict[str, str]]:
    """Each installed backend: ready where a worker of it has proven that it runs."""
    rows = []
    for name in sorted(service.router.installed):
        lanes = [lane for lane in service.pool.lanes() if lane.backend == name]
        facts = service.preparing.backends.get(name)
        absent = next((lane.absent for lane in lanes if lane.absent is not None), None)
        if absent is not None:
            state, reason = "absent", f"{absent.domain}:{absent.code} {absent.text}"
        elif name in service.probed:
            state, reason = "ready", service.probed[name]
        elif facts is not None and facts.state != "unknown":
            state = "ready" if facts.state == "present" else facts.state
            reason = facts.reason
        else:
            state, reason = "starting", "its known-answer run has not ended"

        row = {"name": name, "state": state, "reason": reason}
        if facts is not None and facts.state == "absent":
            row["again"] = service.preparing.proofs.outlook(name)

        rows.append(row)

    return rows


def _worker(lane: Lane) -> dict[str, Any]:
    worker = lane.worker
    return {
        "backend": lane.backend,
        "lane": lane.name,
        "group": lane.group,
        "pid": worker.pid if worker else 0,
        "state": worker.state if worker else "none",
        "threads": lane.threads,
        "engine": worker.engine if worker else "",
        "engine_version": worker.engine_version if worker else "",
        "restarts": lane.restarts,
        "last_end": lane.last_end,
        "queued": lane.queued,
        "running": lane.running,
        "rss_mb": worker.rss_mb if worker else 0.0,
    }


def _session(session: Session) -> dict[str, Any]:
    return {
        "session": session.identity,
        "uid": session.peer.uid,
        "pid": session.peer.pid,
        "model": session.model.label,
        "slots": session.options.slots,
        "priority": Priority(session.options.priority).name.lower(),
        "on_busy": session.options.on_busy,
        "in_flight": session.in_flight,
        "answered": session.answered,
        "epoch": session.epoch,
        "arena_bytes": session.layout.size_bytes,
    }
