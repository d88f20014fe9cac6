"""The types of an envelope's payload, by number and by the name that a user gives. Every command reads the names, so
this module imports nothing; their numpy types are in `wire.envelopes.envelope`.
"""

DTYPE_TOKENS, DTYPE_F16, DTYPE_F32 = 1, 2, 3
DTYPE_BY_NAME = {"f16": DTYPE_F16, "f32": DTYPE_F32}
