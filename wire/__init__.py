"""The wire between processes: envelopes, links and their protection, errors, bounds."""

import os

# gRPC reads this when it is first imported, which is after this line in every process of ours. It would write lines of
# C++ to stderr for refused handshakes and ended connections, about which ours say the same in words.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
