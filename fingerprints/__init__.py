"""The device fingerprint: the micro-benchmarks, the profile and its store."""
