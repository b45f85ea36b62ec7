"""What the daemon tells of itself: metrics, and the trace of requests."""
