"""The tests of the fingerprint: each runs in a process of its own, started by the runner.

Only such a process may import the modules in here: they load drivers, engines and numpy.
"""
