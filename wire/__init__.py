"""The wire between processes: envelopes, links and their protection, errors, bounds."""

import os

# gRPC reads this when it is first imported, which is after this line in every process of ours. It would write lines of
# C++ to stderr for refused handshakes and ended connections, about which ours say the same in words.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Sockets are polled by the thread that takes gRPC's completions, not by threads of its event engine: with those a
# message is handed from thread to thread once more at each end, which made 250 us of what takes 170 (benches/hop.py).
# A gRPC that no longer knows these names polls as it likes; nothing else depends on it.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
