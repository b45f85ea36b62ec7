"""Models that are written here, tensor by tensor, instead of being fetched.

Each function returns the bytes of a .tflite file and its docstring names the inputs and
outputs. The bytes depend on nothing but the arguments and the version of the schema. Only that
schema, which comes with LiteRT, flatbuffers and numpy are used: no engine is loaded.
"""

from switchgear.backends.generate.arithmetic import dynamic_batch, two_inputs
from switchgear.backends.generate.cost import multiply_adds, multiply_adds_by_operator
from switchgear.backends.generate.dynamic_output import positive_positions, ramp
from switchgear.backends.generate.identity import IDENTITY_DTYPES, identity, leading_values
from switchgear.backends.generate.lookup import lookup, lookup_table
from switchgear.backends.generate.mobilenet import mobilenet_v1
from switchgear.backends.generate.slow import slow, slow_reference
from switchgear.backends.generate.state import accumulator

__all__ = [
    "IDENTITY_DTYPES",
    "accumulator",
    "dynamic_batch",
    "identity",
    "leading_values",
    "lookup",
    "lookup_table",
    "mobilenet_v1",
    "multiply_adds",
    "multiply_adds_by_operator",
    "positive_positions",
    "ramp",
    "slow",
    "slow_reference",
    "two_inputs",
]
