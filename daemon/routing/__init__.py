"""Where a request runs: estimates, policies, the choice, and the record that explains it.

Pure: no clock, no input or output, no event loop, and the same inputs give the same choice.
"""
