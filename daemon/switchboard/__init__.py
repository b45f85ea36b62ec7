"""The switchboard: where the protocol, the routing and the sensors meet the daemon's lanes."""
