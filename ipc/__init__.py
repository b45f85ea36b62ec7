"""Bytes between processes: records, arenas, message framing. Standard library only."""
