import os

# Read by gRPC when it is first imported. Children are separate programs, never forks that keep using gRPC; without this
# it prints a complaint whenever a child is started while a channel is open.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
