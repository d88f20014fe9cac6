"""A client's connection: who may connect, how much is read and for how long, errors as JSON. Gateways share it."""
