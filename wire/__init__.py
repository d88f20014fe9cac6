"""The wire between processes: envelopes, links and their protection, errors, bounds."""

import os

# gRPC reads this when it is first imported, which is after this line in every process of ours. It would write lines of
# C++ to stderr for refused handshakes and ended connections, about which ours say the same in words.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# The thread that takes gRPC's completions also polls the sockets. Threads of gRPC's event engine would add one more
# hand-over between threads at each end: 250 us instead of 170 (benches/hop.py). A gRPC that no longer knows these names
# polls as it likes; nothing else depends on it.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# Names are resolved as in every other program here. gRPC's own resolver also asks a DNS server about names in
# /etc/hosts, and waits for one that cannot be reached; it knows no names of mDNS (.local).
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
